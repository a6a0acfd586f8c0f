"""Runs one step on the model: fills the persistent tensors, runs the layers, samples. Knows no request."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from vllm_lite.engine.step import Int32Array, StepInput, StepOutput
from vllm_lite.kernels.cpu import CpuKernels
from vllm_lite.kernels.cuda import CudaKernels
from vllm_lite.layers.context import StepTensors
from vllm_lite.models.llama import LlamaForCausalLM
from vllm_lite.ops.kv_cache import copy_blocks
from vllm_lite.ops.workspace import Workspace
from vllm_lite.worker import kv_cache
from vllm_lite.worker.dtype import CPU_FLAG, is_native
from vllm_lite.worker.programs import CapturedProgram, EagerProgram, Program
from vllm_lite.worker.sampler import is_plain_greedy, sample


class ModelRunner:
    """Owns the cache, the activations and the step's tensors, all of maximal size.

    The tensors a step is read from keep their addresses for life. The model's parameters must have been filled.
    With `cuda`, the ops launch its kernels where they can; they must hold what `kernels_for` lists for the model.
    With `cpu`, the ops call those, captured once unless `enforce_eager`; the model's weights must have been packed.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        *,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        block_size: int,
        num_blocks: int,
        cuda: CudaKernels | None = None,
        cpu: CpuKernels | None = None,
        enforce_eager: bool = False,
    ) -> None:
        device, dtype = model.options.device, model.options.dtype
        self.model = model
        self.workspace = Workspace(device, native_dtypes(device), cuda=cuda, cpu=cpu)
        self.activations = model.new_activations(max_num_batched_tokens)
        self.caches = kv_cache.allocate(
            model.config, dtype=dtype, block_size=block_size, num_blocks=num_blocks, device=device
        )
        max_blocks = -(-max_model_len // block_size)

        def int32(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.tensors = StepTensors(
            token_ids=int32(max_num_batched_tokens),
            positions=int32(max_num_batched_tokens),
            slot_mapping=int32(max_num_batched_tokens),
            query_starts=int32(max_num_seqs + 1),
            context_lens=int32(max_num_seqs),
            block_tables=int32(max_num_seqs, max_blocks),
            token_indices=int32(max_num_seqs),
        )
        self.logits = torch.empty(max_num_seqs, model.config.vocab_size, dtype=torch.float32, device=device)
        self.greedy_ids = int32(max_num_seqs)
        eager = EagerProgram(
            model, self.workspace, self.tensors, self.activations, self.caches, self.logits, self.greedy_ids
        )
        self._program: Program = eager if cpu is None or enforce_eager else CapturedProgram(eager, cpu)

    def run(self, step: StepInput) -> StepOutput:
        """Computes the step and picks a token for each sampled row."""
        sampling = step.sampling
        shape = dataclasses.replace(step.shape, num_rows=sampling.num_rows)
        with torch.inference_mode():
            self.workspace.begin_step()
            self._fill(step)
            self._copy_blocks(step)
            self._program.forward(shape)
            if shape.num_rows == 0:
                return StepOutput(np.empty(0, np.int32))
            if is_plain_greedy(sampling):
                self._program.greedy(shape)
                return StepOutput(self.greedy_ids[: shape.num_rows].to("cpu", copy=True).numpy())
            self._program.logits(shape)
            return StepOutput(sample(self.logits[: shape.num_rows], sampling))

    def _fill(self, step: StepInput) -> None:
        tensors = self.tensors
        for tensor, array in (
            (tensors.token_ids, step.token_ids),
            (tensors.positions, step.positions),
            (tensors.slot_mapping, step.slot_mapping),
            (tensors.query_starts, step.query_starts),
            (tensors.context_lens, step.context_lens),
            (tensors.token_indices, step.sampling.token_indices),
        ):
            tensor[: len(array)] = torch.tensor(array)
        num_seqs, num_blocks = step.block_tables.shape
        tensors.block_tables[:num_seqs, :num_blocks] = torch.tensor(step.block_tables)

    def _copy_blocks(self, step: StepInput) -> None:
        if len(step.copy_sources):
            all_caches = [tensor for cache in self.caches for tensor in (cache.key, cache.value)]
            copy_blocks(
                self.workspace, all_caches, self._indices(step.copy_sources), self._indices(step.copy_destinations)
            )

    def _indices(self, array: Int32Array) -> torch.Tensor:
        return torch.tensor(array, dtype=torch.int64, device=self.model.options.device)


def native_dtypes(device: torch.device) -> frozenset[torch.dtype]:
    """What the device multiplies in at full speed."""
    return frozenset({torch.float32, *(dtype for dtype in CPU_FLAG if is_native(dtype, device))})
