from __future__ import annotations

import math
import random as random_module
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.ops.tensors import assert_close, assert_near, random, workspace
from vllm_lite.engine.step import StepShape
from vllm_lite.ops import attention
from vllm_lite.ops.attention import attend
from vllm_lite.ops.workspace import Workspace

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# (new tokens, tokens of context with them): decodes first, then prompt chunks, ragged.
MIXED = [(1, 1), (1, 17), (1, 16), (1, 100), (1, 33), (7, 7), (16, 16), (5, 40), (33, 33), (2, 90)]


@dataclass
class Batch:
    """A step over a cache whose unused slots are NaN, and what attention should give for it."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    shape: StepShape


def make_batch(
    work: list[tuple[int, int]],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    block_size: int = 8,
    dtype: torch.dtype = torch.float32,
    num_blocks: int = 180,
) -> Batch:
    num_tokens = sum(count for count, _ in work)
    key_cache = torch.full((num_blocks, num_kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
    value_cache = key_cache.clone()
    free = list(range(num_blocks))
    random_module.Random(1).shuffle(free)
    most_blocks = max([-(-length // block_size) for _, length in work], default=0) + 2
    # Beyond a context the tables name some block of somebody else's.
    block_tables = torch.full((len(work) + 1, most_blocks), 3, dtype=torch.int32)
    for s, (_, length) in enumerate(work):
        blocks = [free.pop() for _ in range(-(-length // block_size))]
        block_tables[s, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        for position in range(length):
            where = (blocks[position // block_size], slice(None), position % block_size)
            key_cache[where] = random(num_kv_heads, head_dim, dtype=dtype, seed=1000 * s + position)
            value_cache[where] = random(num_kv_heads, head_dim, dtype=dtype, seed=1000 * s + position + 500_000)
    starts = [0]
    for count, _ in work:
        starts.append(starts[-1] + count)
    return Batch(
        query=random(num_tokens + 3, num_heads + 2, head_dim, dtype=dtype)[:, 1:-1],
        key_cache=key_cache,
        value_cache=value_cache,
        query_starts=torch.tensor([*starts, 0], dtype=torch.int32),
        context_lens=torch.tensor([length for _, length in work] + [99], dtype=torch.int32),
        block_tables=block_tables,
        shape=StepShape(
            num_tokens=num_tokens,
            num_seqs=len(work),
            num_decodes=sum(count == 1 for count, _ in work),
            max_query_len=max((count for count, _ in work), default=0),
            max_context_len=max((length for _, length in work), default=0),
        ),
    )


def naive(
    batch: Batch, scale: float, window: int | None, slopes: torch.Tensor | None, soft_cap: float | None
) -> torch.Tensor:
    """One query, one head, one key at a time, in float64; rows of empty contexts stay 0."""
    num_heads, block_size = batch.query.shape[1], batch.key_cache.shape[2]
    group = num_heads // batch.key_cache.shape[1]
    out = torch.zeros(batch.query.shape, dtype=torch.float64)
    starts, lens = batch.query_starts.tolist(), batch.context_lens.tolist()
    for s in range(batch.shape.num_seqs):
        for row in range(starts[s], starts[s + 1]) if lens[s] else ():
            position = lens[s] - starts[s + 1] + row
            seen = range(0 if window is None else max(0, position - window + 1), position + 1)
            slots = [(int(batch.block_tables[s, p // block_size]), p % block_size) for p in seen]
            for h in range(num_heads):
                keys = torch.stack([batch.key_cache[b, h // group, o] for b, o in slots]).double()
                values = torch.stack([batch.value_cache[b, h // group, o] for b, o in slots]).double()
                scores = keys @ batch.query[row, h].double() * scale
                if soft_cap is not None:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                if slopes is not None:
                    scores = scores + slopes[h].double() * torch.tensor([p - position for p in seen])
                out[row, h] = torch.softmax(scores, 0) @ values
    return out


def check(
    space: Workspace,
    batch: Batch,
    *,
    window: int | None = None,
    slopes: torch.Tensor | None = None,
    soft_cap: float | None = None,
) -> None:
    scale = 0.7 / math.sqrt(batch.query.shape[2])
    out = torch.zeros(batch.query.shape[0], batch.query.shape[1] + 1, batch.query.shape[2], dtype=batch.query.dtype)
    attend(
        space,
        batch.shape,
        batch.query,
        batch.key_cache,
        batch.value_cache,
        batch.query_starts,
        batch.context_lens,
        batch.block_tables,
        scale,
        window,
        slopes,
        soft_cap,
        out[:, 1:],
    )
    expected = naive(batch, scale, window, slopes, soft_cap)
    if space.cuda is None:
        assert_close(out[:, 1:], expected)
    else:
        assert_near(out[:, 1:], expected.to(out.dtype))
    assert (out[:, 0] == 0).all()
    assert (out[batch.shape.num_tokens :] == 0).all()


@pytest.mark.parametrize("num_kv_heads", [8, 4, 2, 1])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_head_groups_and_block_sizes(space: Workspace, num_kv_heads: int, block_size: int) -> None:
    check(space, make_batch(MIXED, num_heads=8, num_kv_heads=num_kv_heads, block_size=block_size))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(space: Workspace, dtype: torch.dtype) -> None:
    check(space, make_batch(MIXED, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 5, 8, 16, 1000])
def test_sliding_window(space: Workspace, window: int, dtype: torch.dtype) -> None:
    check(space, make_batch(MIXED, dtype=dtype), window=window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 9])
def test_alibi(space: Workspace, window: int | None, dtype: torch.dtype) -> None:
    check(space, make_batch(MIXED, dtype=dtype), window=window, slopes=torch.tensor([0.5, 0.25, 0.0625, 1.0]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slopes", [None, torch.tensor([0.5, 0.25, 0.0625, 1.0])])
@pytest.mark.parametrize("window", [None, 9])
def test_soft_cap(space: Workspace, window: int | None, slopes: torch.Tensor | None, dtype: torch.dtype) -> None:
    check(space, make_batch(MIXED, dtype=dtype), window=window, slopes=slopes, soft_cap=1.5)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("scratch_bytes", [1, 3000, 20_000])
def test_scratch_smaller_than_the_batch(space: Workspace, scratch_bytes: int, window: int | None) -> None:
    check(workspace(scratch_bytes, cuda=space.cuda), make_batch(MIXED), window=window)


def test_queries_in_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MAX_QUERIES_OF_TILE", 6)
    check(workspace(), make_batch(MIXED))
    check(workspace(), make_batch(MIXED), window=7)


@pytest.mark.parametrize(
    "work",
    [
        [],
        [(1, 1)],
        [(1, 0)],
        [(1, 0), (1, 9), (1, 0), (4, 0), (3, 8)],
        [(1, n) for n in range(1, 40)],
        [(n, n) for n in range(2, 12)],
        [(8, 8), (8, 16), (8, 24)],
    ],
)
def test_shapes_of_batches(space: Workspace, work: list[tuple[int, int]]) -> None:
    check(space, make_batch(work))


def gathered_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fills up with the number of elements of each gather, keys and values together."""
    sizes: list[int] = []
    gather = attention._gather

    def counting(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = gather(*args)
        sizes.append(key.numel() + value.numel())
        return key, value

    monkeypatch.setattr(attention, "_gather", counting)
    return sizes


def test_a_long_context_pads_no_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = gathered_sizes(monkeypatch)
    check(workspace(), make_batch([(1, 700), *[(1, 9)] * 30]))
    assert sum(sizes) == 2 * (700 + 30 * 9) * 2 * 8


def test_gathers_stay_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = gathered_sizes(monkeypatch)
    check(workspace(30_000), make_batch([*[(1, n) for n in range(20, 50)], (40, 60)]))
    assert len(sizes) > 5
    assert max(sizes) * 4 <= 30_000
