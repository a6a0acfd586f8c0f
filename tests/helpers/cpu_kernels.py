"""The CPU kernels in every code path that this machine can execute, and what their ops are called with."""

from __future__ import annotations

import atexit
import os
from functools import cache
from pathlib import Path

import pytest
import torch

from vllm_lite.kernels.cache_folder import private_cache_folder
from vllm_lite.kernels.cpu import PANEL_ROWS, CpuKernels
from vllm_lite.kernels.cpu_library import FLAGS, build_library, cpu_flags, find_compiler, missing_instructions
from vllm_lite.ops.workspace import Workspace

CPU = torch.device("cpu")

# What is compiled for a chip with such instructions. A chip without them executes the same code, its vectors cut in
# pieces and the dot product of pairs written out; the compiler would take minutes to optimise that.
PATHS: dict[str, tuple[str, ...]] = {
    "native": (),
    "avx2": ("-march=haswell",),
    "avx512": ("-O0", "-march=haswell", "-DVECTOR_LANES=16"),
    "avx512_bf16": ("-O0", "-march=haswell", "-DVECTOR_LANES=16", "-DEMULATE_BF16_DOT"),
}
if "avx512f" not in cpu_flags():
    del PATHS["avx2"]  # the same as native

SANITIZED = "CPU_KERNELS_SANITIZED"
"""Set in the environment: the tests run on kernels that watch their own accesses and arithmetic (`test_sanitizers`)."""
# Without the checks of pointers that AddressSanitizer makes where they are used: they take a third of the compilation.
SANITIZERS = (
    "-O0",
    "-g1",
    "-fsanitize=address,undefined",
    "-fno-sanitize=null,object-size,pointer-overflow,vptr",
    "-fno-sanitize-recover=undefined",
)
SANITIZED_PATHS = {path: (*PATHS[path], *SANITIZERS) for path in ("native", "avx512_bf16")}
if SANITIZED in os.environ:
    PATHS = SANITIZED_PATHS


def missing_requirement() -> str | None:
    """Why the CPU kernels cannot be tested here."""
    if find_compiler() is None:
        return "there is no C++ compiler"
    return missing_instructions(cpu_flags())


def compiled(flags: tuple[str, ...]) -> Path:
    """The kernels' library with more flags than usual."""
    if (missing := missing_requirement()) is not None:
        pytest.skip(missing)
    compiler = find_compiler()
    assert compiler is not None
    return build_library(compiler, private_cache_folder("cpu"), (*FLAGS, *flags))


@cache
def cpu_kernels(path: str = "native", num_threads: int = 2) -> CpuKernels:
    """Compiled once for all tests."""
    kernels = CpuKernels(compiled(PATHS[path]), num_threads)
    atexit.register(kernels.close)
    return kernels


def cpu_space(path: str = "native", num_threads: int = 2) -> Workspace:
    return Workspace(CPU, scratch_bytes=2**20, cpu=cpu_kernels(path, num_threads))


def packed(weight: torch.Tensor, kernels: CpuKernels | None = None) -> torch.Tensor:
    """A packed copy, of the same shape; the memory goes on to the next multiple of PANEL_ROWS."""
    rows = -(-weight.shape[0] // PANEL_ROWS) * PANEL_ROWS
    storage = torch.zeros(rows, weight.shape[1], dtype=weight.dtype)
    storage[: len(weight)] = weight
    (kernels or cpu_kernels()).pack(storage)
    return storage[: len(weight)]


def packed_pair(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Two weights as `gate_up_silu` takes them."""
    rows = -(-gate.shape[0] // PANEL_ROWS) * PANEL_ROWS
    storage = torch.zeros(2 * rows, gate.shape[1], dtype=gate.dtype)
    storage[: len(gate)], storage[rows : rows + len(up)] = gate, up
    cpu_kernels().pack(storage)
    return storage


def in_cache_order(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Caches [num_blocks, num_kv_heads, block_size, head_dim] with their bytes as kv_cache.h has them."""
    step = 4 // key.dtype.itemsize
    blocks, heads, size, dim = key.shape
    keys = key.view(blocks, heads, size, dim // step, step).permute(0, 1, 3, 2, 4).reshape(key.shape)
    values = value.view(blocks, heads, size // step, step, dim).permute(0, 1, 2, 4, 3).reshape(value.shape)
    return keys.contiguous(), values.contiguous()
