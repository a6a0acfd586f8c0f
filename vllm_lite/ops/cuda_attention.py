"""Launches the attention kernels: decodes split over their keys and merged, prompt chunks whole.

Those of cuda/decode_mma.cu and cuda/prefill_mma.cu run on tensor cores; for the dtypes and head sizes that these do not
take, cuda/attention.cu has plain ones. Every launch is fixed by the step's Python ints; what lies in the tensors is
never read back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vllm_lite.engine.step import StepShape
from vllm_lite.errors import StartupError
from vllm_lite.kernels.cuda import C_TYPES, CudaKernels, Kernel, access_widths, elements_per_access
from vllm_lite.ops.workspace import ALIGNMENT, Workspace

LEAST_KEYS = 128
"""A decode's keys are not split into partitions of fewer."""
ENOUGH_BLOCKS = 1024
"""A decode is split no further than into these: some rounds of what the largest GPUs run at once, so that the last
round, which may not fill them, matters little."""
MAX_HEAD_DIM = 256
"""With more, a block's tile does not fit the shared memory of all architectures."""

MAX_MERGE_WARPS = 16

MMA_DTYPES = (torch.float16, torch.bfloat16)
MMA_HEAD_DIMS = (64, 96, 128, 256)
"""With these dtypes and these sizes of heads, attention runs on tensor cores."""

NO_WINDOW = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Scoring:
    """How scores are made of products; the arguments of `attend` that say so."""

    scale: float
    window: int | None
    alibi_slopes: torch.Tensor | None
    soft_cap: float | None

    @property
    def numbers(self) -> tuple[np.float32, np.float32, np.int32]:
        """Scale, soft cap and window as the kernels take them."""
        window = NO_WINDOW if self.window is None else min(self.window, NO_WINDOW)
        return np.float32(self.scale), np.float32(self.soft_cap or 0.0), np.int32(window)


def kernels(dtype: torch.dtype, head_dim: int) -> list[Kernel]:
    """Every instance for a dtype and heads of this size. Raises StartupError where they are too large."""
    if head_dim > MAX_HEAD_DIM:
        raise StartupError(
            f"the model's heads have {head_dim} dimensions, the CUDA attention kernels take up to {MAX_HEAD_DIM}: "
            "use --device cpu"
        )
    merge = Kernel("attention.cu", f"merge<{C_TYPES[dtype]}>", MAX_MERGE_WARPS * 4 * head_dim)
    if _has_mma(dtype, head_dim):
        return [_decode_mma(dtype, head_dim).kernel, _prefill_mma(dtype, head_dim).kernel, merge]
    widths = access_widths(dtype)
    return [*(_plain(name, dtype, head_dim, width).kernel for name in ("decode", "prefill") for width in widths), merge]


@dataclass(frozen=True)
class _Tiled:
    """A kernel whose blocks take so many rows each, of the query heads and tokens that share a key head."""

    kernel: Kernel
    num_rows: int
    num_threads: int
    is_for_any_head_dim: bool = False
    """Then it has a parameter for the size of a head."""

    def sizes(self, query: torch.Tensor, key_cache: torch.Tensor) -> list[np.int32]:
        """Of heads and blocks, the arguments that every such kernel takes."""
        _, num_kv_heads, block_size, head_dim = key_cache.shape
        head_dims = [head_dim] if self.is_for_any_head_dim else []
        return list(map(np.int32, (query.shape[1], num_kv_heads, *head_dims, block_size)))


def _has_mma(dtype: torch.dtype, head_dim: int) -> bool:
    return dtype in MMA_DTYPES and head_dim in MMA_HEAD_DIMS


def _decode_mma(dtype: torch.dtype, head_dim: int) -> _Tiled:
    """As decode_mma.cu says: each warp has a ring of tiles."""
    num_warps = 4 if head_dim <= 128 else 2
    num_stages = 4 if head_dim <= 64 else 3
    name = f"decode_mma<{C_TYPES[dtype]}, {head_dim}>"
    kernel = Kernel("decode_mma.cu", name, num_warps * num_stages * _tile_bytes(16, head_dim))
    return _Tiled(kernel, 16, 32 * num_warps)


def _prefill_mma(dtype: torch.dtype, head_dim: int) -> _Tiled:
    """As prefill_mma.cu says: a block has two tiles."""
    num_keys = 64 if head_dim <= 128 else 32
    name = f"prefill_mma<{C_TYPES[dtype]}, {head_dim}>"
    return _Tiled(Kernel("prefill_mma.cu", name, 2 * _tile_bytes(num_keys, head_dim)), 128, 256)


def _tile_bytes(num_keys: int, head_dim: int) -> int:
    """A `KeyTile` of attention_mma.cuh."""
    chunks = head_dim // 8
    return 2 * num_keys * (chunks if chunks % 8 == 0 else chunks | 1) * 16


def _plain(name: str, dtype: torch.dtype, head_dim: int, width: int) -> _Tiled:
    """As attention.cu says: a block has a `Tile`."""
    num_rows, num_keys = 16, 32
    num_floats = 2 * num_rows * head_dim + num_keys * (head_dim | 1) + num_keys * head_dim + num_rows * num_keys
    kernel = Kernel("attention.cu", f"{name}<{C_TYPES[dtype]}, {width}>", 4 * num_floats)
    return _Tiled(kernel, num_rows, 128, is_for_any_head_dim=True)


def decode(
    workspace: Workspace,
    kernels: CudaKernels,
    shape: StepShape,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scoring: Scoring,
    out: torch.Tensor,
) -> None:
    """The step's first `num_decodes` sequences, whose tokens are the step's first; arguments as of `attend`."""
    dtype, (_, num_heads, head_dim) = query.dtype, query.shape
    num_kv_heads = key_cache.shape[1]
    if _has_mma(dtype, head_dim):
        tiled = _decode_mma(dtype, head_dim)
    else:
        tiled = _plain("decode", dtype, head_dim, elements_per_access(key_cache, value_cache))
    num_tiles = -(-num_heads // num_kv_heads // tiled.num_rows)
    *_, window = numbers = scoring.numbers
    num_partitions = partitions_of_a_decode(shape, num_tiles * num_kv_heads, int(window))
    partitions = np.int32(LEAST_KEYS), np.int32(num_partitions)
    num_merge_warps = min(num_partitions, MAX_MERGE_WARPS)
    num_parts = num_heads * num_partitions
    # As many sequences at a time as the scratch memory holds partial results of: captured steps need it in its place.
    for seqs in workspace.row_tiles(shape.num_decodes, 4 * num_parts * (head_dim + 2) + 3 * ALIGNMENT):
        num_seqs = seqs.stop - seqs.start
        parts = (num_seqs, num_parts)
        accumulators, maxima, sums = workspace.scratch(torch.float32, (*parts, head_dim), parts, parts)
        kernels.launch(
            tiled.kernel.name,
            (num_tiles * num_partitions, num_kv_heads, num_seqs),
            tiled.num_threads,
            query[seqs],
            key_cache,
            value_cache,
            context_lens[seqs],
            block_tables[seqs],
            scoring.alibi_slopes,
            accumulators,
            maxima,
            sums,
            *map(np.int64, (query.stride(0), block_tables.stride(0))),
            *tiled.sizes(query, key_cache),
            *numbers,
            *partitions,
            shared_bytes=tiled.kernel.shared_bytes,
        )
        kernels.launch(
            f"merge<{C_TYPES[dtype]}>",
            (num_heads, num_seqs if num_partitions else 0),
            32 * num_merge_warps,
            accumulators,
            maxima,
            sums,
            context_lens[seqs],
            out[seqs],
            np.int64(out.stride(0)),
            np.int32(head_dim),
            window,
            *partitions,
            shared_bytes=num_merge_warps * 4 * head_dim,
        )


def partitions_of_a_decode(shape: StepShape, blocks_per_partition: int, window: int) -> int:
    """Into how many a decode's keys are split at most; a partition of one sequence takes so many blocks."""
    most = -(-min(shape.max_context_len, window) // LEAST_KEYS)
    return min(most, -(-ENOUGH_BLOCKS // (blocks_per_partition * max(shape.num_decodes, 1))))


def prefill(
    kernels: CudaKernels,
    shape: StepShape,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scoring: Scoring,
    out: torch.Tensor,
) -> None:
    """The sequences after the step's decodes; arguments as of `attend`."""
    dtype, (_, num_heads, head_dim) = query.dtype, query.shape
    num_kv_heads = key_cache.shape[1]
    if _has_mma(dtype, head_dim):
        tiled = _prefill_mma(dtype, head_dim)
    else:
        tiled = _plain("prefill", dtype, head_dim, elements_per_access(key_cache, value_cache))
    first, num_seqs = shape.num_decodes, shape.num_seqs - shape.num_decodes
    num_tiles = -(-shape.max_query_len * (num_heads // num_kv_heads) // tiled.num_rows)
    kernels.launch(
        tiled.kernel.name,
        (num_tiles, num_kv_heads, num_seqs),
        tiled.num_threads,
        query,
        key_cache,
        value_cache,
        query_starts[first:],
        context_lens[first:],
        block_tables[first:],
        scoring.alibi_slopes,
        out,
        *map(np.int64, (query.stride(0), out.stride(0), block_tables.stride(0))),
        *tiled.sizes(query, key_cache),
        *scoring.numbers,
        shared_bytes=tiled.kernel.shared_bytes,
    )
