"""Which CUDA kernels the ops of a model may launch, so that all of them can be compiled before the first request."""

from __future__ import annotations

import torch

from vllm_lite.kernels.cuda import Kernel
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
