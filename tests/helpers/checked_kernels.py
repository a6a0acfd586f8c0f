"""All CUDA kernels, emulated and checked, built once in a test process."""

from __future__ import annotations

from functools import cache

from tests.cuda.emulator import EmulatedKernels
from vllm_lite.ops.cuda_kernels import every_kernel


@cache
def checked_kernels() -> EmulatedKernels:
    """For every dtype and size of heads."""
    return EmulatedKernels(every_kernel())
