"""Runs the tests that ask for `space` on every implementation of an op."""

from __future__ import annotations

from functools import cache

import pytest

from tests.cuda.emulator import EmulatedKernels, missing_requirement
from tests.ops.tensors import CPU
from vllm_lite.kernels.cuda import C_TYPES
from vllm_lite.ops.cuda_kernels import kernels_for
from vllm_lite.ops.workspace import Workspace


@cache
def all_kernels() -> EmulatedKernels:
    return EmulatedKernels(kernel for dtype in C_TYPES for kernel in kernels_for(dtype))


@pytest.fixture
def kernels() -> EmulatedKernels:
    """Every CUDA kernel, emulated and checked."""
    missing = missing_requirement()
    if missing is not None:
        pytest.skip(missing)
    return all_kernels()


@pytest.fixture(params=["reference", "cuda"])
def space(request: pytest.FixtureRequest) -> Workspace:
    if request.param == "reference":
        return Workspace(CPU, scratch_bytes=2**20)
    return Workspace(CPU, scratch_bytes=2**20, kernels=request.getfixturevalue("kernels"))
