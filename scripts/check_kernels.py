"""Compiles every CUDA kernel for every architecture and prints what each one takes. Needs no GPU.

Fails if a kernel does not compile, spills registers, or asks for more shared memory than the architecture has.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from scripts.nvrtc import VERSION, NvrtcError, Usage, compile_source
from vllm_lite.config import program_name
from vllm_lite.kernels.cuda import Kernel, read_source
from vllm_lite.ops.cuda_kernels import every_kernel

MAX_SHARED_KIB = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99}
"""Dynamic shared memory that a block can ask for."""


@dataclass(frozen=True)
class Report:
    """One kernel on one architecture."""

    kernel: Kernel
    architecture: str
    usage: Usage

    @property
    def problems(self) -> list[str]:
        """What must not be; empty for a good kernel."""
        found = []
        if self.usage.spill_bytes:
            found.append(f"{self.usage.spill_bytes} bytes spilled")
        limit = MAX_SHARED_KIB[self.architecture] * 1024
        if self.kernel.shared_bytes > limit:
            found.append(f"{self.kernel.shared_bytes} bytes of shared memory, of {limit}")
        return found


def check(kernels: Iterable[Kernel], architectures: Sequence[str], num_threads: int = 2) -> list[Report]:
    """Compiles every kernel for every architecture. Raises NvrtcError with the compiler's log."""
    by_source: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        by_source.setdefault(kernel.source, []).append(kernel)
    jobs = [(source, architecture) for source in by_source for architecture in architectures]

    def compile_one(job: tuple[str, str]) -> list[Report]:
        source, architecture = job
        names = [kernel.name for kernel in by_source[source]]
        usages = compile_source(source, read_source(source), names, architecture)
        return [Report(kernel, architecture, usages[kernel.name]) for kernel in by_source[source]]

    with ThreadPoolExecutor(num_threads) as pool:
        return [report for reports in pool.map(compile_one, jobs) for report in reports]


def table(reports: Sequence[Report]) -> str:
    """A line for each kernel with its registers (and spilled bytes) on each architecture, then one for each problem."""
    architectures = list(dict.fromkeys(report.architecture for report in reports))
    registers: dict[Kernel, list[str]] = {}
    for report in reports:
        spilled = f"+{report.usage.spill_bytes}" if report.usage.spill_bytes else ""
        registers.setdefault(report.kernel, []).append(f"{report.usage.num_registers}{spilled}")
    title = "registers (+ bytes spilled)"
    width = max(len(title), *(len(kernel.name) for kernel in registers))
    lines = [f"{title:{width}} {' '.join(f'{name:>6}' for name in architectures)} shared bytes"]
    for kernel, counts in registers.items():
        lines.append(f"{kernel.name:{width}} {' '.join(f'{count:>6}' for count in counts)} {kernel.shared_bytes:12}")
    problems = [
        f"{report.kernel.name} on {report.architecture}: {problem}" for report in reports for problem in report.problems
    ]
    lines.extend(problems or [f"{len(registers)} kernels, NVRTC {VERSION}: no spills, shared memory within the limits"])
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 for a problem."""
    parser = argparse.ArgumentParser(prog=program_name("scripts.check_kernels"), description=__doc__)
    parser.add_argument("architectures", nargs="*", metavar="sm_NN", help=f"default: {' '.join(MAX_SHARED_KIB)}")
    chosen = parser.parse_args(arguments).architectures
    if unknown := set(chosen) - set(MAX_SHARED_KIB):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(MAX_SHARED_KIB)}")
    try:
        reports = check(every_kernel(), chosen or list(MAX_SHARED_KIB))
    except NvrtcError as error:
        print(error, file=sys.stderr)
        return 1
    print(table(reports))
    return int(any(report.problems for report in reports))


if __name__ == "__main__":
    sys.exit(main())
