"""The step before the cache is sized: it is computed whole, and touches no block."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.helpers.checkpoints import cached_checkpoint, reference_model
from tests.helpers.runner import make_runner
from vllm_lite.engine.step import NO_TOKEN
from vllm_lite.worker.hf_config import read_model_config
from vllm_lite.worker.largest_step import largest_step


@pytest.mark.parametrize(
    ("max_num_batched_tokens", "max_num_seqs", "num_seqs", "num_decodes", "max_query_len"),
    [
        (64, 16, 16, 15, 49),
        (8, 16, 8, 8, 1),
        (16, 16, 16, 16, 1),
        (64, 1, 1, 0, 64),
        (1, 1, 1, 1, 1),
        (17, 16, 16, 15, 2),
    ],
)
def test_all_tokens_and_all_sequences(
    max_num_batched_tokens: int, max_num_seqs: int, num_seqs: int, num_decodes: int, max_query_len: int
) -> None:
    step = largest_step(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs, max_model_len=10**6)
    shape = step.shape
    assert (shape.num_tokens, shape.num_seqs, shape.num_rows) == (max_num_batched_tokens, num_seqs, num_seqs)
    assert (shape.num_decodes, shape.max_query_len, shape.max_context_len) == (num_decodes, max_query_len, 10**6)
    new_lens = np.diff(step.query_starts)
    assert new_lens.sum() == len(step.token_ids) == len(step.positions) == len(step.slot_mapping) == shape.num_tokens
    assert np.count_nonzero(new_lens == 1) == num_decodes and new_lens.max() == max_query_len
    assert (new_lens[:num_decodes] == 1).all()


def test_it_touches_no_block_and_samples_every_row() -> None:
    folder = cached_checkpoint("llama")
    config = read_model_config(folder, trust_remote_code=False)
    runner = make_runner(config, reference_model(folder).state_dict(), num_blocks=1)
    for cache in runner.caches:
        cache.key.fill_(torch.nan)
        cache.value.fill_(torch.nan)
    runner.activations.attended.zero_()
    output = runner.run(largest_step(max_num_batched_tokens=64, max_num_seqs=16, max_model_len=128))
    assert len(output.token_ids) == 16 and NO_TOKEN not in output.token_ids
    assert all(cache.key.isnan().all() and cache.value.isnan().all() for cache in runner.caches)
