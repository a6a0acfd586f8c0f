"""Which device is taken: what torch and CuPy say of the machine is faked."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_lite.errors import StartupError
from vllm_lite.kernels.cuda import Compiler
from vllm_lite.worker import gpu as gpu_module
from vllm_lite.worker.gpu import Gpu, find_gpu, gpu_is_there

COMPILER = Compiler(lambda **_: None, Exception, lambda: 0, "fake")
TOO_OLD = "Tesla T4 has compute capability 7.5, the kernels need 8.0 (Ampere) or newer: use --device cpu"


def refuse(device: torch.device) -> Compiler:
    raise StartupError(TOO_OLD)


def break_down(device: torch.device) -> Compiler:
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nCompile with TORCH_USE_CUDA_DSA")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def set_up(*, num_devices: int, current: int = 0, compiler: Any = lambda device: COMPILER) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
        monkeypatch.setattr(gpu_module, "gpu_is_there", lambda: num_devices > 0)
        monkeypatch.setattr(gpu_module, "cupy_compiler", compiler)

    return set_up


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_a_usable_gpu_is_taken(machine: Callable[..., None], wanted: Any) -> None:
    machine(num_devices=2, current=1)
    gpu = find_gpu(wanted)
    assert gpu is not None
    assert gpu.device == torch.device("cuda", 1)
    assert gpu.compiler is COMPILER


def test_the_cpu_is_taken_where_it_is_asked_for(machine: Callable[..., None]) -> None:
    machine(num_devices=1)
    assert find_gpu("cpu") is None


def test_without_a_gpu_auto_is_the_cpu_and_says_nothing(
    machine: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    machine(num_devices=0, compiler=lambda device: pytest.fail("CuPy was imported"))
    assert find_gpu("auto") is None
    assert not caplog.records


@pytest.mark.parametrize(("compiler", "reason"), [(refuse, TOO_OLD), (break_down, "uncorrectable ECC error")])
def test_a_gpu_that_cannot_be_used(
    machine: Callable[..., None], compiler: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    machine(num_devices=1, compiler=compiler)
    assert find_gpu("auto") is None
    (record,) = caplog.records
    message = record.getMessage()
    assert record.levelno == logging.WARNING
    assert message.startswith("the GPU is not used: ") and reason in message and "use --device cpu" in message
    assert "\n" not in message
    with pytest.raises(StartupError, match=r"^--device cuda: .*use --device cpu$") as error:
        find_gpu("cuda")
    assert reason in str(error.value)


def test_a_demanded_gpu_needs_cupy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(StartupError, match=r"--device cuda: CuPy.*cannot be imported.*pip install cupy-cuda13x"):
        find_gpu("cuda")


def test_case_o4_without_cupy_the_cpu_serves_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(gpu_module, "gpu_is_there", lambda: True)
    assert find_gpu("auto") is None
    (record,) = [record for record in caplog.records if record.name == "vllm_lite.worker.gpu"]
    assert "the GPU is not used: CuPy" in record.getMessage()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_device_file_is_a_gpu_even_where_torch_sees_none(tmp_path: Path) -> None:
    assert not gpu_is_there(tmp_path)
    (tmp_path / "nvidiactl").touch()
    assert not gpu_is_there(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert gpu_is_there(tmp_path)


def test_what_is_measured_is_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    device = torch.device("cuda", 1)
    results = {"mem_get_info": (30, 80), "memory_reserved": 20, "max_memory_reserved": 25}
    for name in ("set_device", "empty_cache", "reset_peak_memory_stats", "synchronize", *results):

        def record(*arguments: Any, name: str = name) -> Any:
            calls.append((name, *arguments))
            return results.get(name)

        monkeypatch.setattr(torch.cuda, name, record)
    memory = Gpu(device, COMPILER).memory_during(lambda: calls.append("work"))
    assert (memory.total, memory.free, memory.reserved, memory.peak) == (80, 30, 20, 25)
    assert calls[:5] == [
        ("set_device", device), ("empty_cache",), ("reset_peak_memory_stats", device), "work", ("synchronize", device)
    ]  # fmt: skip
