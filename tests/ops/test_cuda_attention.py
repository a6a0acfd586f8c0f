"""What the CUDA kernels alone can get wrong: partitions, head sizes, large groups, bytes, tables that lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cuda.emulator import Bytes, EmulatedKernels, EmulatorError
from tests.ops.tensors import workspace
from tests.ops.test_attention import Batch, check, make_batch
from vllm_lite.errors import StartupError
from vllm_lite.ops import cuda_attention
from vllm_lite.ops.attention import attend
from vllm_lite.ops.workspace import Workspace

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
WORK = [(1, 1), (1, 70), (1, 45), (3, 3), (9, 40), (2, 33)]


@pytest.fixture
def space(kernels: EmulatedKernels) -> Workspace:
    return workspace(cuda=kernels)


@pytest.fixture
def small_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of no multiple of anything."""
    monkeypatch.setattr(cuda_attention, "PARTITION_SIZE", 37)


# Every pair of values of: dtype, head size, heads and key heads, block size, window, slopes or none, soft cap.
@pytest.mark.parametrize(
    ("dtype", "head_dim", "heads", "block_size", "window", "has_slopes", "soft_cap"),
    [
        (BF16, 128, (4, 4), 8, None, False, None),
        (BF16, 128, (8, 2), 16, None, False, None),
        (BF16, 256, (20, 1), 32, None, True, None),
        (BF16, 5, (7, 1), 16, 20, True, 1.5),
        (BF16, 64, (4, 4), 32, 20, True, 1.5),
        (BF16, 80, (4, 4), 16, 20, True, None),
        (BF16, 80, (7, 1), 8, 20, False, 1.5),
        (F16, 128, (7, 1), 32, 20, False, None),
        (F16, 256, (7, 1), 8, 20, False, 1.5),
        (F16, 256, (8, 2), 16, 20, True, None),
        (F16, 5, (20, 1), 32, 20, False, 1.5),
        (F16, 5, (4, 4), 8, None, False, None),
        (F16, 64, (20, 1), 8, 20, False, None),
        (F16, 64, (8, 2), 8, None, True, 1.5),
        (F16, 80, (20, 1), 16, None, True, None),
        (F32, 128, (20, 1), 8, 20, True, 1.5),
        (F32, 256, (4, 4), 16, None, True, None),
        (F32, 5, (8, 2), 8, 20, False, 1.5),
        (F32, 64, (7, 1), 16, None, False, None),
        (F32, 80, (8, 2), 32, 20, False, 1.5),
    ],
)
def test_options_together(
    small_partitions: None,
    space: Workspace,
    dtype: torch.dtype,
    head_dim: int,
    heads: tuple[int, int],
    block_size: int,
    window: int | None,
    has_slopes: bool,
    soft_cap: float | None,
) -> None:
    num_heads, num_kv_heads = heads
    batch = make_batch(
        WORK,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        num_blocks=30,
    )
    slopes = 0.5 ** torch.arange(1, num_heads + 1) if has_slopes else None
    check(space, batch, window=window, slopes=slopes, soft_cap=soft_cap)


@pytest.mark.parametrize("partition_size", [1, 16, 69, 70])
def test_partitions(monkeypatch: pytest.MonkeyPatch, space: Workspace, partition_size: int) -> None:
    monkeypatch.setattr(cuda_attention, "PARTITION_SIZE", partition_size)
    batch = make_batch(WORK)
    check(space, batch)
    check(space, batch, window=40)


def test_partitions_of_more_sequences_than_the_scratch_memory_holds(small_partitions: None, space: Workspace) -> None:
    small = workspace(5000, cuda=space.cuda)
    (buffer,) = small.scratch(torch.uint8, (5000,))
    check(small, make_batch([(1, n) for n in range(60, 75)]))
    assert small.scratch(torch.uint8, (5000,))[0].data_ptr() == buffer.data_ptr(), "the scratch memory grew"


def key_bytes(batch: Batch, positions: int) -> int:
    """Of so many positions, under all key heads."""
    _, num_kv_heads, _, head_dim = batch.key_cache.shape
    return positions * num_kv_heads * head_dim * batch.key_cache.dtype.itemsize


@pytest.mark.parametrize("window", [None, 20])
def test_decode_reads_each_key_and_value_once(
    small_partitions: None, kernels: EmulatedKernels, window: int | None
) -> None:
    """For all query heads of a key head together; of a window only what is in it."""
    lens = [100, 1, 33]
    batch = make_batch([(1, n) for n in lens], num_heads=8, num_kv_heads=2, head_dim=64, dtype=BF16)
    expected = Bytes(key_bytes(batch, sum(min(n, window or n) for n in lens)), 0)
    counts = bytes_of_launch(kernels, batch, "decode<bf16, 8>", window)
    assert counts == {"key_cache": expected, "value_cache": expected}


def bytes_of_launch(kernels: EmulatedKernels, batch: Batch, kernel: str, window: int | None) -> dict[str, Bytes]:
    """What one of the launches of an attention reads of the caches."""
    counts: dict[str, Bytes] = {}

    class Counting(EmulatedKernels):
        def __init__(self) -> None:
            vars(self).update(vars(kernels))

        def launch(self, name: str, *arguments: Any, **options: Any) -> None:
            super().launch(name, *arguments, **options)
            if name == kernel:
                counts.update({cache: self.module_of(name).bytes(cache) for cache in ("key_cache", "value_cache")})

    check(workspace(cuda=Counting()), batch, window=window)
    return counts


def test_prefill_reads_each_key_and_value_once_a_tile(kernels: EmulatedKernels) -> None:
    """A tile is 16 rows: 4 tokens of 4 query heads each. It reads up to its last token."""
    batch = make_batch([(10, 50)], num_heads=8, num_kv_heads=2, head_dim=64, dtype=BF16)
    expected = Bytes(key_bytes(batch, 44 + 48 + 50), 0)
    assert bytes_of_launch(kernels, batch, "prefill<bf16, 8>", None) == {"key_cache": expected, "value_cache": expected}
    expected = Bytes(key_bytes(batch, (44 - 31) + (48 - 35) + (50 - 39)), 0)
    assert bytes_of_launch(kernels, batch, "prefill<bf16, 8>", 10) == {"key_cache": expected, "value_cache": expected}


@pytest.mark.parametrize("work", [[(1, 30)], [(4, 30)]])
def test_block_id_beyond_the_cache_is_caught(space: Workspace, work: list[tuple[int, int]]) -> None:
    batch = make_batch(work)
    batch.block_tables[0, 1] = len(batch.key_cache)
    with pytest.raises(EmulatorError, match=r"out of bounds at key_cache"):
        run(space, batch)


@pytest.mark.parametrize("work", [[(1, 30)], [(4, 30)]])
def test_context_beyond_the_block_table_is_caught(space: Workspace, work: list[tuple[int, int]]) -> None:
    batch = make_batch(work)
    batch.block_tables = batch.block_tables[:1, :2]
    with pytest.raises(EmulatorError, match=r"out of bounds at block_tables"):
        run(space, batch)


def run(space: Workspace, batch: Batch) -> torch.Tensor:
    out = torch.zeros(batch.query.shape)
    caches = batch.key_cache, batch.value_cache
    numbers = batch.query_starts, batch.context_lens, batch.block_tables
    attend(space, batch.shape, batch.query, *caches, *numbers, 0.3, None, None, None, out)
    return out


@pytest.mark.parametrize("is_key", [True, False])
@pytest.mark.parametrize("sequence", [1, 4])
def test_nan_in_a_context_shows_in_its_sequence_alone(
    small_partitions: None, space: Workspace, sequence: int, is_key: bool
) -> None:
    """A request that went wrong must be seen to fail, whichever part of its context the numbers are in."""
    batch = make_batch(WORK)
    (batch.key_cache if is_key else batch.value_cache)[batch.block_tables[sequence, 1].long()] = torch.nan
    out = run(space, batch)[: batch.shape.num_tokens]
    rows = slice(*batch.query_starts[sequence : sequence + 2].tolist())
    assert out[rows].isnan().all()
    out[rows] = 0.0
    assert out.isfinite().all()


def test_contexts_of_several_partitions_as_they_are(space: Workspace) -> None:
    assert cuda_attention.PARTITION_SIZE == 512
    check(space, make_batch([(1, 513), (1, 700), (2, 40)]))


def test_heads_that_are_too_large_are_refused_before_anything_is_compiled() -> None:
    with pytest.raises(StartupError, match=r"512 dimensions, the CUDA attention kernels take up to 256: use --device"):
        cuda_attention.kernels(F32, 512)
