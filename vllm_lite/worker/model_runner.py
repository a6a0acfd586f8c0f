"""Runs one step on the model: fills the persistent tensors, runs the layers, samples. Knows no request."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from vllm_lite.engine.step import NO_INTS, Int32Array, Logprobs, ScoringInput, StepInput, StepOutput, StepShape
from vllm_lite.kernels.cpu import CpuKernels
from vllm_lite.kernels.cuda import CudaKernels
from vllm_lite.layers.context import ForwardContext
from vllm_lite.models.causal_lm import CausalLM
from vllm_lite.ops.kv_cache import copy_blocks
from vllm_lite.ops.workspace import Workspace
from vllm_lite.worker import kv_cache
from vllm_lite.worker.compute import Compute, Head
from vllm_lite.worker.cpu_replay import CpuReplay
from vllm_lite.worker.dtype import CPU_FLAG, is_native
from vllm_lite.worker.logprobs import token_logprobs
from vllm_lite.worker.sampler import is_plain_greedy, sample
from vllm_lite.worker.step_buffers import StepBuffers
from vllm_lite.worker.transfer import to_device


class ModelRunner:
    """Owns the cache, the activations and the step's tensors, all of maximal size.

    The tensors a step is read from, and those that its results are left in, keep their addresses for life. The model's
    parameters must have been filled. With `cuda`, the ops launch its kernels where they can; they must hold what
    `kernels_for` lists for the model. With `cpu`, the ops call its kernels, captured once unless `enforce_eager`; the
    model's matrices must have been packed.
    """

    def __init__(
        self,
        model: CausalLM,
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
        self.compute: Compute = self.compute_by_python
        """Leaves `greedy_ids` or `logits` of a step whose numbers are in `tensors`."""
        if cpu is not None and not enforce_eager:
            self.compute = CpuReplay(self.compute_by_python, cpu)

    def run(self, step: StepInput) -> StepOutput:
        """Computes the step and picks a token for each sampled row."""
        sampling = step.sampling
        shape = dataclasses.replace(step.shape, num_rows=sampling.num_rows)
        head = Head.NONE
        if shape.num_rows:
            head = Head.GREEDY_IDS if is_plain_greedy(sampling) else Head.LOGITS
        with torch.inference_mode():
            self.buffers.fill(step)
            self._copy_blocks(step)
            self.compute(shape, head)
            output = StepOutput(NO_INTS)
            if head is Head.GREEDY_IDS:
                output = StepOutput(self.greedy_ids[: shape.num_rows].to("cpu", copy=True).numpy())
            elif head is Head.LOGITS:
                output = sample(self.workspace, shape, self.logits[: shape.num_rows], sampling)
            if len(step.scoring.token_ids):
                output = dataclasses.replace(output, scores=self._score(shape, step.scoring))
            return output

    def _score(self, shape: StepShape, scoring: ScoringInput) -> Logprobs:
        """After `compute`, of whose step every token has left what the head reads."""
        parts: list[Logprobs] = []
        num_top = int(scoring.num_logprobs.max())
        for start in range(0, len(scoring.token_ids), len(self.logits)):
            rows = slice(start, start + len(self.logits))
            token_ids = scoring.token_ids[rows]
            part_shape = dataclasses.replace(shape, num_rows=len(token_ids))
            indices = to_device(scoring.token_indices[rows], self.model.options.device)
            self.tensors.token_indices[: len(token_ids)].copy_(indices)
            self.workspace.begin_step()
            context = ForwardContext(self.workspace, part_shape, self.tensors)
            self.model.logits(context, self.activations, self.logits)
            parts.append(token_logprobs(self.logits[: len(token_ids)], token_ids, num_top))
        return Logprobs(
            of_tokens=np.concatenate([part.of_tokens for part in parts]),
            top_ids=np.concatenate([part.top_ids for part in parts]),
            top_logprobs=np.concatenate([part.top_logprobs for part in parts]),
        )

    def compute_by_python(self, shape: StepShape, head: Head) -> None:
        """What `compute` does unless something else has been put there."""
        self.workspace.begin_step()
        context = ForwardContext(self.workspace, shape, self.tensors)
        self.model.forward(context, self.activations, self.caches)
        if head is Head.GREEDY_IDS:
            self.model.greedy(context, self.activations, self.greedy_ids)
        elif head is Head.LOGITS:
            self.model.logits(context, self.activations, self.logits)

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
