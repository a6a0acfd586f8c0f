"""Runs the kernels of the files in cpu/ on a team of threads. Knows no op, and nothing of how a library is compiled.

A kernel is called by name with tensors and numbers, which its signature in the library is checked against. Called
while a list is captured it is only noted down; replaying the list runs all of it in one go. The sizes of a step are not
arguments: kernels read them from counters, so one list serves every step.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from vllm_lite.errors import StartupError
from vllm_lite.kernels.cache_folder import private_cache_folder, temporary_folder
from vllm_lite.kernels.cpu_library import (
    FLAGS,
    CompileError,
    build_library,
    cpu_flags,
    find_compiler,
    missing_instructions,
)

logger = logging.getLogger(__name__)

SCRATCH_BYTES = 8 * 2**20
"""Of each thread; what is not used is no memory."""
MAX_INNER_SIZE = 40_000
"""Of a product: 12 rows and two panels of 16 columns, all as floats, must fit the scratch memory."""
MAX_HEAD_DIM = 256
"""As in attention.h."""
PANEL_ROWS = 16
"""Rows of a weight that are packed together: COLUMNS in vector.h."""

COUNTERS = ("num_tokens", "num_seqs", "num_decodes", "num_rows")
"""What kernels read of a step, in the order of StepCounters in task.h."""

POINTERS = {"f": torch.float32, "r": torch.float64, "h": torch.bfloat16, "w": torch.int32}
"""Letters of a signature, as in task.h; beside them i for an integer and d for a float."""

Argument = torch.Tensor | int | float | None
"""What a kernel may be given: a tensor's address, a number, or a null pointer."""


class Shape(Protocol):
    """A step's sizes."""

    @property
    def num_tokens(self) -> int:
        """New tokens."""

    @property
    def num_seqs(self) -> int:
        """Sequences."""

    @property
    def num_decodes(self) -> int:
        """Sequences that bring one token; they come first."""

    @property
    def num_rows(self) -> int:
        """Sampled rows."""


class _Command(ctypes.Structure):
    _fields_ = (("entry", ctypes.c_void_p), ("arguments", ctypes.c_void_p))


@dataclass
class CommandList:
    """Kernel calls in their order, with what keeps their arguments alive."""

    entries: list[tuple[int, ctypes.Array[ctypes.c_char]]] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)

    def finished(self) -> CapturedCalls:
        """The list as the library takes it."""
        commands = [_Command(entry, ctypes.addressof(arguments)) for entry, arguments in self.entries]
        return CapturedCalls(self, (_Command * len(commands))(*commands))


@dataclass(frozen=True)
class CapturedCalls:
    """A list that is ready to be replayed."""

    _list: CommandList
    _commands: ctypes.Array[_Command]


class CpuKernels:
    """The library's kernels and the threads that run them. One thread at a time may call it.

    `cores` are the CPUs that the threads are pinned to, the first of them being the caller's (`pin_caller`).
    """

    panel_rows = PANEL_ROWS

    def __init__(self, library: Path, num_threads: int, cores: Sequence[int] = ()) -> None:
        self.num_threads = num_threads
        self._cores = list(cores) if len(cores) >= num_threads else []
        self._library = ctypes.CDLL(str(library))
        self._kernels: dict[str, tuple[int, str]] = {}
        self._counters = np.zeros(len(COUNTERS), np.int32)
        self._recording: CommandList | None = None
        self._pinned_caller: threading.Thread | None = None
        self._process = os.getpid()
        self._library.team_new.restype = ctypes.c_void_p
        self._library.team_new.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_void_p)
        self._library.team_run.restype = None
        self._library.team_run.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
        self._library.team_delete.restype = None
        self._library.team_delete.argtypes = (ctypes.c_void_p,)
        cpus = (ctypes.c_int32 * num_threads)(*self._cores[:num_threads]) if self._cores else None
        self._team = self._library.team_new(num_threads, SCRATCH_BYTES, cpus)
        if self._team is None:
            raise StartupError(f"{num_threads} threads cannot be started: lower --num-threads.")

    def close(self) -> None:
        """Ends the threads. The kernels cannot be called any more."""
        if self._team is not None and os.getpid() == self._process:
            self._library.team_delete(self._team)
        self._team = None

    def __del__(self) -> None:
        if getattr(self, "_team", None) is not None:
            self.close()

    def pin_caller(self) -> None:
        """Keeps the calling thread, if it is there for nothing else, away from the workers' cores.

        Woken there, it would wait until a worker that still spins goes to sleep. A process's main thread is left alone,
        for whatever it starts would be pinned with it.
        """
        thread = threading.current_thread()
        if self._cores and thread is not threading.main_thread() and thread is not self._pinned_caller:
            self._library.pin_this_thread(self._cores[0])
            self._pinned_caller = thread

    def call(self, name: str, shape: Shape, *arguments: Argument) -> None:
        """Runs a kernel for a step of this shape, or notes the call down while a list is captured.

        Tensors must be on the CPU; sizes and strides are the caller's to check. Raises TypeError for arguments that
        are not what the kernel takes.
        """
        entry, signature = self._kernel(name)
        packed = _pack(name, signature, arguments)
        commands = CommandList() if self._recording is None else self._recording
        commands.entries.append((entry, packed))
        commands.tensors.extend(argument for argument in arguments if isinstance(argument, torch.Tensor))
        if self._recording is None:
            self.replay(commands.finished(), shape)

    @contextlib.contextmanager
    def capture(self) -> Iterator[CommandList]:
        """Inside, calls are noted down in the list and not run."""
        if self._recording is not None:
            raise RuntimeError("a list is being captured already")
        self._recording = commands = CommandList()
        try:
            yield commands
        finally:
            self._recording = None

    def replay(self, calls: CapturedCalls, shape: Shape) -> None:
        """Runs a captured list for a step of any shape."""
        if os.getpid() != self._process:
            raise RuntimeError("the CPU kernels' threads do not exist in a forked process: make the engine there")
        self._counters[:] = [getattr(shape, counter) for counter in COUNTERS]
        self._library.team_run(self._team, calls._commands, len(calls._commands), self._counters.ctypes.data)

    def pack(self, weight: torch.Tensor) -> None:
        """Packs a weight [rows, in_features] in its place; its rows are a multiple of PANEL_ROWS."""
        rows, size = weight.shape
        if rows % PANEL_ROWS or not weight.is_contiguous():
            raise ValueError(f"a weight of shape {list(weight.shape)} cannot be packed in panels of {PANEL_ROWS} rows")
        if size % elements_per_word(weight.dtype) or size > MAX_INNER_SIZE:
            raise StartupError(f"the CPU kernels do not take weights of {size} columns in {weight.dtype}.")
        self.call(f"pack_{type_name(weight.dtype)}", _NO_STEP, weight, rows, size)

    def pack_all(self, weights: Iterable[torch.Tensor]) -> None:
        """Packs each of them."""
        for weight in weights:
            self.pack(weight)

    def _kernel(self, name: str) -> tuple[int, str]:
        if name not in self._kernels:
            signature = getattr(self._library, f"{name}_signature")
            signature.restype = ctypes.c_char_p
            entry = ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value
            assert entry is not None
            self._kernels[name] = entry, signature().decode()
        return self._kernels[name]


@dataclass(frozen=True)
class _NoStep:
    num_tokens: int = 0
    num_seqs: int = 0
    num_decodes: int = 0
    num_rows: int = 0


_NO_STEP = _NoStep()


def type_name(dtype: torch.dtype) -> str:
    """What ends the name of a kernel for a dtype."""
    return str(dtype).removeprefix("torch.")


def elements_per_word(dtype: torch.dtype) -> int:
    """How many elements along a product's inner dimension lie together: STEP in vector.h."""
    return 4 // dtype.itemsize


def _pack(name: str, signature: str, arguments: Sequence[Argument]) -> ctypes.Array[ctypes.c_char]:
    if len(signature) != len(arguments):
        raise TypeError(f"{name} takes {len(signature)} arguments, {len(arguments)} were given")
    layout = ""
    values: list[int | float] = []
    for position, (letter, argument) in enumerate(zip(signature, arguments)):
        if letter in POINTERS:
            is_right = argument is None or (
                isinstance(argument, torch.Tensor) and argument.dtype == POINTERS[letter] and argument.is_cpu
            )
            values.append(argument.data_ptr() if isinstance(argument, torch.Tensor) else 0)
        else:
            is_right = isinstance(argument, int) if letter == "i" else isinstance(argument, float)
            values.append(argument if isinstance(argument, int | float) else 0)
        if not is_right:
            given = argument.dtype if isinstance(argument, torch.Tensor) else type(argument).__name__
            raise TypeError(f"argument {position} of {name} is {given}, not {POINTERS.get(letter, letter)}")
        layout += "d" if letter == "d" else "q"
    packed = struct.pack(f"={layout}", *values)
    return (ctypes.c_char * len(packed)).from_buffer_copy(packed)


def load_cpu_kernels(num_threads: int, cores: Sequence[int]) -> CpuKernels | None:
    """The kernels, compiled if they are not in the cache; None and one warning where that cannot be.

    Raises StartupError where the threads cannot be started.
    """
    reason = missing_instructions(cpu_flags())
    compiler = find_compiler()
    if reason is None and compiler is None:
        reason = "there is no C++ compiler (apt install g++, or another package that brings c++, g++ or clang++)"
    if reason is None and compiler is not None:
        try:
            return CpuKernels(_library(compiler), num_threads, cores)
        except (CompileError, OSError) as error:
            reason = str(error)
    logger.warning(
        "the CPU kernels cannot be used, so torch computes everything, at a fraction of the speed: %s", reason
    )
    return None


def _library(compiler: str) -> Path:
    """From the user's cache folder, or from a temporary one where that is full. Raises as `build_library` does."""
    try:
        return build_library(compiler, private_cache_folder("cpu"), FLAGS)
    except OSError as error:
        return build_library(compiler, temporary_folder("cpu", error), FLAGS)
