"""Runs CUDA kernels on a CPU, behind the surface of cupy.RawModule. The work is done in C++, in emulator/.

A checked run also watches every access: bounds, alignment, races, uninitialised shared memory, asynchronous copies that
nobody waited for; and it counts the bytes.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm_lite.kernels.cuda import SHARED_BYTES_WITHOUT_ASKING, Argument, Compiler, CudaKernels, Kernel

SOURCES = Path(__file__).parent / "emulator"
RUNTIME = ("runtime.cpp", "checker.cpp")
COMPILER_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fno-strict-aliasing", "-fno-threadsafe-statics", "-w")
CHECKED_FLAGS = ("-fsanitize=thread", "-fno-tree-sra")
"""Without the second, g++ would split what a GPU reads at once."""
STREAM = SimpleNamespace(ptr=0x5EED)
"""The only stream that emulated launches may go to."""


class EmulatorError(RuntimeError):
    """The kernel did what a GPU would not allow or not notice, or was called wrongly."""


class EmulatorCompileError(Exception):
    """The text is g++'s log."""


class Order(IntEnum):
    """In which order threads that could all run do run."""

    FORWARD = 0
    REVERSE = 1
    RANDOM = 2


@dataclass
class Buffer:
    """Memory that a kernel may access, as bytes."""

    name: str
    content: torch.Tensor
    """[num_bytes] uint8"""
    is_read_only: bool

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, is_read_only: bool = False) -> Buffer:
        """From a tensor's first element to its last, with what lies between."""
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        begin, end = (
            (tensor.storage_offset() + element) * tensor.dtype.itemsize
            for element in (0, last + 1 if tensor.numel() else 0)
        )
        storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        return cls(name, storage[begin:end], is_read_only)

    def joined(self, other: Buffer) -> Buffer:
        """Both, of one storage, and what lies between them; named like `key/value`."""
        begin = min(self.content.storage_offset(), other.content.storage_offset())
        end = max(buffer.content.storage_offset() + len(buffer.content) for buffer in (self, other))
        content = self.content.as_strided((end - begin,), (1,), begin)
        return Buffer(f"{self.name}/{other.name}", content, self.is_read_only and other.is_read_only)


@dataclass(frozen=True)
class Bytes:
    """What a checked launch has moved to and from a buffer."""

    read: int
    written: int


def missing_requirement() -> str | None:
    """Why kernels cannot be emulated here, if so."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "the CUDA emulator runs on Linux on x86-64 only"
    if shutil.which("g++") is None:
        return "the CUDA emulator needs g++"
    return None


class EmulatorModule:
    """Stands in for cupy.RawModule."""

    def __init__(
        self,
        *,
        code: str,
        options: Sequence[str] = (),
        name_expressions: Sequence[str] = (),
        is_checked: bool = True,
    ) -> None:
        self.code = code
        self.is_checked = is_checked
        self._library = ctypes.CDLL(str(_build(code, tuple(name_expressions), is_checked)))
        self._library.emulator_error.restype = ctypes.c_char_p
        self._library.emulator_bank_conflicts.restype = ctypes.c_uint64
        self._numbers = {name: number for number, name in enumerate(name_expressions)}
        self.set_order(Order.FORWARD)

    def set_order(self, order: Order, seed: int = 0) -> None:
        """For the launches to come."""
        self._library.emulator_configure(int(order), ctypes.c_uint(seed), int(self.is_checked))

    def get_function(self, name: str) -> EmulatorKernel:
        """The kernel of one of the name expressions."""
        number = self._numbers[name]
        kinds = getattr(self._library, f"kinds_{number}")
        kinds.restype = ctypes.c_char_p
        return EmulatorKernel(self, name, getattr(self._library, f"launch_{number}"), kinds().decode().split())

    def watch(self, buffers: Sequence[Buffer]) -> None:
        """Allows access to these buffers only, and counts from 0 again."""
        self._library.emulator_unwatch_all()
        for buffer in buffers:
            address, size = ctypes.c_void_p(buffer.content.data_ptr()), ctypes.c_size_t(len(buffer.content))
            self._library.emulator_watch(address, size, buffer.name.encode(), int(buffer.is_read_only))

    def bytes(self, name: str) -> Bytes:
        """What the launches since `watch` have moved to and from a buffer."""
        counts = (ctypes.c_uint64 * 2)()
        self._library.emulator_bytes(name.encode(), counts)
        return Bytes(*counts)

    def bank_conflicts(self) -> int:
        """Of ldmatrix, since `watch`."""
        return int(self._library.emulator_bank_conflicts())

    def error(self) -> str:
        """What ended the last launch."""
        message: bytes = self._library.emulator_error()
        return message.decode()


class EmulatorKernel:
    """Stands in for cupy.RawKernel."""

    def __init__(self, module: EmulatorModule, name: str, function: Any, kinds: list[str]) -> None:
        self.module = module
        self.name = name
        self.kinds = kinds
        self.max_dynamic_shared_size_bytes = SHARED_BYTES_WITHOUT_ASKING
        self._function = function

    @property
    def parameter_names(self) -> list[str]:
        """As the source calls them."""
        bare_name = self.name.split("<")[0]
        bounds = r"(?:__launch_bounds__\([^()]*\)\s+)?"
        declaration = re.search(rf"__global__\s+void\s+{bounds}{bare_name}\(([^)]*)\)", self.module.code)
        assert declaration is not None, f"{bare_name} is not in the source"
        return [parameter.split()[-1].lstrip("*&") for parameter in declaration[1].split(",")]

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[np.generic],
        *,
        shared_mem: int = 0,
        stream: Any = None,
    ) -> None:
        """Runs the whole grid. Raises EmulatorError."""
        if stream is None or stream.ptr != STREAM.ptr:
            raise EmulatorError(f"{self.name} was launched on another stream than torch's current one")
        if shared_mem > self.max_dynamic_shared_size_bytes:
            raise EmulatorError(f"{self.name}: {shared_mem} bytes of shared memory were not asked for")
        if len(args) != len(self.kinds):
            raise EmulatorError(f"{self.name} has {len(self.kinds)} parameters and was given {len(args)}")
        values = [self._bytes(index, argument) for index, argument in enumerate(args)]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        sizes = (ctypes.c_uint * 6)(*(*grid, 1, 1)[:3], *(*block, 1, 1)[:3])
        if not self._function(sizes, ctypes.c_size_t(shared_mem), pointers):
            raise EmulatorError(f"{self.name}: {self.module.error()}")

    def _bytes(self, index: int, argument: np.generic) -> Any:
        kind = self.kinds[index]
        fits = {
            "pointer": argument.dtype == np.uint64,
            "const_pointer": argument.dtype == np.uint64,
        }.get(kind, argument.dtype.name.removeprefix("u") == kind)
        if not fits:
            raise EmulatorError(f"{self.name}: parameter {index} is of kind {kind}, not {argument.dtype.name}")
        return ctypes.create_string_buffer(argument.tobytes())


class EmulatedKernels(CudaKernels):
    """The loader's own launch code with emulated modules.

    A checked launch watches the tensors that it is given, and runs once in each order, which must give the same bits.
    """

    def __init__(self, kernels: Iterable[Kernel], *, is_checked: bool = True) -> None:
        self.modules: list[EmulatorModule] = []
        self.is_checked = is_checked
        super().__init__(
            kernels, torch.device("cpu"), Compiler(self._module, EmulatorCompileError, lambda: STREAM.ptr, "g++")
        )

    def _module(self, **arguments: Any) -> EmulatorModule:
        self.modules.append(EmulatorModule(**arguments, is_checked=self.is_checked))
        return self.modules[-1]

    def module_of(self, name: str) -> EmulatorModule:
        """The module that a kernel is in, for what its last launch has counted."""
        kernel: EmulatorKernel = self._functions[name][0]
        return kernel.module

    def launch(
        self,
        name: str,
        grid: tuple[int, ...],
        num_threads: int,
        *arguments: Argument,
        shared_bytes: int | None = None,
    ) -> None:
        """As the loader does. Raises EmulatorError."""
        if not self.is_checked:
            super().launch(name, grid, num_threads, *arguments, shared_bytes=shared_bytes)
            return
        kernel: EmulatorKernel = self._functions[name][0]
        buffers = buffers_of(kernel, arguments)
        contents = [buffer.content for buffer in buffers]
        before = [content.clone() for content in contents]
        after: list[torch.Tensor] = []
        for order in Order:
            for content, old in zip(contents, before):
                content.copy_(old)
            kernel.module.set_order(order)
            kernel.module.watch(buffers)
            super().launch(name, grid, num_threads, *arguments, shared_bytes=shared_bytes)
            if after and not all(map(torch.equal, contents, after)):
                raise EmulatorError(f"{name}: the result depends on the order of the threads ({order.name})")
            after = [content.clone() for content in contents]


def buffers_of(kernel: EmulatorKernel, arguments: Sequence[Argument]) -> list[Buffer]:
    """A buffer for each storage behind a launch's tensors."""
    by_storage: dict[int, Buffer] = {}
    for name, kind, argument in zip(kernel.parameter_names, kernel.kinds, arguments):
        if isinstance(argument, torch.Tensor):
            buffer = Buffer.of(name, argument, kind == "const_pointer")
            address = argument.untyped_storage().data_ptr()
            by_storage[address] = by_storage[address].joined(buffer) if address in by_storage else buffer
    return list(by_storage.values())


def _build(code: str, names: tuple[str, ...], is_checked: bool) -> Path:
    """The library of a module, from the cache if its contents were built before. Raises EmulatorCompileError."""
    entries = [_entry(number, name) for number, name in enumerate(names)]
    text = "\n".join(["#define CUDA_EMULATOR 1", code, '#line 1 "launches.cpp"', '#include "launcher.h"', *entries])
    flags = (*COMPILER_FLAGS, *(CHECKED_FLAGS if is_checked else ()))
    runtime = [_object((SOURCES / name).read_text(), COMPILER_FLAGS) for name in RUNTIME]
    kernels = _object(text, flags)
    library = kernels.with_suffix(f".{_digest(*map(str, runtime))}.so")
    if not library.exists():
        _compile(["-shared", *map(str, runtime), str(kernels)], library)
    return library


def _entry(number: int, name: str) -> str:
    """What Python calls to launch one kernel, and to learn its parameters."""
    return (
        f'extern "C" int launch_{number}(const unsigned* sizes, size_t shared_bytes, void** arguments) '
        f"{{ return emulator::launch_kernel<&{name}>(sizes, shared_bytes, arguments); }}\n"
        f'extern "C" const char* kinds_{number}() '
        f"{{ static const std::string kinds = emulator::parameter_kinds(&{name}); return kinds.c_str(); }}"
    )


def _object(text: str, flags: tuple[str, ...]) -> Path:
    headers = (path.read_text() for path in sorted(SOURCES.glob("*.h")))
    path = _cache_folder() / f"{_digest(text, *flags, *_compiler_version(), *headers)}.o"
    if not path.exists():
        source = path.with_suffix(".cpp")
        _replace(source, text.encode())
        _compile([*flags, "-c", str(source), f"-I{SOURCES}", *(f"-I{folder}" for folder in _cuda_headers())], path)
    return path


def _compile(arguments: list[str], output: Path) -> None:
    """Runs g++ into a file of its own, for another process may be building the same."""
    with tempfile.NamedTemporaryFile(dir=output.parent, delete=False) as file:
        pass
    result = subprocess.run(["g++", *arguments, "-o", file.name], capture_output=True, text=True)
    if result.returncode != 0:
        os.unlink(file.name)
        raise EmulatorCompileError(result.stderr)
    os.replace(file.name, output)


def _replace(path: Path, content: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.replace(file.name, path)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


@cache
def _cache_folder() -> Path:
    """Ours alone, since what lies in it is run."""
    folder = Path(tempfile.gettempdir()) / f"vllm_lite_emulator_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        return Path(tempfile.mkdtemp(prefix="vllm_lite_emulator_"))
    return folder


@cache
def _compiler_version() -> tuple[str, str]:
    result = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True)
    return result.stdout, repr(_cuda_headers())


@cache
def _cuda_headers() -> list[Path]:
    """NVIDIA's headers from the wheels: the 16-bit types, and what these include, which CuPy carries."""
    folders = []
    for package, inside in (("nvidia.cu13", "include"), ("cupy", "_core/include/cupy/_cccl/libcudacxx")):
        found = importlib.util.find_spec(package)
        assert found is not None and found.submodule_search_locations is not None, f"{package} is not installed"
        folders.append(Path(next(iter(found.submodule_search_locations))) / inside)
    return folders
