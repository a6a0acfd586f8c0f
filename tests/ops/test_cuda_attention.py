"""What the CUDA kernels alone can get wrong: partitions, head sizes, large groups, bytes, tables that lie."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.cuda.emulator import Bytes, EmulatedKernels, EmulatorError
from tests.ops.tensors import workspace
from tests.ops.test_attention import Batch, check, make_batch
from vllm_lite.engine.step import StepShape
from vllm_lite.errors import StartupError
from vllm_lite.ops import cuda_attention
from vllm_lite.ops.attention import attend
from vllm_lite.ops.workspace import Workspace

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
WORK = [(1, 1), (1, 70), (1, 45), (3, 3), (9, 100), (2, 33)]


@pytest.fixture
def space(kernels: EmulatedKernels) -> Workspace:
    return workspace(cuda=kernels)


@pytest.fixture
def small_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of no multiple of anything."""
    monkeypatch.setattr(cuda_attention, "LEAST_KEYS", 37)


# Every pair of values of: dtype, head size, heads and key heads, block size, window, slopes or none, soft cap.
@pytest.mark.parametrize(
    ("dtype", "head_dim", "heads", "block_size", "window", "has_slopes", "soft_cap"),
    [
        (BF16, 128, (16, 1), 16, None, True, 1.5),
        (BF16, 128, (20, 1), 32, 20, False, None),
        (BF16, 128, (8, 2), 16, None, False, 1.5),
        (BF16, 256, (16, 1), 16, None, False, 1.5),
        (BF16, 256, (20, 1), 32, 20, True, None),
        (BF16, 256, (4, 4), 32, None, True, None),
        (BF16, 5, (20, 1), 16, 20, False, 1.5),
        (BF16, 64, (7, 1), 32, None, True, 1.5),
        (BF16, 80, (4, 4), 8, 20, True, 1.5),
        (BF16, 80, (7, 1), 16, 20, False, 1.5),
        (BF16, 80, (8, 2), 8, 20, False, None),
        (BF16, 96, (20, 1), 8, 20, True, None),
        (BF16, 96, (7, 1), 8, 20, False, None),
        (F16, 128, (4, 4), 32, 20, False, None),
        (F16, 128, (7, 1), 8, 20, False, None),
        (F16, 256, (8, 2), 8, 20, False, None),
        (F16, 5, (16, 1), 8, None, True, None),
        (F16, 5, (4, 4), 32, 20, True, 1.5),
        (F16, 64, (16, 1), 16, 20, True, None),
        (F16, 64, (4, 4), 16, 20, True, None),
        (F16, 64, (8, 2), 32, None, True, None),
        (F16, 80, (20, 1), 32, None, False, 1.5),
        (F16, 96, (16, 1), 32, 20, True, 1.5),
        (F16, 96, (8, 2), 16, 20, True, None),
        (F32, 128, (8, 2), 32, None, True, None),
        (F32, 256, (7, 1), 16, None, True, 1.5),
        (F32, 5, (7, 1), 8, 20, False, 1.5),
        (F32, 5, (8, 2), 32, 20, False, 1.5),
        (F32, 64, (20, 1), 8, 20, False, 1.5),
        (F32, 80, (16, 1), 32, 20, True, None),
        (F32, 96, (4, 4), 16, None, False, 1.5),
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
        num_blocks=40,
    )
    slopes = 0.5 ** torch.arange(1, num_heads + 1) if has_slopes else None
    check(space, batch, window=window, slopes=slopes, soft_cap=soft_cap)


@pytest.mark.parametrize(("dtype", "head_dim"), [(F32, 8), (F16, 64)])
@pytest.mark.parametrize(("least_keys", "enough_blocks"), [(1, 1000), (16, 1000), (69, 1000), (70, 1000), (1, 20)])
def test_partitions(
    monkeypatch: pytest.MonkeyPatch,
    space: Workspace,
    least_keys: int,
    enough_blocks: int,
    dtype: torch.dtype,
    head_dim: int,
) -> None:
    monkeypatch.setattr(cuda_attention, "LEAST_KEYS", least_keys)
    monkeypatch.setattr(cuda_attention, "ENOUGH_BLOCKS", enough_blocks)
    batch = make_batch(WORK, head_dim=head_dim, dtype=dtype)
    check(space, batch)
    check(space, batch, window=40)


@pytest.mark.parametrize(
    ("num_decodes", "max_context_len", "window", "num_partitions"),
    [
        (1, 8192, None, 64),  # of 128 keys, the least
        (1, 100_000, None, 128),  # 1024 blocks with the 8 key heads: enough
        (16, 100_000, None, 8),
        (17, 100_000, None, 8),
        (200, 100_000, None, 1),
        (1, 100_000, 1000, 8),
        (1, 1, None, 1),
        (0, 0, None, 0),
    ],
)
def test_a_decode_is_split_as_far_as_fills_a_gpu(
    num_decodes: int, max_context_len: int, window: int | None, num_partitions: int
) -> None:
    shape = StepShape(num_decodes, num_decodes, num_decodes, 1, max_context_len)
    window = cuda_attention.NO_WINDOW if window is None else window
    assert cuda_attention.partitions_of_a_decode(shape, 8, window) == num_partitions


def test_partitions_of_more_sequences_than_the_scratch_memory_holds(small_partitions: None, space: Workspace) -> None:
    small = workspace(5000, cuda=space.cuda)
    (buffer,) = small.scratch(torch.uint8, (5000,))
    check(small, make_batch([(1, n) for n in range(60, 75)]))
    assert small.scratch(torch.uint8, (5000,))[0].data_ptr() == buffer.data_ptr(), "the scratch memory grew"


@dataclass
class Counts:
    """What the launch of one kernel did."""

    caches: dict[str, Bytes] = field(default_factory=dict)
    """Of each of the two."""
    bank_conflicts: int = 0


def counts_of_launch(kernels: EmulatedKernels, batch: Batch, kernel: str, window: int | None) -> Counts:
    """Of the one launch of this kernel in an attention."""
    counts = Counts()

    class Counting(EmulatedKernels):
        def __init__(self) -> None:
            vars(self).update(vars(kernels))

        def launch(self, name: str, *arguments: Any, **options: Any) -> None:
            super().launch(name, *arguments, **options)
            if name == kernel:
                module = self.module_of(name)
                counts.caches = {cache: module.bytes(cache) for cache in ("key_cache", "value_cache")}
                counts.bank_conflicts = module.bank_conflicts()

    check(workspace(cuda=Counting()), batch, window=window)
    return counts


def check_counts(counts: Counts, batch: Batch, positions: int) -> None:
    """The keys and values of so many positions were read, under all key heads, and no bank met twice at once."""
    _, num_kv_heads, _, head_dim = batch.key_cache.shape
    expected = Bytes(positions * num_kv_heads * head_dim * batch.key_cache.dtype.itemsize, 0)
    assert counts.caches == {"key_cache": expected, "value_cache": expected}
    assert counts.bank_conflicts == 0


KERNELS = [("<bf16, 8>", 80), *((f"_mma<bf16, {head_dim}>", head_dim) for head_dim in cuda_attention.MMA_HEAD_DIMS)]


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("kernel", "head_dim"), KERNELS)
def test_decode_reads_each_key_and_value_once(
    small_partitions: None, kernels: EmulatedKernels, kernel: str, head_dim: int, window: int | None
) -> None:
    """For all query heads of a key head together; of a window only what is in it."""
    lens = [100, 1, 33]
    batch = make_batch([(1, n) for n in lens], num_heads=8, num_kv_heads=2, head_dim=head_dim, dtype=BF16)
    counts = counts_of_launch(kernels, batch, "decode" + kernel, window)
    check_counts(counts, batch, sum(min(n, window or n) for n in lens))


@pytest.mark.parametrize(("kernel", "head_dim"), KERNELS)
def test_prefill_reads_each_key_and_value_once_a_tile(kernels: EmulatedKernels, kernel: str, head_dim: int) -> None:
    """From the first that its first token sees to its last token."""
    batch = make_batch([(34, 110)], num_heads=4, num_kv_heads=1, head_dim=head_dim, dtype=BF16)
    # Rows are tokens under 4 query heads each. Tiles begin with these tokens, of 34; 76 are in the cache before.
    starts = [*range(0, 34, 32 if "mma" in kernel else 4), 34]
    ends = [76 + end for end in starts[1:]]
    check_counts(counts_of_launch(kernels, batch, "prefill" + kernel, None), batch, sum(ends))
    seen = [end - (76 + start - 9) for start, end in zip(starts, ends)]
    check_counts(counts_of_launch(kernels, batch, "prefill" + kernel, 10), batch, sum(seen))


@pytest.mark.parametrize(("head_dim", "window"), [(64, None), (64, 50), (64, 100), (96, 50), (256, 50)])
def test_prefill_over_several_tiles_of_keys(space: Workspace, head_dim: int, window: int | None) -> None:
    """Rows that see nothing of a tile that others see, before and after what they see."""
    work = [(70, 135), (3, 199)]
    check(space, make_batch(work, num_heads=2, num_kv_heads=1, head_dim=head_dim, dtype=F16), window=window)


@pytest.mark.parametrize("head_dim", cuda_attention.MMA_HEAD_DIMS)
def test_decode_with_partitions_that_go_round_a_ring(
    monkeypatch: pytest.MonkeyPatch, space: Workspace, head_dim: int
) -> None:
    monkeypatch.setattr(cuda_attention, "ENOUGH_BLOCKS", 1)
    batch = make_batch([(1, 600), (1, 333)], num_kv_heads=1, head_dim=head_dim, dtype=F16)
    check(space, batch, window=500)


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_tokens_at_odd_places(kernels: EmulatedKernels, dtype: torch.dtype) -> None:
    """Queries and outputs of which a kernel can move one element at a time only."""
    batch = make_batch([(1, 20), (5, 9)], head_dim=64, dtype=dtype)
    num_tokens, num_heads, head_dim = batch.query.shape

    def odd() -> torch.Tensor:
        elements = torch.zeros(num_tokens * (num_heads * head_dim + 1), dtype=dtype)
        return elements.as_strided(batch.query.shape, (num_heads * head_dim + 1, head_dim, 1), 1)

    out = run(workspace(cuda=kernels), batch)
    batch.query = odd().copy_(batch.query)
    odd_out = run(workspace(cuda=kernels), batch, odd())
    assert out.any()
    assert torch.equal(odd_out, out)


@pytest.mark.parametrize(("dtype", "head_dim"), [(F32, 8), (F16, 64)])
@pytest.mark.parametrize("work", [[(1, 30)], [(4, 30)]])
def test_block_id_beyond_the_cache_is_caught(
    space: Workspace, work: list[tuple[int, int]], dtype: torch.dtype, head_dim: int
) -> None:
    batch = make_batch(work, head_dim=head_dim, dtype=dtype)
    batch.block_tables[0, 1] = len(batch.key_cache)
    with pytest.raises(EmulatorError, match=r"out of bounds at key_cache"):
        run(space, batch)


@pytest.mark.parametrize(("dtype", "head_dim"), [(F32, 8), (F16, 64)])
@pytest.mark.parametrize("work", [[(1, 30)], [(4, 30)]])
def test_context_beyond_the_block_table_is_caught(
    space: Workspace, work: list[tuple[int, int]], dtype: torch.dtype, head_dim: int
) -> None:
    batch = make_batch(work, head_dim=head_dim, dtype=dtype)
    batch.block_tables = batch.block_tables[:1, :2]
    with pytest.raises(EmulatorError, match=r"out of bounds at block_tables"):
        run(space, batch)


def run(space: Workspace, batch: Batch, out: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.zeros(batch.query.shape, dtype=batch.query.dtype) if out is None else out
    caches = batch.key_cache, batch.value_cache
    numbers = batch.query_starts, batch.context_lens, batch.block_tables
    attend(space, batch.shape, batch.query, *caches, *numbers, 0.3, None, None, None, out)
    return out


@pytest.mark.parametrize("is_key", [True, False])
@pytest.mark.parametrize("sequence", [1, 4])
@pytest.mark.parametrize(("dtype", "head_dim"), [(F32, 8), (F16, 64)])
def test_nan_in_a_context_shows_in_its_sequence_alone(
    small_partitions: None, space: Workspace, dtype: torch.dtype, head_dim: int, sequence: int, is_key: bool
) -> None:
    """A request that went wrong must be seen to fail, whichever part of its context the numbers are in."""
    batch = make_batch(WORK, head_dim=head_dim, dtype=dtype)
    (batch.key_cache if is_key else batch.value_cache)[batch.block_tables[sequence, 1].long()] = torch.nan
    out = run(space, batch)[: batch.shape.num_tokens]
    rows = slice(*batch.query_starts[sequence : sequence + 2].tolist())
    assert out[rows].isnan().all()
    out[rows] = 0.0
    assert out.isfinite().all()


@pytest.mark.parametrize(("dtype", "head_dim"), [(F32, 8), (F16, 64)])
def test_contexts_of_several_partitions_as_they_are(space: Workspace, dtype: torch.dtype, head_dim: int) -> None:
    assert cuda_attention.LEAST_KEYS == 128
    check(space, make_batch([(1, 129), (1, 500), (1, 128), (2, 40)], head_dim=head_dim, dtype=dtype))


def test_a_model_has_the_kernels_compiled_that_it_launches() -> None:
    assert [kernel.name for kernel in cuda_attention.kernels(BF16, 64)] == [
        "decode_mma<bf16, 64>",
        "prefill_mma<bf16, 64>",
        "merge<bf16>",
    ]
    plain = ["decode<float, 4>", "decode<float, 1>", "prefill<float, 4>", "prefill<float, 1>", "merge<float>"]
    assert [kernel.name for kernel in cuda_attention.kernels(F32, 64)] == plain
    assert [kernel.name.split("<")[0] for kernel in cuda_attention.kernels(F16, 80)] == [
        name.split("<")[0] for name in plain
    ]


def test_heads_that_are_too_large_are_refused_before_anything_is_compiled() -> None:
    with pytest.raises(StartupError, match=r"512 dimensions, the CUDA attention kernels take up to 256: use --device"):
        cuda_attention.kernels(F32, 512)
