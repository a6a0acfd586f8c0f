"""Runs the tests that ask for `space` on every implementation of an op."""

from __future__ import annotations

import pytest

from tests.cuda.emulator import EmulatedKernels, missing_requirement
from tests.helpers.checked_kernels import checked_kernels
from tests.ops.tensors import CPU
from vllm_lite.ops.workspace import Workspace


@pytest.fixture
def kernels() -> EmulatedKernels:
    """Every CUDA kernel, emulated and checked."""
    missing = missing_requirement()
    if missing is not None:
        pytest.skip(missing)
    return checked_kernels()


@pytest.fixture(params=["reference", "cuda"])
def space(request: pytest.FixtureRequest) -> Workspace:
    if request.param == "reference":
        return Workspace(CPU, scratch_bytes=2**20)
    return Workspace(CPU, scratch_bytes=2**20, cuda=request.getfixturevalue("kernels"))
