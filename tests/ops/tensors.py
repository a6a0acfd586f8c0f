"""Makes what ops are called with."""

from __future__ import annotations

import torch

from vllm_lite.engine.step import StepShape
from vllm_lite.kernels.cuda import CudaKernels
from vllm_lite.ops.workspace import Workspace

CPU = torch.device("cpu")
ALL_NATIVE = frozenset({torch.float32, torch.bfloat16, torch.float16})
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
KERNEL_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def workspace(
    scratch_bytes: int = 2**20,
    native_dtypes: frozenset[torch.dtype] = frozenset({torch.float32}),
    cuda: CudaKernels | None = None,
) -> Workspace:
    return Workspace(CPU, native_dtypes, scratch_bytes, cuda)


def tokens_shape(num_tokens: int, num_rows: int = 0) -> StepShape:
    """The shape of a step of decodes."""
    return StepShape(num_tokens, num_tokens, num_tokens, 1, 1, num_rows)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None) -> None:
    """Against float64, relative to the largest expected value."""
    tolerance = TOLERANCES[actual.dtype] if tolerance is None else tolerance
    difference = (actual.double() - expected.double()).abs().max().item() if actual.numel() else 0.0
    assert difference <= tolerance * max(1.0, expected.abs().max().item() if actual.numel() else 0.0)


def assert_near(actual: torch.Tensor, reference: torch.Tensor) -> None:
    """A kernel's results against the reference's, on data of about 1: absolute, or one rounding of a larger value."""
    torch.testing.assert_close(
        actual, reference, rtol=torch.finfo(actual.dtype).eps, atol=KERNEL_TOLERANCES[actual.dtype]
    )
