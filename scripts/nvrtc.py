"""NVIDIA's run-time compiler as CuPy calls it, for any architecture and on machines without a GPU."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cupy_backends.cuda.libs import nvrtc

from vllm_lite.kernels.cuda import OPTIONS

VERSION = ".".join(map(str, nvrtc.getVersion()))
"""Asked for here because it loads the library, which two threads cannot do at once."""
OPTIONS_OF_CUPY = ("-ftz=true", "--device-as-default-execution-space")
"""Added by CuPy to ours."""

ENTRY = re.compile(
    r"Compiling entry function '(?P<symbol>\w+)'"
    r".*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r".*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


class NvrtcError(Exception):
    """The text is the compiler's log."""


@dataclass(frozen=True)
class Usage:
    """What one kernel takes on one architecture."""

    num_registers: int
    """Of a thread."""
    stack_bytes: int
    spill_bytes: int
    """Stored because the registers did not suffice, and loaded again."""


def compile_source(name: str, code: str, names: Sequence[str], architecture: str) -> dict[str, Usage]:
    """Compiles the kernels `names` of a source for an architecture like `sm_90`. Raises NvrtcError."""
    options = (*OPTIONS, *OPTIONS_OF_CUPY, f"-arch={architecture}", "--ptxas-options=-v", f"-I{_headers()}")
    program = nvrtc.createProgram(code, name, (), ())
    try:
        for expression in names:
            nvrtc.addNameExpression(program, expression)
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            raise NvrtcError(nvrtc.getProgramLog(program) or str(error)) from error
        found = {match["symbol"]: match for match in ENTRY.finditer(nvrtc.getProgramLog(program))}
        return {expression: _usage(found[nvrtc.getLoweredName(program, expression)]) for expression in names}
    finally:
        nvrtc.destroyProgram(program)


def _usage(entry: re.Match[str]) -> Usage:
    return Usage(int(entry["registers"]), int(entry["stack"]), int(entry["stores"]) + int(entry["loads"]))


@cache
def _headers() -> Path:
    """CUDA's headers from the wheel nvidia-cuda-runtime."""
    found = importlib.util.find_spec("nvidia.cu13")
    if found is None or found.submodule_search_locations is None:
        raise NvrtcError("CUDA's headers are missing: pip install nvidia-cuda-runtime==13.0.*")
    return Path(next(iter(found.submodule_search_locations))) / "include"
