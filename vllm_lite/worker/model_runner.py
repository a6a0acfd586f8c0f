"""Runs one step on the model: fills the persistent tensors, runs the layers, samples. Knows no request."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from vllm_lite.engine.step import Int32Array, StepInput, StepOutput
from vllm_lite.kernels.cuda import CudaKernels
from vllm_lite.layers.context import ForwardContext
from vllm_lite.models.llama import LlamaForCausalLM
from vllm_lite.ops.kv_cache import copy_blocks
from vllm_lite.ops.workspace import Workspace
from vllm_lite.worker import kv_cache
from vllm_lite.worker.dtype import CPU_FLAG, is_native
from vllm_lite.worker.sampler import is_plain_greedy, sample
from vllm_lite.worker.step_buffers import StepBuffers
from vllm_lite.worker.transfer import to_device


class ModelRunner:
    """Owns the cache, the activations and the step's tensors, all of maximal size.

    The tensors a step is read from keep their addresses for life. The model's parameters must have been filled.
    With `cuda`, the ops launch its kernels where they can; they must hold what `kernels_for` lists for the model.
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
    ) -> None:
        device, dtype = model.options.device, model.options.dtype
        self.model = model
        self.workspace = Workspace(device, native_dtypes(device), cuda=cuda)
        self.activations = model.new_activations(max_num_batched_tokens)
        self.caches = kv_cache.allocate(
            model.config, dtype=dtype, block_size=block_size, num_blocks=num_blocks, device=device
        )
        self.buffers = StepBuffers(
            device,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
        )
        self.tensors = self.buffers.tensors
        self.logits = torch.empty(max_num_seqs, model.config.vocab_size, dtype=torch.float32, device=device)
        self.greedy_ids = torch.empty(max_num_seqs, dtype=torch.int32, device=device)

    def run(self, step: StepInput) -> StepOutput:
        """Computes the step and picks a token for each sampled row."""
        sampling = step.sampling
        shape = dataclasses.replace(step.shape, num_rows=sampling.num_rows)
        context = ForwardContext(self.workspace, shape, self.tensors)
        with torch.inference_mode():
            self.workspace.begin_step()
            self.buffers.fill(step)
            self._copy_blocks(step)
            self.model.forward(context, self.activations, self.caches)
            if shape.num_rows == 0:
                return StepOutput(np.empty(0, np.int32))
            if is_plain_greedy(sampling):
                self.model.greedy(context, self.activations, self.greedy_ids)
                return StepOutput(self.greedy_ids[: shape.num_rows].to("cpu", copy=True).numpy())
            self.model.logits(context, self.activations, self.logits)
            return StepOutput(sample(self.logits[: shape.num_rows], sampling))

    def _copy_blocks(self, step: StepInput) -> None:
        if len(step.copy_sources):
            all_caches = [tensor for cache in self.caches for tensor in (cache.key, cache.value)]
            copy_blocks(
                self.workspace, all_caches, self._indices(step.copy_sources), self._indices(step.copy_destinations)
            )

    def _indices(self, array: Int32Array) -> torch.Tensor:
        return to_device(array.astype(np.int64), self.model.options.device)


def native_dtypes(device: torch.device) -> frozenset[torch.dtype]:
    """What the device multiplies in at full speed."""
    return frozenset({torch.float32, *(dtype for dtype in CPU_FLAG if is_native(dtype, device))})
