"""The emulator refuses what CuPy or a GPU would refuse or get wrong, and builds nothing twice."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.cuda import emulator
from tests.cuda.emulator import (
    STREAM,
    Buffer,
    EmulatedKernels,
    EmulatorCompileError,
    EmulatorError,
    EmulatorModule,
    missing_requirement,
)
from vllm_lite.errors import StartupError
from vllm_lite.kernels.cuda import Kernel, read_source, source_folder

MISSING = missing_requirement()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

NUMBERED = """
#include "compat.cuh"
// Each element is the number of its thread in the grid, of three directions.
__global__ void number_threads(int* out, long long offset, float factor) {
  const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  out[offset + block * blockDim.x * blockDim.y * blockDim.z + thread] = factor * thread;
}
"""


def numbered(folder: Path, text: str = NUMBERED) -> EmulatorModule:
    for path in source_folder().glob("*.cuh"):
        (folder / path.name).write_text(path.read_text())
    (folder / "numbered.cu").write_text(text)
    return EmulatorModule(code=read_source("numbered.cu", folder), name_expressions=["number_threads"])


def run(module: EmulatorModule, *arguments: Any, **options: Any) -> None:
    kernel = module.get_function("number_threads")
    kernel((2, 3, 2), (4, 2, 5), arguments, **{"stream": STREAM, **options})


def test_threads_of_a_grid_in_three_directions(tmp_path: Path) -> None:
    out = torch.zeros(2 + 12 * 40, dtype=torch.int32)
    module = numbered(tmp_path)
    module.watch([Buffer.of("out", out)])
    run(module, np.uint64(out.data_ptr()), np.int64(2), np.float32(3))
    assert out[:2].tolist() == [0, 0]
    assert torch.equal(out[2:].view(12, 40), (3 * torch.arange(40, dtype=torch.int32)).expand(12, 40))


def test_arguments_must_have_the_parameters_types(tmp_path: Path) -> None:
    module = numbered(tmp_path)
    pointer, offset, factor = np.uint64(0), np.int64(0), np.float32(0)
    for arguments, message in (
        ((pointer, offset), "has 3 parameters and was given 2"),
        ((pointer, np.int32(0), factor), "parameter 1 is of kind int64, not int32"),
        ((pointer, offset, np.float64(0)), "parameter 2 is of kind float32, not float64"),
        ((pointer, offset, np.int32(0)), "parameter 2 is of kind float32, not int32"),
        ((np.int64(0), offset, factor), "parameter 0 is of kind pointer, not int64"),
    ):
        with pytest.raises(EmulatorError, match=message):
            run(module, *arguments)


def test_launches_that_a_gpu_would_not_take(tmp_path: Path) -> None:
    module = numbered(tmp_path)
    arguments = (np.uint64(0), np.int64(0), np.float32(0))
    with pytest.raises(EmulatorError, match="another stream than torch's current one"):
        run(module, *arguments, stream=None)
    with pytest.raises(EmulatorError, match="49153 bytes of shared memory were not asked for"):
        run(module, *arguments, shared_mem=48 * 1024 + 1)
    kernel = module.get_function("number_threads")
    kernel.max_dynamic_shared_size_bytes = 300 * 1024
    for grid, block, shared_bytes in (((1,), (2048,), 0), ((1, 70000), (32,), 0), ((1,), (32,), 256 * 1024)):
        with pytest.raises(EmulatorError, match="invalid launch configuration"):
            kernel(grid, block, arguments, shared_mem=shared_bytes, stream=STREAM)


def test_memory_that_nobody_named_is_out_of_bounds(tmp_path: Path) -> None:
    module, out = numbered(tmp_path), torch.zeros(480, dtype=torch.int32)
    module.watch([])
    with pytest.raises(EmulatorError, match="write of 4 bytes where no buffer is"):
        run(module, np.uint64(out.data_ptr()), np.int64(0), np.float32(1))


def test_nothing_is_built_twice_and_everything_that_changed_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    run_command = subprocess.run

    def counted(command: list[str], **options: Any) -> Any:
        commands.append(command)
        return run_command(command, **options)

    monkeypatch.setattr(emulator, "_cache_folder", lambda: tmp_path)
    emulator._compiler_version()
    monkeypatch.setattr(subprocess, "run", counted)
    sources = tmp_path / "sources"
    sources.mkdir()
    numbered(sources)
    assert len(commands) == 4, "two parts of the runtime, the kernels, and the library of them"
    numbered(sources)
    assert len(commands) == 4
    numbered(sources, NUMBERED + "// edited\n")
    assert len(commands) == 6


def test_a_compile_error_names_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(EmulatorCompileError, match=r"numbered\.cu:7:.*nonsense"):
        numbered(tmp_path, NUMBERED.replace("factor * thread", "nonsense"))
    with pytest.raises(StartupError, match=r"(?s)cuda/kv_cache\.cu does not compile.*no_such_kernel"):
        EmulatedKernels([Kernel("kv_cache.cu", "no_such_kernel")])


def test_static_shared_memory_does_not_compile(tmp_path: Path) -> None:
    """The checker would not see it."""
    with pytest.raises(EmulatorCompileError, match="the_checker_sees_DYNAMIC_SHARED_only"):
        numbered(tmp_path, NUMBERED.replace("const int block", "__shared__ int sums[4];\n  const int block"))


def test_kernels_without_the_checker_give_the_same_bits() -> None:
    kernel = Kernel("norm.cu", "rms_norm<bf16, 8>", 128)
    x, weight = torch.randn(3, 1, 4096).bfloat16(), torch.randn(4096).bfloat16()
    outs = [torch.zeros_like(x) for _ in range(2)]
    for out, is_checked in zip(outs, (True, False)):
        EmulatedKernels([kernel], is_checked=is_checked).launch(
            kernel.name, (3, 1), 512, x, weight, out, np.float32(1e-5), np.int32(4096), *map(np.int64, [4096] * 4)
        )
    assert torch.equal(*outs)
    assert outs[0].any()
