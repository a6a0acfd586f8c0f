"""Steps that a driver of plain greedy requests does not make: copies of blocks, no rows, mixed sampling, bad rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.helpers.checkpoints import cached_checkpoint, reference_model
from tests.helpers.runner import DrivenSequence, greedy_ids, make_runner, make_step
from tests.helpers.sampling import GREEDY, Row, sampling_input
from vllm_lite.engine.step import NO_TOKEN, StepInput
from vllm_lite.worker.executor import LocalExecutor
from vllm_lite.worker.hf_config import read_model_config
from vllm_lite.worker.model_runner import ModelRunner

PROMPT = [(17 * i + 5) % 254 + 2 for i in range(21)]
BLOCK_SIZE = 8


@pytest.fixture
def runner() -> ModelRunner:
    folder = cached_checkpoint("llama")
    config = read_model_config(folder, trust_remote_code=False)
    return make_runner(config, reference_model(folder).state_dict(), block_size=BLOCK_SIZE)


def computed(runner: ModelRunner, block_ids: list[int]) -> DrivenSequence:
    """A sequence with the prompt and one more token, of which the prompt is in the cache."""
    sequence = DrivenSequence(list(PROMPT), block_ids)
    (token,) = runner.run(make_step(BLOCK_SIZE, [(sequence, len(PROMPT))])).token_ids
    sequence.num_computed = len(PROMPT)
    sequence.token_ids.append(int(token))
    return sequence


def test_a_chunk_that_ends_before_its_prompt_gives_no_token(runner: ModelRunner) -> None:
    output = runner.run(make_step(BLOCK_SIZE, [(DrivenSequence(list(PROMPT), [1, 2, 3]), 5)]))
    assert output.token_ids.dtype == np.int32
    assert len(output.token_ids) == 0


def test_arrays_may_be_read_only_and_the_output_is_a_value_of_its_own(runner: ModelRunner) -> None:
    step = make_step(BLOCK_SIZE, [(DrivenSequence(list(PROMPT), [1, 2, 3]), len(PROMPT))])
    for array in (*vars(step).values(), *vars(step.sampling).values()):
        if isinstance(array, np.ndarray):
            array.flags.writeable = False
    first = LocalExecutor(runner).execute(step).token_ids
    before = first.copy()
    runner.greedy_ids.fill_(0)
    assert np.array_equal(first, before)


def test_blocks_are_copied_before_anything_is_written(runner: ModelRunner) -> None:
    """Two sequences share a half-filled block; the one that writes gets a copy first, the other loses nothing."""
    sequence = computed(runner, [4, 7, 2])
    expected = greedy_ids(runner_like(runner), [PROMPT], 3)[0]
    for cache in runner.caches:
        cache.key[9], cache.value[9] = torch.nan, torch.nan
    fork = DrivenSequence([*sequence.token_ids[:-1], 200], [4, 7, 9], num_computed=len(PROMPT))
    step = make_step(BLOCK_SIZE, [(fork, 1)])
    step = replace(step, copy_sources=np.array([2], np.int32), copy_destinations=np.array([9], np.int32))
    assert runner.run(step).token_ids[0] != NO_TOKEN
    ids = [sequence.token_ids[-1]]
    for _ in range(2):
        ids.append(int(runner.run(make_step(BLOCK_SIZE, [(sequence, 1)])).token_ids[0]))
        sequence.num_computed += 1
        sequence.token_ids.append(ids[-1])
    assert ids == expected


def runner_like(runner: ModelRunner) -> ModelRunner:
    return ModelRunner(
        runner.model,
        max_model_len=128,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        block_size=BLOCK_SIZE,
        num_blocks=64,
    )


def with_rows(step: StepInput, rows: list[Row]) -> StepInput:
    return replace(step, sampling=sampling_input(rows, step.sampling.token_indices.tolist()))


def test_rows_of_all_kinds_in_one_step(runner: ModelRunner) -> None:
    sequences = [computed(runner, [4 * i, 4 * i + 1, 4 * i + 2]) for i in range(4)]
    step = make_step(BLOCK_SIZE, [(sequence, 1) for sequence in sequences])
    (greedy,) = set(runner.run(step).token_ids.tolist())
    rows = [GREEDY, Row(seed=3, top_p=0.9), replace(GREEDY, banned=[greedy]), Row(seed=3, top_p=0.9)]
    tokens = runner.run(with_rows(step, rows)).token_ids.tolist()
    assert tokens[0] == greedy != tokens[2]
    assert tokens[1] == tokens[3]


@pytest.mark.parametrize("row", [GREEDY, Row(temperature=1.0), Row(top_k=5)])
def test_a_sequence_with_nan_in_its_cache_fails_alone(runner: ModelRunner, row: Row) -> None:
    sequences = [computed(runner, [4 * i, 4 * i + 1, 4 * i + 2]) for i in range(3)]
    step = with_rows(make_step(BLOCK_SIZE, [(sequence, 1) for sequence in sequences]), [row] * 3)
    expected = runner.run(step).token_ids.tolist()
    runner.caches[0].value[5] = torch.nan
    assert runner.run(step).token_ids.tolist() == [expected[0], NO_TOKEN, expected[2]]


def test_blocks_with_nan_left_by_others_do_not_matter(runner: ModelRunner) -> None:
    expected = greedy_ids(runner, [PROMPT, PROMPT[:3]], 12)
    for cache in runner.caches:
        cache.key.fill_(torch.nan)
        cache.value.fill_(torch.nan)
    assert greedy_ids(runner, [PROMPT, PROMPT[:3]], 12) == expected


def test_large_limits_take_no_memory_before_they_are_used() -> None:
    folder = cached_checkpoint("llama")
    config = read_model_config(folder, trust_remote_code=False)
    large = make_runner(
        config,
        reference_model(folder).state_dict(),
        max_num_seqs=256,
        max_model_len=131072,
        max_num_batched_tokens=2048,
        num_blocks=200_000,
    )
    assert greedy_ids(large, [PROMPT], 3) == greedy_ids(runner_like(large), [PROMPT], 3)
