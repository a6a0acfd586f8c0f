"""Runs on a machine with an NVIDIA GPU what no other machine can show. Writes figures as JSON and prints a short table.

Every check is a process of its own with a time limit, since a kernel that fails takes its process's GPU along; when it
ends, so does everything that it has started. A check that the machine cannot do is recorded as unavailable. The GPU's
settings stay as they are.

Exit code: 0 where nothing failed, 1 where something did, 2 without a GPU that the kernels run on.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from scripts.gpu_checks.outcome import Outcome
from vllm_lite.config import program_name

TIME_LIMIT_S = 350.0
"""Of all checks together."""
LEAST_S = 5.0
"""With less time left, a check is not begun."""
PACKAGES = ("torch", "cupy-cuda13x", "cupy-cuda12x", "transformers", "numpy", "aiohttp")


@dataclass(frozen=True)
class Check:
    """One process of its own. `run` imports what it needs, so that the driver holds no GPU."""

    name: str
    run: Callable[[], Outcome]
    limit_s: float
    is_listed: bool = True
    """Whether it is run unless it is asked for by name."""


def _call(module: str, function: str, *arguments: Any, **keywords: Any) -> Outcome:
    found: Outcome = getattr(importlib.import_module(f"scripts.gpu_checks.{module}"), function)(*arguments, **keywords)
    return found


def _call_with_gpu(module: str, function: str) -> Outcome:
    gpu = importlib.import_module("vllm_lite.worker.gpu").find_gpu("cuda")
    return _call(module, function, gpu)


def _compile_beside_another_cuda() -> Outcome:
    """With CUDA_PATH naming a toolkit that is not there, and no kernel in the cache: the wheels must do."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as empty:
        os.environ.update(CUDA_PATH="/usr/local/cuda-0.0", XDG_CACHE_HOME=empty)
        return _call_with_gpu("kernels", "check_compilation")


def _serve(name: str, with_cold_start: bool) -> Outcome:
    serving = importlib.import_module("scripts.gpu_checks.serving")
    return _call("serving", "check_serving", name, getattr(serving, name), with_cold_start=with_cold_start)


def describe_machine() -> Outcome:
    """Raises StartupError where the kernels cannot run."""
    gpu = importlib.import_module("vllm_lite.worker.gpu").find_gpu("cuda")
    torch = importlib.import_module("torch")
    free, total = torch.cuda.mem_get_info(gpu.device)
    properties = torch.cuda.get_device_properties(gpu.device)
    figures = {
        "gpu": gpu.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": total,
        "free_bytes": free,
        "versions": gpu.compiler.versions,
        "packages": {name: _version(name) for name in PACKAGES if _version(name)},
        "python": platform.python_version(),
    }
    return Outcome("ok", f"{gpu.name}, {total / 2**30:.0f} GiB, {gpu.compiler.versions}", figures)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


MACHINE = Check("machine", describe_machine, 60)
CHECKS = (
    MACHINE,
    Check("compilation", partial(_call_with_gpu, "kernels", "check_compilation"), 90),
    Check("emulator", partial(_call_with_gpu, "kernels", "check_against_emulator"), 90),
    Check("streams", partial(_call_with_gpu, "kernels", "check_streams"), 45),
    Check("greedy", partial(_call, "engine", "check_greedy"), 60),
    Check("graphs", partial(_call, "engine", "check_graphs"), 45),
    Check("bandwidth", partial(_call_with_gpu, "kernels", "check_bandwidth"), 45),
    Check("launch cost", partial(_call_with_gpu, "kernels", "check_launch_cost"), 30),
    Check("serving 1B", partial(_serve, "LLAMA_1B", True), 110),
    Check("serving 8B", partial(_serve, "LLAMA_8B", False), 110),
    Check("CUDA_PATH", _compile_beside_another_cuda, 60),
    Check("memcheck", partial(_call, "sanitizer", "check_sanitizer", "memcheck"), 75),
    Check("racecheck", partial(_call, "sanitizer", "check_sanitizer", "racecheck"), 75),
    Check("every kernel", partial(_call_with_gpu, "kernels", "run_every_kernel"), 60, is_listed=False),
)


def run_in_process(check: Check, limit_s: float, log: IO[str], command: Sequence[str] | None = None) -> Outcome:
    """In a process of its own, whose whole group ends with it. Its output goes to `log`."""
    command = command or [sys.executable, "-m", "scripts.gpu_check", "--only", check.name]
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as temporary:
        result, output = Path(temporary) / "outcome.json", Path(temporary) / "output"
        with output.open("w") as file:
            process = subprocess.Popen(
                [*command, "--result", str(result)], stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                exit_code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                exit_code = None
            finally:
                _end_group(process)
        text = output.read_text(errors="replace")
        print(f"=== {check.name}\n{text}", file=log, flush=True)
        if exit_code is None:
            return Outcome("failed", f"had not ended after {limit_s:.0f} s")
        if not result.exists():
            last_line = (text.strip().splitlines() or ["no output"])[-1]
            return Outcome("failed", f"{last_line} (exit code {exit_code})")
        return Outcome(**json.loads(result.read_text()))


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_all(checks: Sequence[Check], log: IO[str], time_limit_s: float = TIME_LIMIT_S) -> dict[str, dict[str, Any]]:
    """By the name of each check: its outcome and the seconds it took. The first one must not fail."""
    deadline = time.monotonic() + time_limit_s
    found: dict[str, dict[str, Any]] = {}
    for check in checks:
        start = time.monotonic()
        limit_s = min(check.limit_s, deadline - start)
        if limit_s < LEAST_S:
            outcome = Outcome("failed", f"not begun: {time_limit_s:.0f} s are over")
        else:
            outcome = run_in_process(check, limit_s, log)
        found[check.name] = {**dataclasses.asdict(outcome), "seconds": round(time.monotonic() - start, 1)}
        print(row(check.name, found[check.name]), flush=True)
        if check is checks[0] and outcome.status == "failed":
            break
    return found


def row(name: str, found: dict[str, Any]) -> str:
    """A line of the table."""
    return f"{name:12} {found['status']:11} {found['seconds']:6.1f} s  {found['summary']}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(
        prog=program_name("scripts.gpu_check"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="folder for gpu_check.json, gpu_check.txt and gpu_check.log")
    parser.add_argument("--only", choices=[check.name for check in CHECKS], help="run one check, in this process")
    parser.add_argument("--result", type=Path, help="with --only: write its outcome to this file")
    chosen = parser.parse_args(arguments)
    if chosen.only is not None:
        outcome = next(check for check in CHECKS if check.name == chosen.only).run()
        print(f"{outcome.status}: {outcome.summary}")
        if chosen.result is not None:
            chosen.result.write_text(json.dumps(dataclasses.asdict(outcome)))
        return int(outcome.status == "failed")
    if chosen.out is None:
        parser.error("--out is required")
    chosen.out.mkdir(parents=True, exist_ok=True)
    return run_and_write([check for check in CHECKS if check.is_listed], chosen.out)


def run_and_write(checks: Sequence[Check], folder: Path, time_limit_s: float = TIME_LIMIT_S) -> int:
    """The exit code; the table goes to stdout as it grows, and to a file."""
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    with (folder / "gpu_check.log").open("w") as log, tempfile.TemporaryDirectory(prefix="gpu-check-") as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # the first check finds no compiled kernels, the later ones find its
        found = run_all(checks, log, time_limit_s)
    (folder / "gpu_check.json").write_text(json.dumps({"started": started, "checks": found}, indent=2) + "\n")
    (folder / "gpu_check.txt").write_text("".join(row(name, outcome) + "\n" for name, outcome in found.items()))
    if found[checks[0].name]["status"] == "failed":
        print("There is no GPU here that the kernels run on: nothing has been checked.", file=sys.stderr)
        return 2
    return int(any(outcome["status"] == "failed" for outcome in found.values()))


if __name__ == "__main__":
    sys.exit(main())
