"""Launches the attention kernels of cuda/attention.cu: decodes split over their keys and merged, prompt chunks whole.

Every launch is fixed by the step's Python ints; what lies in the tensors is never read back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vllm_lite.engine.step import StepShape
from vllm_lite.errors import StartupError
from vllm_lite.kernels.cuda import C_TYPES, CudaKernels, Kernel, access_widths, elements_per_access, threads_for
from vllm_lite.ops.workspace import ALIGNMENT, Workspace

PARTITION_SIZE = 512
"""Keys of a decode that one block takes."""
MAX_HEAD_DIM = 256
"""With more, a block's tile does not fit the shared memory of all architectures."""

# As in attention.cu.
ROWS = 16
KEYS = 32
NUM_THREADS = 128

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
    """Every instance for a dtype and heads of up to this size. Raises StartupError where they are too large."""
    if head_dim > MAX_HEAD_DIM:
        raise StartupError(
            f"the model's heads have {head_dim} dimensions, the CUDA attention kernels take up to {MAX_HEAD_DIM}: "
            "use --device cpu"
        )
    c_type = C_TYPES[dtype]
    tiled = [
        Kernel("attention.cu", f"{name}<{c_type}, {width}>", _shared_bytes(head_dim))
        for name in ("decode", "prefill")
        for width in access_widths(dtype)
    ]
    return [*tiled, Kernel("attention.cu", f"merge<{c_type}>")]


def _shared_bytes(head_dim: int) -> int:
    """A block's `Tile`."""
    return 4 * (2 * ROWS * head_dim + KEYS * (head_dim | 1) + KEYS * head_dim + ROWS * KEYS)


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
    _, num_heads, head_dim = query.shape
    _, num_kv_heads, block_size, _ = key_cache.shape
    *_, window = numbers = scoring.numbers
    num_partitions = -(-min(shape.max_context_len, int(window)) // PARTITION_SIZE)
    partitions = np.int32(PARTITION_SIZE), np.int32(num_partitions)
    num_tiles = -(-num_heads // num_kv_heads // ROWS)
    c_type, width = C_TYPES[query.dtype], elements_per_access(key_cache, value_cache)
    num_parts = num_heads * num_partitions
    # As many sequences at a time as the scratch memory holds partial results of: captured steps need it in its place.
    for seqs in workspace.row_tiles(shape.num_decodes, 4 * num_parts * (head_dim + 2) + 3 * ALIGNMENT):
        num_seqs = seqs.stop - seqs.start
        parts = (num_seqs, num_parts)
        accumulators, maxima, sums = workspace.scratch(torch.float32, (*parts, head_dim), parts, parts)
        kernels.launch(
            f"decode<{c_type}, {width}>",
            (num_tiles * num_partitions, num_kv_heads, num_seqs),
            NUM_THREADS,
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
            *map(np.int32, (num_heads, num_kv_heads, head_dim, block_size)),
            *numbers,
            *partitions,
            shared_bytes=_shared_bytes(head_dim),
        )
        kernels.launch(
            f"merge<{c_type}>",
            (num_heads, num_seqs if num_partitions else 0),
            threads_for(head_dim),
            accumulators,
            maxima,
            sums,
            context_lens[seqs],
            out[seqs],
            np.int64(out.stride(0)),
            np.int32(head_dim),
            window,
            *partitions,
        )


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
    _, num_heads, head_dim = query.shape
    _, num_kv_heads, block_size, _ = key_cache.shape
    first, num_seqs = shape.num_decodes, shape.num_seqs - shape.num_decodes
    num_tiles = -(-shape.max_query_len * (num_heads // num_kv_heads) // ROWS)
    kernels.launch(
        f"prefill<{C_TYPES[query.dtype]}, {elements_per_access(key_cache, value_cache)}>",
        (num_tiles, num_kv_heads, num_seqs),
        NUM_THREADS,
        query,
        key_cache,
        value_cache,
        query_starts[first:],
        context_lens[first:],
        block_tables[first:],
        scoring.alibi_slopes,
        out,
        *map(np.int64, (query.stride(0), out.stride(0), block_tables.stride(0))),
        *map(np.int32, (num_heads, num_kv_heads, head_dim, block_size)),
        *scoring.numbers,
        shared_bytes=_shared_bytes(head_dim),
    )
