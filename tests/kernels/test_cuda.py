"""The loader: sources, launches, and the message for everything that a machine may lack."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_lite.errors import StartupError
from vllm_lite.kernels import cuda
from vllm_lite.kernels.cache_folder import private_cache_folder
from vllm_lite.kernels.cuda import (
    Compiler,
    CudaKernels,
    Kernel,
    Platform,
    check_platform,
    cupy_compiler,
    elements_per_access,
    read_source,
    source_folder,
    threads_for,
)

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
PLATFORM = Platform("13.0", 13020, 13000, 13000, 1, "NVIDIA H200", (9, 0))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the test's own, and no other for CuPy."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUPY_CACHE_DIR", "is put back after the test")
    monkeypatch.delenv("CUPY_CACHE_DIR")
    private_cache_folder.cache_clear()
    yield tmp_path / "home"
    private_cache_folder.cache_clear()


class FakeError(Exception):
    pass


class FakeFunction:
    """Records how it was called."""

    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []
        self.asked_for: list[int] = []

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        return self.asked_for[-1]

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, num_bytes: int) -> None:
        self.asked_for.append(num_bytes)

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], *, shared_mem: int, stream: Any
    ) -> None:
        self.launches.append({"grid": grid, "block": block, "args": args, "shared": shared_mem, "stream": stream.ptr})


@dataclasses.dataclass
class FakeModule:
    """A RawModule for which everything compiles."""

    code: str
    options: tuple[str, ...]
    name_expressions: list[str]

    def __post_init__(self) -> None:
        self.functions = {name: FakeFunction() for name in self.name_expressions}

    def get_function(self, name: str) -> FakeFunction:
        return self.functions[name]


def load(
    *kernels: Kernel, module_class: Callable[..., Any] = FakeModule, streams: Iterator[int] | None = None
) -> tuple[CudaKernels, dict[str, FakeFunction], list[Any]]:
    """The loader, what it launches, and its modules."""
    modules: list[Any] = []

    def new_module(**arguments: Any) -> Any:
        modules.append(module_class(**arguments))
        return modules[-1]

    stream = (lambda: 7) if streams is None else (lambda: next(streams))
    loaded = CudaKernels(kernels, CPU, Compiler(new_module, FakeError, stream, "NVRTC 13.0"))
    return loaded, {name: function for module in modules for name, function in module.functions.items()}, modules


NORM, COPY = Kernel("norm.cu", "rms_norm<float, 1>", 128), Kernel("kv_cache.cu", "copy_blocks")


def test_one_module_for_each_file() -> None:
    _, _, modules = load(NORM, COPY, NORM, Kernel("norm.cu", "rms_norm<half, 1>", 128))
    assert [module.name_expressions for module in modules] == [
        ["rms_norm<float, 1>", "rms_norm<half, 1>"],
        ["copy_blocks"],
    ]
    assert all("-std=c++17" in module.options for module in modules)
    assert '#include "compat.cuh"' not in modules[0].code and "mma_m16n8k16" in modules[0].code


def test_launch_passes_addresses_and_scalars() -> None:
    kernels, functions, _ = load(NORM)
    tensor = torch.zeros(4)
    kernels.launch(NORM.name, (3, 2), 64, tensor[1:], None, np.float32(0.5), np.int64(9))
    (launch,) = functions[NORM.name].launches
    assert (launch["grid"], launch["block"], launch["shared"]) == ((3, 2), (64,), 128)
    assert [(type(a), a) for a in launch["args"]] == [
        (np.uint64, tensor.data_ptr() + 4), (np.uint64, 0), (np.float32, 0.5), (np.int64, 9)
    ]  # fmt: skip


def test_stream_is_read_at_every_launch() -> None:
    kernels, functions, _ = load(COPY, streams=iter([5, 6, 5]))
    for _ in range(3):
        kernels.launch(COPY.name, (1,), 32)
    assert [launch["stream"] for launch in functions[COPY.name].launches] == [5, 6, 5]


@pytest.mark.parametrize("grid", [(0,), (0, 3), (3, 0)])
def test_an_empty_grid_launches_nothing(grid: tuple[int, ...]) -> None:
    kernels, functions, _ = load(COPY)
    kernels.launch(COPY.name, grid, 32)
    assert functions[COPY.name].launches == []


@pytest.mark.parametrize("number", [1, 0.5, True])
def test_a_number_without_a_c_type_is_refused(number: Any) -> None:
    kernels, functions, _ = load(COPY)
    with pytest.raises(TypeError, match=f"given a {type(number).__name__}"):
        kernels.launch(COPY.name, (1,), 32, number)
    assert functions[COPY.name].launches == []


def test_a_tensor_on_another_device_is_refused() -> None:
    kernels, _, _ = load(COPY)
    with pytest.raises(ValueError, match="on cpu was given a tensor on meta"):
        kernels.launch(COPY.name, (1,), 32, torch.empty(3, device="meta"))


def test_shared_memory_is_asked_for_once_and_only_where_it_must() -> None:
    large = Kernel("norm.cu", "layer_norm<float, 1>", 100 * 1024)
    kernels, functions, _ = load(NORM, large)
    for _ in range(3):
        kernels.launch(large.name, (1,), 32)
    assert functions[large.name].asked_for == [100 * 1024]
    assert functions[NORM.name].asked_for == []


def test_a_launch_may_take_less_shared_memory_than_its_kernel_at_most() -> None:
    kernels, functions, _ = load(NORM)
    kernels.launch(NORM.name, (1,), 32, shared_bytes=64)
    kernels.launch(NORM.name, (1,), 32, shared_bytes=0)
    assert [launch["shared"] for launch in functions[NORM.name].launches] == [64, 0]


def test_source_that_does_not_compile_ends_the_start_with_the_log() -> None:
    class BrokenModule(FakeModule):
        def get_function(self, name: str) -> FakeFunction:
            raise FakeError('norm.cu(7): error: identifier "nonsense" is undefined')

    with pytest.raises(
        StartupError, match=r'(?s)cuda/norm\.cu does not compile with NVRTC 13\.0:.*norm\.cu\(7\): error: .*"nonsense"'
    ):
        load(NORM, module_class=BrokenModule)


def test_shared_memory_that_the_driver_refuses_ends_the_start_with_the_kernels_name() -> None:
    class SmallFunction(FakeFunction):
        @property
        def max_dynamic_shared_size_bytes(self) -> int:
            return 0

        @max_dynamic_shared_size_bytes.setter
        def max_dynamic_shared_size_bytes(self, num_bytes: int) -> None:
            raise FakeError("CUDA_ERROR_INVALID_VALUE: invalid argument")

    class SmallModule(FakeModule):
        def get_function(self, name: str) -> FakeFunction:
            return SmallFunction()

    large = Kernel("norm.cu", "layer_norm<float, 1>", 300 * 1024)
    with pytest.raises(StartupError, match=r"^layer_norm<float, 1> of cuda/norm\.cu cannot .* 307200 .*INVALID_VALUE"):
        load(NORM, large, module_class=SmallModule)


def test_headers_are_put_in_once_and_lines_keep_their_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.cuh").write_text("#pragma once\nint a;\n")
    (tmp_path / "b.cuh").write_text('#pragma once\n#include "a.cuh"\nint b;\n')
    (tmp_path / "k.cu").write_text('// k\n#include "b.cuh"\n#include "a.cuh"\n#include <foreign>\nint k;\n')
    lines = read_source("k.cu", tmp_path).splitlines()
    assert [line for line in lines if line.startswith("int")] == ["int a;", "int b;", "int k;"]
    assert "#include <foreign>" in lines
    places: dict[str, tuple[str, int]] = {}
    name, number = "", 0
    for line in lines:
        if line.startswith("#line"):
            _, first, quoted = line.split()
            name, number = quoted.strip('"'), int(first) - 1
        else:
            places[line] = name, number
        number += 1
    assert (places["int a;"], places["int b;"], places["int k;"]) == (("a.cuh", 2), ("b.cuh", 3), ("k.cu", 5))


def test_an_edited_header_changes_the_text(tmp_path: Path) -> None:
    """CuPy's cache goes by the text, so this is a new kernel for it."""
    for path in source_folder().iterdir():
        (tmp_path / path.name).write_text(path.read_text())
    assert read_source("norm.cu", tmp_path) == read_source("norm.cu")
    with (tmp_path / "vector.cuh").open("a") as file:
        file.write("// edited\n")
    assert read_source("norm.cu", tmp_path) != read_source("norm.cu")


def test_sources_of_a_wheel_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "vllm_lite" / "kernels" / "cuda.py"
    monkeypatch.setattr(cuda, "__file__", str(module))
    with pytest.raises(StartupError, match="sources are neither in"):
        source_folder()
    for folder in (tmp_path / "cuda", tmp_path / "vllm_lite" / "cuda"):
        folder.mkdir(parents=True)
        (folder / "compat.cuh").touch()
        assert source_folder() == folder


def test_elements_per_access() -> None:
    rows = torch.zeros(4, 64, dtype=torch.bfloat16)
    assert elements_per_access(rows, None, rows[:, :8]) == 8
    assert elements_per_access(rows.float()) == 4
    assert elements_per_access(rows, rows[:, :12]) == 1, "a row's end"
    assert elements_per_access(rows, rows[:, 4:12]) == 1, "its beginning"
    assert elements_per_access(torch.zeros(4, 12, dtype=torch.bfloat16)[:, :8]) == 1, "the distance between rows"
    with pytest.raises(ValueError, match="not contiguous"):
        elements_per_access(rows.T)


def test_threads_for() -> None:
    assert [threads_for(n) for n in (1, 32, 33, 5000)] == [32, 32, 64, 1024]
    assert threads_for(5000, 256) == 256


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"torch_cuda": None}, "torch was built without CUDA.*--device cpu"),
        ({"torch_cuda": "12.8"}, "torch was built for CUDA 12, CuPy for CUDA 13.*pip install cupy-cuda12x"),
        ({"cupy_cuda": 12090}, "torch was built for CUDA 13, CuPy for CUDA 12.*pip install cupy-cuda13x"),
        ({"compiler_cuda": None}, r"NVRTC.* is missing.*pip install nvidia-cuda-nvrtc==13\.\*"),
        ({"compiler_cuda": 12090}, r"NVRTC.* is 12\.9; CuPy needs the one of CUDA 13"),
        ({"driver_cuda": 0}, "no NVIDIA driver"),
        ({"driver_cuda": 12080}, r"driver runs CUDA up to 12\.8, torch was built for 13\.0: update the driver"),
        ({"num_devices": 0}, "shows no GPU"),
        ({"capability": (7, 5), "device_name": "Tesla T4"}, r"Tesla T4 has compute capability 7\.5.*8\.0"),
    ],
)
def test_each_thing_that_may_be_missing_has_its_message(change: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        check_platform(dataclasses.replace(PLATFORM, **change))


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_a_machine_that_has_everything(capability: tuple[int, int]) -> None:
    check_platform(dataclasses.replace(PLATFORM, capability=capability))


def test_cupy_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(StartupError, match=r"CuPy.*cannot be imported.*pip install cupy-cuda13x"):
        cupy_compiler(torch.device("cuda", 0))


def test_cupy_keeps_its_kernels_where_only_we_can_write(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(StartupError, match="CuPy"):
        cupy_compiler(torch.device("cuda", 0))
    assert os.environ["CUPY_CACHE_DIR"] == str(home / "vllm_lite" / "cuda")
    assert (home / "vllm_lite" / "cuda").stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("CUPY_CACHE_DIR", "/chosen by the user")
    with pytest.raises(StartupError, match="CuPy"):
        cupy_compiler(torch.device("cuda", 0))
    assert os.environ["CUPY_CACHE_DIR"] == "/chosen by the user"


@pytest.mark.skipif(sys.platform != "linux", reason="CuPy is installed on Linux only")
class TestRealCupy:
    """CuPy itself, as far as it goes without a driver."""

    @pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
    def test_a_machine_without_a_gpu_says_so(self) -> None:
        with pytest.raises(StartupError, match=r"without CUDA|no NVIDIA driver|driver runs CUDA up to|shows no GPU"):
            cupy_compiler(torch.device("cuda", 0))

    def test_raw_module_takes_what_the_loader_gives_it(self) -> None:
        cupy = importlib.import_module("cupy")

        def uncompiled(**arguments: Any) -> FakeModule:
            # Constructing one compiles nothing, which would take a driver.
            cupy.RawModule(**arguments)
            return FakeModule(**arguments)

        load(NORM, COPY, module_class=uncompiled)

    def test_cupy_can_be_imported_beside_our_folder_cuda(self) -> None:
        code = "import cupy, cuda.pathfinder"
        subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("error", [FakeError("log"), RuntimeError("driver"), OSError("disk full")])
def test_case_o4_a_failed_compilation_prints_the_log_and_the_versions(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    class BrokenModule(FakeModule):
        def get_function(self, name: str) -> FakeFunction:
            raise error

    cupy = fake_cupy(lambda: (13, 0))
    cupy.RawModule, cupy.__version__ = BrokenModule, "14.2.0"
    cupy.cuda.compiler = SimpleNamespace(CompileException=FakeError)
    monkeypatch.setattr(cuda, "_import_cupy", lambda: cupy)
    monkeypatch.setattr(cuda, "_platform", lambda *_: PLATFORM)
    compiler = cupy_compiler(torch.device("cuda", 0))
    versions = rf"NVRTC 13\.0, CuPy 14\.2\.0 for CUDA 13\.2, torch {re.escape(torch.__version__)} for CUDA 13\.0"
    with pytest.raises(StartupError, match=rf"cuda/norm\.cu does not compile with {versions}:\n{error}"):
        CudaKernels([NORM], CPU, compiler)


def fake_cupy(nvrtc_version: Callable[[], tuple[int, int]]) -> SimpleNamespace:
    runtime = SimpleNamespace(runtimeGetVersion=lambda: 13020, driverGetVersion=lambda: 13010)
    return SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, nvrtc=SimpleNamespace(getVersion=nvrtc_version)))


def test_what_the_machine_has_is_asked_of_cupy_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> tuple[int, int]:
        raise RuntimeError('Failure finding "libnvrtc.so.13"')

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    device = torch.device("cuda", 1)
    assert cuda._platform(fake_cupy(lambda: (13, 1)), device) == Platform(
        "13.0", 13020, 13010, 13010, 1, "GPU 1", (8, 6)
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert cuda._platform(fake_cupy(missing), device) == Platform("13.0", 13020, None, 13010, 0, "", (0, 0))
