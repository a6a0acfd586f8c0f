"""What is handed down through the layers: how to build them, and the step to run. Knows no layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from vllm_lite.engine.step import StepShape
from vllm_lite.ops.workspace import Workspace

NewMemory: TypeAlias = Callable[[tuple[int, int], torch.dtype], torch.Tensor]


@dataclass(frozen=True)
class LayerOptions:
    """What every layer of a model has in common."""

    dtype: torch.dtype
    device: torch.device
    panel_rows: int = 1
    """Of a weight, what belongs together: kernels that pack weights read whole panels."""
    matrices: list[torch.Tensor] = field(default_factory=list)
    """Every weight that layers made by `matrix`, with all its memory: what is packed once the weights are loaded."""
    new_memory: NewMemory | None = None
    """Where weights of a shape and dtype lie, if not wherever torch puts them."""

    def panelled(self, num_rows: int) -> int:
        """The rows of all panels that it takes."""
        return -(-num_rows // self.panel_rows) * self.panel_rows

    def matrix(self, num_rows: int, size: int) -> torch.Tensor:
        """An uninitialised weight [num_rows, size]; what fills up its last panel is 0."""
        shape = (self.panelled(num_rows), size)
        if self.new_memory is None:
            memory = torch.empty(shape, dtype=self.dtype, device=self.device)
        else:
            memory = self.new_memory(shape, self.dtype)
        memory[num_rows:] = 0
        self.matrices.append(memory)
        return memory[:num_rows]


@dataclass(frozen=True)
class StepTensors:
    """The step's numbers in persistent int32 tensors of maximal size; `engine/step.py` says what each one holds."""

    token_ids: torch.Tensor
    """[max_tokens]"""
    positions: torch.Tensor
    """[max_tokens]"""
    slot_mapping: torch.Tensor
    """[max_tokens]"""
    query_starts: torch.Tensor
    """[max_seqs + 1]"""
    context_lens: torch.Tensor
    """[max_seqs]"""
    block_tables: torch.Tensor
    """[max_seqs, max_blocks]"""
    token_indices: torch.Tensor
    """[max_seqs]"""


@dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer, each [num_blocks, num_kv_heads, block_size, head_dim]."""

    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True)
class ForwardContext:
    """One step on its way through the layers."""

    workspace: Workspace
    shape: StepShape
    tensors: StepTensors
