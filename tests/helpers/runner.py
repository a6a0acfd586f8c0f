"""Drives a `ModelRunner` without the engine: own block tables, chunked prompts, greedy tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.helpers.sampling import GREEDY, Row, sampling_input
from vllm_lite.config import EngineConfig, ModelConfig
from vllm_lite.engine.step import StepInput, StepShape
from vllm_lite.kernels.cpu import PANEL_ROWS, CpuKernels
from vllm_lite.kernels.cuda import CudaKernels
from vllm_lite.models.causal_lm import CausalLM
from vllm_lite.models.registry import build_model
from vllm_lite.worker.checkpoint import open_checkpoint
from vllm_lite.worker.model_runner import ModelRunner
from vllm_lite.worker.weights import CheckpointTensor, load_weights


@dataclass
class DrivenSequence:
    """A sequence with the blocks that it owns; `num_computed` tokens of it are in the cache."""

    token_ids: list[int]
    block_ids: list[int]
    num_computed: int = 0
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)


def make_runner(
    config: ModelConfig,
    state: dict[str, torch.Tensor],
    dtype: torch.dtype = torch.float32,
    *,
    max_model_len: int = 128,
    cpu: CpuKernels | None = None,
    **options: Any,
) -> ModelRunner:
    """A runner whose model has the weights of `state`, a Hugging Face state dict that must fill every target."""
    model = build_model(config, dtype, max_model_len, panel_rows=1 if cpu is None else PANEL_ROWS)
    leftover = {name for name in state.keys() - model.weight_targets().keys() if not model.is_ignored(name)}
    assert not leftover, f"unused: {sorted(leftover)}"
    tensors = [CheckpointTensor(name, tuple(t.shape), t.__getitem__, t.dtype) for name, t in state.items()]
    load_weights(tensors, model.weight_targets(), model.is_ignored)
    return runner_of(model, max_model_len=max_model_len, cpu=cpu, **options)


def load_runner(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    *,
    cuda: CudaKernels | None = None,
    cpu: CpuKernels | None = None,
    **sizes: Any,
) -> ModelRunner:
    """A runner of the checkpoint in a folder, opened and loaded as the server does."""
    checkpoint = open_checkpoint(EngineConfig(model=str(folder)))
    model = build_model(checkpoint.config, dtype, 128, panel_rows=1 if cpu is None else PANEL_ROWS)
    checkpoint.load_into(model.weight_targets(), model.is_ignored)
    return runner_of(model, cuda=cuda, cpu=cpu, **sizes)


def runner_of(
    model: CausalLM,
    *,
    max_model_len: int = 128,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 64,
    block_size: int = 16,
    num_blocks: int = 64,
    cuda: CudaKernels | None = None,
    cpu: CpuKernels | None = None,
    enforce_eager: bool = False,
) -> ModelRunner:
    """A runner of a model whose parameters have been filled."""
    if cpu is not None:
        cpu.pack_all(model.options.matrices)
    return ModelRunner(
        model,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        num_blocks=num_blocks,
        cuda=cuda,
        cpu=cpu,
        enforce_eager=enforce_eager,
    )


def block_size_of(runner: ModelRunner) -> int:
    return runner.caches[0].key.shape[2]


def make_step(block_size: int, work: Sequence[tuple[DrivenSequence, int]]) -> StepInput:
    """A step that computes so many tokens of each sequence; greedy rows where that reaches a sequence's last token."""
    work = sorted(work, key=lambda item: item[1] > 1)
    token_ids, positions, slots, starts = [], [], [], [0]
    for sequence, count in work:
        for position in range(sequence.num_computed, sequence.num_computed + count):
            token_ids.append(sequence.token_ids[position])
            positions.append(position)
            slots.append(sequence.block_ids[position // block_size] * block_size + position % block_size)
        starts.append(len(token_ids))
    context_lens = [sequence.num_computed + count for sequence, count in work]
    most_blocks = max(-(-length // block_size) for length in context_lens)
    tables = [(sequence.block_ids + [0] * most_blocks)[:most_blocks] for sequence, _ in work]
    sampled = [end - 1 for (seq, _), end, ctx in zip(work, starts[1:], context_lens) if ctx == len(seq.token_ids)]
    return StepInput(
        shape=StepShape(
            num_tokens=len(token_ids),
            num_seqs=len(work),
            num_decodes=sum(count == 1 for _, count in work),
            max_query_len=max(count for _, count in work),
            max_context_len=max(context_lens),
        ),
        token_ids=np.array(token_ids, np.int32),
        positions=np.array(positions, np.int32),
        slot_mapping=np.array(slots, np.int32),
        query_starts=np.array(starts, np.int32),
        context_lens=np.array(context_lens, np.int32),
        block_tables=np.array(tables, np.int32),
        copy_sources=np.empty(0, np.int32),
        copy_destinations=np.empty(0, np.int32),
        sampling=sampling_input([GREEDY] * len(sampled), sampled),
    )


def greedy_ids(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], num_tokens: int, budget: int | None = None
) -> list[list[int]]:
    """Generates for all prompts at once, mixing decodes and prompt chunks in steps of at most `budget` tokens."""
    block_size = block_size_of(runner)
    budget = runner.tensors.token_ids.shape[0] if budget is None else budget
    free = list(range(runner.caches[0].key.shape[0]))
    random.Random(0).shuffle(free)
    sequences = []
    for prompt in prompts:
        num_blocks = -(-(len(prompt) + num_tokens) // block_size)
        sequences.append(DrivenSequence(list(prompt), [free.pop() for _ in range(num_blocks)]))
    while unfinished := [s for s in sequences if len(s.token_ids) < s.num_prompt_tokens + num_tokens]:
        work, left = [], budget
        for sequence in sorted(unfinished, key=lambda s: len(s.token_ids) - s.num_computed):
            count = min(left, len(sequence.token_ids) - sequence.num_computed)
            if count:
                work.append((sequence, count))
                left -= count
        work.sort(key=lambda item: item[1] > 1)
        output = iter(runner.run(make_step(block_size, work)).token_ids.tolist())
        for sequence, count in work:
            sequence.num_computed += count
            if sequence.num_computed == len(sequence.token_ids):
                sequence.token_ids.append(next(output))
    return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]


def last_logits(runner: ModelRunner, prompt: Sequence[int]) -> torch.Tensor:
    """[vocab_size] float32, what follows a prompt computed in one step."""
    block_size = block_size_of(runner)
    blocks = list(range(-(-len(prompt) // block_size)))[::-1]
    step = make_step(block_size, [(DrivenSequence(list(prompt), blocks), len(prompt))])
    sampling = sampling_input([Row()], [len(prompt) - 1])
    runner.run(StepInput(**{**step.__dict__, "sampling": sampling}))
    return runner.logits[0].clone()


def logits_after_prompts(runner: ModelRunner, prompts: Sequence[Sequence[int]], budget: int) -> list[torch.Tensor]:
    """What follows each prompt, [vocab_size] float32 each, computed in chunks of steps of at most `budget` tokens."""
    block_size = block_size_of(runner)
    free = list(range(runner.caches[0].key.shape[0]))
    sequences = [
        DrivenSequence(list(prompt), [free.pop() for _ in range(-(-len(prompt) // block_size))]) for prompt in prompts
    ]
    logits: dict[int, torch.Tensor] = {}
    while len(logits) < len(sequences):
        work, left = [], budget
        for sequence in sequences:
            count = min(left, len(sequence.token_ids) - sequence.num_computed)
            if count:
                work.append((sequence, count))
                left -= count
        work.sort(key=lambda item: item[1] > 1)
        step = make_step(block_size, work)
        token_indices = step.sampling.token_indices.tolist()
        sampling = sampling_input([Row()] * len(token_indices), token_indices)
        runner.run(StepInput(**{**step.__dict__, "sampling": sampling}))
        row = 0
        for sequence, count in work:
            sequence.num_computed += count
            if sequence.num_computed == len(sequence.token_ids):
                logits[id(sequence)] = runner.logits[row].clone()
                row += 1
    return [logits[id(sequence)] for sequence in sequences]
