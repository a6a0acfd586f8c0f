"""All CUDA kernels, emulated and checked, built once in a test process."""

from __future__ import annotations

from functools import cache

from tests.cuda.emulator import EmulatedKernels
from vllm_lite.kernels.cuda import C_TYPES
from vllm_lite.ops.cuda_attention import MAX_HEAD_DIM
from vllm_lite.ops.cuda_kernels import kernels_for


@cache
def checked_kernels() -> EmulatedKernels:
    """For every dtype and size of heads."""
    return EmulatedKernels(kernel for dtype in C_TYPES for kernel in kernels_for(dtype, MAX_HEAD_DIM))
