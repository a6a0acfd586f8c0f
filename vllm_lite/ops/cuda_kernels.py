"""Which CUDA kernels the ops of a model may launch, so that all of them can be compiled before the first request."""

from __future__ import annotations

import torch

from vllm_lite.kernels.cuda import C_TYPES, Kernel
from vllm_lite.ops import activation, cuda_attention, kv_cache, norm, rotary


def kernels_for(dtype: torch.dtype, head_dim: int) -> list[Kernel]:
    """Every instance that a model in this dtype, with heads of this size, may launch.

    Raises StartupError where there is none.
    """
    return [
        *kv_cache.kernels(),
        *norm.kernels(dtype),
        *rotary.kernels(dtype),
        *activation.kernels(dtype),
        *cuda_attention.kernels(dtype, head_dim),
    ]


def every_kernel() -> list[Kernel]:
    """Each instance that some model may launch, once, with the most shared memory that one may ask for."""
    by_name = {
        kernel.name: kernel  # the largest heads come last, and want the most
        for dtype in C_TYPES
        for head_dim in range(1, cuda_attention.MAX_HEAD_DIM + 1)
        for kernel in kernels_for(dtype, head_dim)
    }
    return list(by_name.values())
