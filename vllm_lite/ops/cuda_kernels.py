"""Which CUDA kernels the ops of a model may launch, so that all of them can be compiled before the first request."""

from __future__ import annotations

import torch

from vllm_lite.kernels.cuda import Kernel
from vllm_lite.ops import activation, kv_cache, norm, rotary


def kernels_for(dtype: torch.dtype) -> list[Kernel]:
    """Every instance that a model in this dtype may launch."""
    return [*kv_cache.kernels(), *norm.kernels(dtype), *rotary.kernels(dtype), *activation.kernels(dtype)]
