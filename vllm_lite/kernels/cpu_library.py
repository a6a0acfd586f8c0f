"""Makes a library of the files in cpu/ with the system's compiler, and keeps it. Knows no kernel.

What the cache holds is code that we run: it lies in a folder that is ours alone, under a name that says what it was
made of, and ends in a checksum of itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from vllm_lite.kernels.cache_folder import check_room
from vllm_lite.kernels.topology import available_cpus

logger = logging.getLogger(__name__)

COMPILERS = ("c++", "g++", "clang++")
# Where a kernel wants a product and a sum rounded as one it says so: a row's bits must not depend on what the compiler
# fuses in one copy of a function and not in another.
ROUNDING = "-ffp-contract=off"
FLAGS = ("-O3", "-march=native", ROUNDING, "-std=c++17", "-fPIC", "-Wno-psabi", "-Wno-ignored-attributes")
LINK_FLAGS = ("-shared", "-pthread")
COMPILER_TIMEOUT_S = 300
"""Of one file, which takes seconds."""
BUILDING = "building-"
"""How the names of folders begin that hold a library in the making."""
ABANDONED_AFTER_S = 3600
"""Longer than any build, so that no other process can be at work on it."""
CHECKSUM_BYTES = hashlib.sha256().digest_size


class CompileError(Exception):
    """The compiler cannot be run or refuses the sources; the text holds its message."""


def source_folder() -> Path:
    """Where the kernels' sources are."""
    return Path(__file__).resolve().parents[1] / "cpu"


def cpu_flags(path: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The instruction sets that Linux reports; empty on other systems."""
    if not path.exists():
        return frozenset()
    flags = re.search(r"^flags\s*:(.*)$", path.read_text(), re.MULTILINE)
    return frozenset(flags[1].split()) if flags else frozenset()


def missing_instructions(flags: frozenset[str]) -> str | None:
    """Why the kernels cannot run on a CPU, None where they can."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"they are written for Linux on x86-64, not {platform.system()} on {platform.machine()}"
    if "avx512f" in flags or {"avx2", "fma"} <= flags:
        return None
    return "they need a CPU with AVX2 and FMA"


def find_compiler() -> str | None:
    """The path of the system's C++ compiler: the first that runs, else the first there is, whose failure says more."""
    found = [path for name in COMPILERS if (path := shutil.which(name))]
    return next(filter(_runs, found), found[0] if found else None)


def _runs(compiler: str) -> bool:
    try:
        _run_all([[compiler, "--version"]])
    except CompileError:
        return False
    return True


def build_library(compiler: str, cache: Path, flags: Sequence[str], folder: Path | None = None) -> Path:
    """The compiled kernels, from the cache folder where they are there already and whole.

    A library is named by everything it depends on: sources, flags, compiler, and the CPU whose instructions it uses.
    Several processes may build at once: each writes files of its own and moves the library to its name when it is
    whole. Raises CompileError with the compiler's message, and OSError, before the time to compile is spent, where the
    folder cannot be written or has no room.
    """
    folder = source_folder() if folder is None else folder
    library = cache / f"kernels-{_digest(compiler, flags, folder)}.so"
    if library.exists():
        if _is_whole(library):
            return library
        logger.warning("%s is damaged and made again", library)
    _remove_abandoned(cache)
    check_room(cache)
    logger.info("compiling the CPU kernels with %s (once, for some seconds) into %s", compiler, cache)
    with tempfile.TemporaryDirectory(dir=cache, prefix=BUILDING) as building:
        sources = sorted(folder.glob("*.cpp"))
        objects = [Path(building) / f"{source.stem}.o" for source in sources]
        _run_all([[compiler, *flags, "-c", str(path), "-o", str(out)] for path, out in zip(sources, objects)])
        linked = Path(building) / library.name
        _run_all([[compiler, *flags, *LINK_FLAGS, *map(str, objects), "-o", str(linked)]])
        linked.write_bytes(_with_checksum(linked.read_bytes()))
        linked.replace(library)
    return library


def _digest(compiler: str, flags: Sequence[str], folder: Path) -> str:
    (version,) = _run_all([[compiler, "--version"]])
    parts = [*flags, *LINK_FLAGS, version, platform.machine(), *sorted(cpu_flags())]
    digest = hashlib.sha256("\n".join(parts).encode())
    for path in sorted([*folder.glob("*.cpp"), *folder.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def _with_checksum(content: bytes) -> bytes:
    """What follows the end of a library harms nobody."""
    return content + hashlib.sha256(content).digest()


def _is_whole(library: Path) -> bool:
    """A library that is cut off would end the process while it is loaded, without a message."""
    content = library.read_bytes()
    return content == _with_checksum(content[:-CHECKSUM_BYTES])


def _remove_abandoned(cache: Path) -> None:
    """What is left of builds whose process was killed."""
    for folder in cache.glob(f"{BUILDING}*"):
        with contextlib.suppress(FileNotFoundError):  # another process does the same
            if time.time() - folder.stat().st_mtime > ABANDONED_AFTER_S:
                shutil.rmtree(folder, ignore_errors=True)


def _run_all(commands: Sequence[list[str]]) -> list[str]:
    """What each of them prints; as many run at a time as there are cores.

    When one fails, or the caller is interrupted, the others are ended. Raises CompileError.
    """
    running: set[subprocess.Popen[str]] = set()
    with ThreadPoolExecutor(len(available_cpus())) as pool:
        try:
            return list(pool.map(partial(_run, running), commands))
        except BaseException:
            for process in list(running):
                _end(process)
            raise


def _run(running: set[subprocess.Popen[str]], command: list[str]) -> str:
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace",
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise CompileError(f"{command[0]} cannot be run: {error}") from error
    with process:
        running.add(process)
        try:
            output, messages = process.communicate(timeout=COMPILER_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            _end(process)
            raise CompileError(f"{' '.join(command)} had not finished after {COMPILER_TIMEOUT_S} s") from error
        finally:
            running.discard(process)
    if process.returncode != 0:
        raise CompileError(f"{' '.join(command)} failed with exit code {process.returncode}:\n{messages.strip()}")
    return output


def _end(process: subprocess.Popen[str]) -> None:
    """Together with what it has started: compilers are drivers of other programs."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
