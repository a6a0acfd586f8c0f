"""What a step's tensors hold, within the step and beyond it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.runner import DrivenSequence, make_step
from vllm_lite.worker.step_buffers import StepBuffers

BLOCK_SIZE = 8
FIELDS = ("token_ids", "positions", "slot_mapping", "query_starts", "context_lens", "block_tables")
LARGE = [([4, 7, 2], 17, 17), ([5], 3, 1), ([9, 6], 12, 1)]
SMALL = [([3], 5, 1)]


@pytest.fixture
def buffers() -> StepBuffers:
    return StepBuffers(
        torch.device("cpu"), max_model_len=100, max_num_seqs=6, max_num_batched_tokens=20, block_size=BLOCK_SIZE
    )


def step_of(work: list[tuple[list[int], int, int]]) -> Any:
    """A step of (blocks, tokens, how many of them are new)."""
    sequences = [
        (DrivenSequence([(7 * n + i) % 50 + 1 for i in range(n)], blocks, n - new), new) for blocks, n, new in work
    ]
    return make_step(BLOCK_SIZE, sequences)


@pytest.mark.parametrize("works", [[LARGE], [LARGE, SMALL], [SMALL, LARGE]], ids=["large", "then-small", "then-large"])
def test_holds_the_last_step_and_what_does_no_harm_beyond(
    buffers: StepBuffers, works: list[list[tuple[list[int], int, int]]]
) -> None:
    addresses = [tensor.data_ptr() for tensor in vars(buffers.tensors).values()]
    for work in works:
        step = step_of(work)
        buffers.fill(step)
    tensors = buffers.tensors
    assert [tensor.data_ptr() for tensor in vars(tensors).values()] == addresses
    num_tokens, num_seqs, num_rows = step.shape.num_tokens, step.shape.num_seqs, len(step.sampling.token_indices)
    for name, size, beyond in (
        ("token_ids", num_tokens, 0),
        ("positions", num_tokens, 0),
        ("slot_mapping", num_tokens, -1),
        ("query_starts", num_seqs + 1, num_tokens),
        ("context_lens", num_seqs, 0),
    ):
        tensor = getattr(tensors, name)
        assert tensor.dtype == torch.int32
        assert np.array_equal(tensor[:size].numpy(), getattr(step, name)), name
        assert (tensor[size:] == beyond).all(), name
    assert tensors.token_indices.tolist() == [*step.sampling.token_indices, *[0] * (6 - num_rows)]
    rows, columns = step.block_tables.shape
    assert np.array_equal(tensors.block_tables[:rows, :columns].numpy(), step.block_tables)


def test_sizes_are_the_largest_steps(buffers: StepBuffers) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in vars(buffers.tensors).items()}
    assert shapes == {
        "token_ids": (20,), "positions": (20,), "slot_mapping": (20,), "query_starts": (7,), "context_lens": (6,),
        "block_tables": (6, 13), "token_indices": (6,),
    }  # fmt: skip


def test_a_step_is_read_before_fill_returns(buffers: StepBuffers) -> None:
    step = step_of(LARGE)
    expected = {name: getattr(step, name).copy() for name in FIELDS}
    buffers.fill(step)
    for name in FIELDS:
        getattr(step, name).fill(99)
    rows, columns = expected["block_tables"].shape
    assert np.array_equal(buffers.tensors.token_ids[: step.shape.num_tokens].numpy(), expected["token_ids"])
    assert np.array_equal(buffers.tensors.block_tables[:rows, :columns].numpy(), expected["block_tables"])
