"""How a step gets through the model: layer by layer in Python, or as a list of kernel calls captured once.

A program reads the runner's persistent tensors and writes its logits or ids; it knows a step by its shape alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_lite.engine.step import StepShape
from vllm_lite.kernels.cpu import CapturedStep, CpuKernels
from vllm_lite.layers.context import ForwardContext, LayerCache, StepTensors
from vllm_lite.models.llama import Activations, LlamaForCausalLM
from vllm_lite.ops.workspace import Workspace


class Program(Protocol):
    """The three parts of a step, in this order; the last two are alternatives."""

    def forward(self, shape: StepShape) -> None:
        """Computes the step's tokens and fills the caches."""

    def logits(self, shape: StepShape) -> None:
        """The logits of the sampled rows."""

    def greedy(self, shape: StepShape) -> None:
        """The most likely ids of the sampled rows."""


@dataclass(frozen=True)
class EagerProgram:
    """Every op called from Python, in each step."""

    model: LlamaForCausalLM
    workspace: Workspace
    tensors: StepTensors
    activations: Activations
    caches: Sequence[LayerCache]
    logits_out: torch.Tensor
    """[max_seqs, vocab_size] float32"""
    greedy_out: torch.Tensor
    """[max_seqs] int32"""

    def forward(self, shape: StepShape) -> None:
        """See `Program`."""
        self.model.forward(self._context(shape), self.activations, self.caches)

    def logits(self, shape: StepShape) -> None:
        """See `Program`."""
        self.model.logits(self._context(shape), self.activations, self.logits_out)

    def greedy(self, shape: StepShape) -> None:
        """See `Program`."""
        self.model.greedy(self._context(shape), self.activations, self.greedy_out)

    def _context(self, shape: StepShape) -> ForwardContext:
        return ForwardContext(self.workspace, shape, self.tensors)


class CapturedProgram:
    """The CPU kernels' calls of an eager program, captured once: one list each for steps of every shape."""

    def __init__(self, eager: EagerProgram, kernels: CpuKernels) -> None:
        self._kernels = kernels
        self._forward = self._capture(eager.forward)
        self._logits = self._capture(eager.logits)
        self._greedy = self._capture(eager.greedy)

    def _capture(self, part: Callable[[StepShape], None]) -> CapturedStep:
        with self._kernels.capture() as calls:
            part(StepShape(0, 0, 0, 0, 0))
        return calls.finished()

    def forward(self, shape: StepShape) -> None:
        """See `Program`."""
        self._kernels.replay(self._forward, shape)

    def logits(self, shape: StepShape) -> None:
        """See `Program`."""
        self._kernels.replay(self._logits, shape)

    def greedy(self, shape: StepShape) -> None:
        """See `Program`."""
        self._kernels.replay(self._greedy, shape)
