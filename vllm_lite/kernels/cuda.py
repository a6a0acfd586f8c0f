"""Makes kernels of the files in cuda/ and launches them: everything that is CuPy. Knows no op and no model."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from vllm_lite.config import set_cupy_cache_dir
from vllm_lite.errors import StartupError
from vllm_lite.kernels.cache_folder import private_cache_folder

C_TYPES = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bf16"}
OPTIONS = ("-std=c++17", "-lineinfo")
OLDEST_CAPABILITY = (8, 0)
SHARED_BYTES_WITHOUT_ASKING = 48 * 1024
ACCESS_BYTES = 16
"""What a thread reads or writes in one instruction at most."""

INCLUDE = re.compile(r'#include "(.+)"')

Argument = torch.Tensor | np.generic | None
"""What a kernel may be given: a tensor's address, a typed scalar, or a null pointer."""


@dataclass(frozen=True)
class Kernel:
    """A kernel as a compiler and a launch need to know it."""

    source: str
    """Its file in cuda/."""
    name: str
    """What C++ calls it, with its template arguments: `rms_norm<bf16, 8>`. No two files share a name."""
    shared_bytes: int = 0
    """Dynamic shared memory of a block, the most that a launch asks for."""


@dataclass(frozen=True)
class Compiler:
    """What makes kernels of source: CuPy, or something that stands in for it."""

    module_class: Callable[..., Any]
    """With the constructor and `get_function` of cupy.RawModule."""
    error: type[Exception] | tuple[type[Exception], ...]
    """Raised for source that does not compile, its text is the compiler's log, and for what the driver refuses."""
    current_stream: Callable[[], int]
    """The address of the stream that launches go to."""
    versions: str
    """For the message about source that does not compile."""


@dataclass(frozen=True)
class _Stream:
    """All that CuPy wants of a stream."""

    ptr: int


class CudaKernels:
    """Compiled kernels of one device, which the caller makes current in every thread that launches.

    Raises StartupError with the compiler's log for source that does not compile, and with the kernel's name where the
    driver refuses its shared memory.
    """

    def __init__(self, kernels: Iterable[Kernel], device: torch.device, compiler: Compiler) -> None:
        self._device = device
        self._current_stream = compiler.current_stream
        self._functions: dict[str, tuple[Any, int]] = {}
        by_source: dict[str, list[Kernel]] = defaultdict(list)
        for kernel in dict.fromkeys(kernels):
            by_source[kernel.source].append(kernel)
        for source in tqdm(by_source, desc="Compiling kernels", disable=None):
            self._compile(source, by_source[source], compiler)

    def _compile(self, source: str, kernels: list[Kernel], compiler: Compiler) -> None:
        names, code = [kernel.name for kernel in kernels], read_source(source)
        try:
            module = compiler.module_class(code=code, options=OPTIONS, name_expressions=names)
            functions = [module.get_function(name) for name in names]
        except compiler.error as error:
            raise StartupError(f"cuda/{source} does not compile with {compiler.versions}:\n{error}") from error
        for kernel, function in zip(kernels, functions):
            # Asked for here and not at a launch, which may be captured in a graph.
            if kernel.shared_bytes > SHARED_BYTES_WITHOUT_ASKING:
                try:
                    function.max_dynamic_shared_size_bytes = kernel.shared_bytes
                except compiler.error as error:
                    raise StartupError(
                        f"{kernel.name} of cuda/{source} cannot have the {kernel.shared_bytes} bytes of shared memory "
                        f"that it needs: {error}"
                    ) from error
            self._functions[kernel.name] = function, kernel.shared_bytes

    def launch(
        self,
        name: str,
        grid: tuple[int, ...],
        num_threads: int,
        *arguments: Argument,
        shared_bytes: int | None = None,
    ) -> None:
        """Runs blocks of `num_threads` on the current stream; a grid that is 0 in some direction runs nothing.

        Blocks get all of the kernel's dynamic shared memory unless a launch needs less.

        A tensor stands for its address: sizes and strides are the caller's to check. It must stay alive until the
        kernel has run, which torch's allocator sees to as long as all work is on one stream. Raises TypeError for a
        Python number, whose C type nobody has chosen, and ValueError for a tensor on another device.
        """
        # CuPy would run one block.
        if 0 in grid:
            return
        function, most_shared_bytes = self._functions[name]
        # The current stream changes, under a graph's capture for one, so it is read at every launch.
        function(
            grid,
            (num_threads,),
            tuple(map(self._typed, arguments)),
            shared_mem=most_shared_bytes if shared_bytes is None else shared_bytes,
            stream=_Stream(self._current_stream()),
        )

    def _typed(self, argument: Argument) -> Any:
        if isinstance(argument, torch.Tensor):
            if argument.device != self._device:
                raise ValueError(f"a kernel on {self._device} was given a tensor on {argument.device}")
            return np.uint64(argument.data_ptr())
        if argument is None:
            return np.uint64(0)
        if not isinstance(argument, np.generic):
            raise TypeError(f"a kernel was given a {type(argument).__name__}: give a numpy scalar of the C type's size")
        return argument


def access_widths(dtype: torch.dtype) -> tuple[int, int]:
    """What `elements_per_access` may give for a dtype."""
    return ACCESS_BYTES // dtype.itemsize, 1


def elements_per_access(*tensors: torch.Tensor | None) -> int:
    """How many elements a kernel may read at once: 16 bytes of them where every row of every tensor allows it, else 1.

    A row is the last dimension, which must be contiguous. All tensors are of one dtype.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    itemsize = given[0].dtype.itemsize
    for tensor in given:
        if tensor.stride(-1) != 1:
            raise ValueError(f"a kernel's tensor has strides {tensor.stride()}: its last dimension is not contiguous")
        steps = (tensor.shape[-1], *tensor.stride()[:-1])
        if tensor.data_ptr() % ACCESS_BYTES or any(step * itemsize % ACCESS_BYTES for step in steps):
            return 1
    return ACCESS_BYTES // itemsize


def threads_for(num_items: int, most: int = 1024) -> int:
    """Whole warps with a thread for each item, `most` threads at most."""
    return min(most, -(-num_items // 32) * 32)


def source_folder() -> Path:
    """Where the kernels' sources are: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "cuda", package.parent / "cuda"):
        if (folder / "compat.cuh").exists():
            return folder
    raise StartupError(f"the kernels' sources are neither in {package} nor beside it: install vllm-lite again")


def read_source(name: str, folder: Path | None = None) -> str:
    """A file with the headers beside it put in their place.

    CuPy's cache goes by the text it is given, so it would not see that a header has changed. Line directives keep the
    compiler's messages true.
    """
    return "\n".join(_with_headers(name, source_folder() if folder is None else folder, set())) + "\n"


def _with_headers(name: str, folder: Path, done: set[str]) -> Iterator[str]:
    done.add(name)
    yield f'#line 1 "{name}"'
    for number, line in enumerate((folder / name).read_text().splitlines(), start=1):
        include = INCLUDE.fullmatch(line)
        if include is None or not (folder / include[1]).exists():
            yield "" if line == "#pragma once" else line
        elif include[1] in done:
            yield ""
        else:
            yield from _with_headers(include[1], folder, done)
            yield f'#line {number + 1} "{name}"'


@dataclass(frozen=True)
class Platform:
    """What a machine has of what CUDA needs. Versions of CUDA are 1000 * major + 10 * minor."""

    torch_cuda: str | None
    """Version, "13.0"; None for a build without CUDA."""
    cupy_cuda: int
    compiler_cuda: int | None
    """NVRTC's version, if there is one."""
    driver_cuda: int
    """The latest that the driver runs; 0 without a driver."""
    num_devices: int
    device_name: str
    capability: tuple[int, int]


def cupy_compiler(device: torch.device) -> Compiler:
    """CuPy, for a device with an index. Raises StartupError where the machine cannot run our kernels."""
    cupy = _import_cupy()
    platform = _platform(cupy, device)
    check_platform(platform)
    return Compiler(
        cupy.RawModule,
        # The others: what NVRTC, the driver and the cache's folder refuse.
        (cupy.cuda.compiler.CompileException, RuntimeError, OSError),
        lambda: torch.cuda.current_stream(device).cuda_stream,
        f"NVRTC {_version(platform.compiler_cuda or 0)}, CuPy {cupy.__version__} for CUDA "
        f"{_version(platform.cupy_cuda)}, torch {torch.__version__} for CUDA {platform.torch_cuda}",
    )


def check_platform(platform: Platform) -> None:
    """Raises StartupError for the first thing that is missing."""
    if platform.torch_cuda is None:
        raise StartupError("this torch was built without CUDA: install one with it, or use --device cpu")
    torch_major, cupy_major = int(platform.torch_cuda.split(".")[0]), platform.cupy_cuda // 1000
    if torch_major != cupy_major:
        raise StartupError(
            f"torch was built for CUDA {torch_major}, CuPy for CUDA {cupy_major}: "
            f"pip uninstall cupy-cuda{cupy_major}x and pip install cupy-cuda{torch_major}x, or use --device cpu"
        )
    if platform.compiler_cuda is None or platform.compiler_cuda // 1000 != cupy_major:
        found = "is missing" if platform.compiler_cuda is None else f"is {_version(platform.compiler_cuda)}"
        raise StartupError(
            f"NVRTC, which compiles the CUDA kernels, {found}; CuPy needs the one of CUDA {cupy_major}: pip install "
            f"nvidia-cuda-nvrtc=={cupy_major}.* nvidia-cuda-runtime=={cupy_major}.*, or use --device cpu"
        )
    if platform.driver_cuda == 0:
        raise StartupError("there is no NVIDIA driver: install one, or use --device cpu")
    if platform.driver_cuda // 1000 < torch_major:
        raise StartupError(
            f"the NVIDIA driver runs CUDA up to {_version(platform.driver_cuda)}, torch was built for "
            f"{platform.torch_cuda}: update the driver, or use --device cpu"
        )
    if platform.num_devices == 0:
        raise StartupError("the NVIDIA driver shows no GPU (CUDA_VISIBLE_DEVICES hides them?): or use --device cpu")
    if platform.capability < OLDEST_CAPABILITY:
        raise StartupError(
            f"{platform.device_name} has compute capability {_dotted(platform.capability)}, the kernels need "
            f"{_dotted(OLDEST_CAPABILITY)} (Ampere) or newer: use --device cpu"
        )


def _import_cupy() -> Any:
    set_cupy_cache_dir(private_cache_folder("cuda"))
    try:
        # Not at the top: it takes a quarter of a second that a server on a CPU does not need.
        import cupy  # noqa: PLC0415
    except ImportError as error:
        raise StartupError(
            f"CuPy, which compiles the CUDA kernels, cannot be imported ({error}): pip install cupy-cuda13x "
            "(cupy-cuda12x for a torch with CUDA 12), or use --device cpu"
        ) from error
    return cupy


def _platform(cupy: Any, device: torch.device) -> Platform:
    runtime = cupy.cuda.runtime
    try:
        major, minor = cupy.cuda.nvrtc.getVersion()
        compiler_cuda = 1000 * major + 10 * minor
    except RuntimeError:  # the library is looked for at the first call
        compiler_cuda = None
    num_devices = torch.cuda.device_count()
    is_there = num_devices > 0
    return Platform(
        torch_cuda=torch.version.cuda,
        cupy_cuda=runtime.runtimeGetVersion(),
        compiler_cuda=compiler_cuda,
        driver_cuda=runtime.driverGetVersion(),
        num_devices=num_devices,
        device_name=torch.cuda.get_device_name(device) if is_there else "",
        capability=torch.cuda.get_device_capability(device) if is_there else (0, 0),
    )


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
