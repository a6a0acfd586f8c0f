"""The step before the cache is sized: it is computed whole, and touches no block."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.checkpoints import cached_checkpoint, reference_model
from tests.helpers.runner import make_runner
from tests.helpers.sampling import Row, sampling_input
from tests.ops.tensors import tokens_shape, workspace
from vllm_lite.engine.step import NO_TOKEN, SamplingInput
from vllm_lite.worker import sampler
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


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes that results of operations hold at one time, but for what lies in the given tensor."""

    def __init__(self, given: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._now = 0
        self._given = given.untyped_storage().data_ptr()
        self._num_tensors: Counter[int] = Counter()
        """That share a storage, by its address."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor)
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address == self._given:
            return
        self._num_tensors[address] += 1
        if self._num_tensors[address] == 1:
            self._now += size
            self.most = max(self.most, self._now)
        weakref.finalize(tensor, self._forget, address, size)

    def _forget(self, address: int, size: int) -> None:
        self._num_tensors[address] -= 1
        if not self._num_tensors[address]:
            self._now -= size


def most_bytes(rows: SamplingInput) -> int:
    """Of picking tokens, beside the logits themselves."""
    logits = torch.randn(NUM_ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    live = LiveBytes(logits)
    with torch.inference_mode(), live:
        sampler.sample(workspace(), tokens_shape(NUM_ROWS, NUM_ROWS), logits, rows)
    return live.most


NUM_ROWS = 64
VOCAB_SIZE = 100_000
"""So many that copies of the logits are most of it; sorting, which goes by groups of rows, is not."""
CHANGED: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.5,
    "prompt": [1],
    "output": [4],
    "bias": {3: 1.0},
}


@pytest.mark.parametrize(
    "row",
    [
        Row(temperature=0.0, num_logprobs=20),
        Row(top_k=50, top_p=0.9, num_logprobs=20, banned=[7], **CHANGED),
        Row(temperature=0.0, num_logprobs=20, num_continuations=2 * NUM_ROWS + 3),
        Row(temperature=0.0, num_logprobs=20, num_continuations=2 * NUM_ROWS, banned=[7], **CHANGED),
    ],
    ids=["logprobs", "sampling", "beams", "changed beams"],
)
def test_case_m2d_no_step_picks_its_tokens_in_more_memory(row: Row) -> None:
    """What the cache leaves free was measured with `largest_step`."""
    rows = largest_step(max_num_batched_tokens=NUM_ROWS, max_num_seqs=NUM_ROWS, max_model_len=100).sampling
    assert most_bytes(sampling_input([row] * NUM_ROWS)) <= 1.05 * most_bytes(rows), "but for a few ids a row"
