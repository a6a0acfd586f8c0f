"""scripts/check_kernels: every kernel compiles for every architecture, and what does not is reported."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NVIDIA's compiler is installed on Linux only")
if sys.platform == "linux":
    from scripts import check_kernels
    from scripts.check_kernels import MAX_SHARED_KIB, Report, check, main, table
    from scripts.nvrtc import NvrtcError, Usage, compile_source
    from vllm_lite.kernels.cuda import Kernel, read_source, source_folder
    from vllm_lite.ops.cuda_kernels import every_kernel

SPILLING = """
extern "C" __global__ void __launch_bounds__(1024) spilling(float* x) {
  float kept[200];
#pragma unroll
  for (int i = 0; i < 200; ++i) kept[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 200; ++i) x[(199 - i) * 1024 + threadIdx.x] = kept[i] * kept[(i * 7) % 200];
}
"""


def test_every_kernel_compiles_for_every_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert all(kernel.name in printed for kernel in every_kernel())
    assert all(architecture in printed for architecture in MAX_SHARED_KIB)


def test_a_kernel_that_takes_too_much_is_a_problem() -> None:
    kernel = every_kernel()[0]
    large = dataclasses.replace(kernel, shared_bytes=100 * 1024)
    reports = [
        Report(large, architecture, Usage(num_registers=32, stack_bytes=0, spill_bytes=spill_bytes))
        for architecture, spill_bytes in (("sm_86", 0), ("sm_90", 0), ("sm_80", 16))
    ]
    assert [len(report.problems) for report in reports] == [1, 0, 1]
    assert "sm_86: 102400 bytes of shared memory, of 101376" in table(reports)
    assert "sm_80: 16 bytes spilled" in table(reports)
    assert "32+16" in table(reports)


def test_spills_are_read_from_the_log() -> None:
    usage = compile_source("spilling.cu", SPILLING, ["spilling"], "sm_80")["spilling"]
    assert usage.num_registers == 64
    assert usage.spill_bytes > 0


def test_problems_end_in_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check_kernels, "every_kernel", lambda: [Kernel("kv_cache.cu", "copy_blocks", 300 * 1024)])
    assert main(["sm_90"]) == 1
    assert "copy_blocks on sm_90: 307200 bytes of shared memory" in capsys.readouterr().out
    monkeypatch.setattr(check_kernels, "every_kernel", lambda: [Kernel("kv_cache.cu", "no_such_kernel")])
    assert main(["sm_90"]) == 1
    assert "no_such_kernel" in capsys.readouterr().err


def test_an_error_is_shown_with_the_file_and_line_of_the_source(tmp_path: Path) -> None:
    for path in source_folder().glob("*.cuh"):
        (tmp_path / path.name).write_text(path.read_text())
    (tmp_path / "broken.cu").write_text(
        '#include "compat.cuh"\n\n__global__ void broken(float* x) { *x = nonsense; }\n'
    )
    with pytest.raises(NvrtcError, match=r'broken\.cu\(3\): error: identifier "nonsense" is undefined'):
        compile_source("broken.cu", read_source("broken.cu", tmp_path), ["broken"], "sm_90")
    with (tmp_path / "vector.cuh").open("a") as file:
        file.write("int wrong = nowhere;\n")
    (tmp_path / "broken.cu").write_text('#include "compat.cuh"\n#include "vector.cuh"\n')
    num_lines = len((tmp_path / "vector.cuh").read_text().splitlines())
    with pytest.raises(NvrtcError, match=rf'vector\.cuh\({num_lines}\): error: identifier "nowhere"'):
        compile_source("broken.cu", read_source("broken.cu", tmp_path), [], "sm_90")
    assert check([], ["sm_90"]) == []
