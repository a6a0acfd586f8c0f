"""Calls the attention kernels of cpu/attention.h: decodes, cut in partitions where that helps, and prompt chunks."""

from __future__ import annotations

import torch

from vllm_lite.engine.step import StepShape
from vllm_lite.kernels.cpu import CpuKernels, type_name
from vllm_lite.ops.cuda_attention import Scoring
from vllm_lite.ops.workspace import Workspace

PARTIALS_SIZE = 2**22
"""Floats for results of partitions. Steps with more of them at work do not cut their decodes."""
NO_WINDOW = 2**62


def attend(
    workspace: Workspace,
    kernels: CpuKernels,
    shape: StepShape,
    query: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scoring: Scoring,
    out: torch.Tensor,
) -> None:
    """Keys' and values' caches; query_starts, context_lens and block_tables; all as in `attention.attend`."""
    query_starts, context_lens, block_tables = tables
    partials = workspace.kept("partial results of attention", torch.float32, PARTIALS_SIZE)
    _, num_heads, head_dim = query.shape
    _, num_kv_heads, block_size, _ = caches[0].shape
    strides = (query.stride(0), out.stride(0), block_tables.stride(0))
    sizes = (num_heads, num_kv_heads, head_dim, block_size)
    window = NO_WINDOW if scoring.window is None else min(scoring.window, NO_WINDOW)
    numbers = (*strides, *sizes, window, scoring.scale, scoring.soft_cap or 0.0)
    dtype = type_name(query.dtype)
    tensors = (context_lens, block_tables, scoring.alibi_slopes, out)
    for name in ("decode", "merge_decode"):
        kernels.call(f"{name}_{dtype}", shape, query, *caches, *tensors, partials, PARTIALS_SIZE, *numbers)
    kernels.call(f"prefill_{dtype}", shape, query, *caches, query_starts, *tensors, *numbers)
