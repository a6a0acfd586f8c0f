"""Speed of each CPU op with a model's sizes, next to the torch reference and to what the machine can do at most.

A kernel is timed as a step replays it: a list of calls, which Python starts once. The ceiling of a call is the time
that its bytes take at the rate at which torch sums a large buffer, or its products at the rate of torch's large product
in float32 or, if that is faster, in the run's dtype, whichever is longer; the rates are measured here first, with the
same number of threads. Small tensors stay in the processor's cache, so their ops can be faster than that. Weights
and KV caches are larger than it, taken from several copies in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from scripts.bench.arguments import add_limits, chosen_limits, names_of, positive
from scripts.bench.ceilings import Ceilings, measure_ceilings
from scripts.bench.figures import spread
from scripts.bench.machine import machine
from scripts.bench.op_cases import Case, OpCases, OpSizes
from scripts.bench.quiet import Limits, Measured, take_sample, undisturbed
from vllm_lite.config import EngineConfig, program_name
from vllm_lite.kernels.cpu import CpuKernels, load_cpu_kernels
from vllm_lite.kernels.topology import physical_cores
from vllm_lite.ops.workspace import Workspace
from vllm_lite.worker.checkpoint import open_checkpoint
from vllm_lite.worker.model_runner import native_dtypes

OPS = (
    "linear", "linear_accumulate", "gate_up_silu", "greedy_head", "logits", "embedding", "rms_norm", "layer_norm",
    "rotary", "cache write", "decode attention", "prefill attention",
)  # fmt: skip
CPU = torch.device("cpu")
MIN_ROUNDS = 3


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    sizes: OpSizes
    seconds: float
    """For how long a case is repeated, in rounds over all copies of its data."""
    buffer_bytes: int = 2**30
    matrix_size: int = 2048


QUICK = Effort(OpSizes((1, 5), (1, 3), (1, 5), (20,), ((20, 20), (8, 20)), cold_bytes=2**16), 0.0, 2**22, 64)


class OpBench:
    """Times cases, each on the kernels and on the reference."""

    def __init__(self, kernels: CpuKernels, ceilings: Ceilings, effort: Effort, limits: Limits) -> None:
        self._kernels = kernels
        self._ceilings = ceilings
        self._effort = effort
        self._limits = limits

    def measure(self, case: Case) -> dict[str, Any]:
        """Microseconds of a call, and how they compare."""
        kernel, reference = self._time(self._kernel_round(case)), self._time(self._reference_round(case))
        median_s = kernel.value["median"] * 1e-6
        least_s, bound = self._ceilings.bound(case.num_bytes, case.flops)
        return {
            "op": case.op,
            "size": case.size,
            "kernel_us": kernel.value,
            "reference_us": reference.value,
            "speedup": reference.value["median"] / kernel.value["median"],
            "gb_per_s": case.num_bytes / median_s / 1e9,
            "gflop_per_s": case.flops / median_s / 1e9,
            "ceiling": bound,
            "fraction_of_ceiling": least_s / median_s,
            "foreign_cores": [round(kernel.foreign, 3), round(reference.foreign, 3)],
            "is_disturbed": kernel.is_disturbed or reference.is_disturbed,
        }

    def _time(self, timed_round: Callable[[], float]) -> Measured[dict[str, float]]:
        sample = partial(take_sample, [os.getpid()])
        return undisturbed(lambda: spread(self._rounds(timed_round)), sample, self._limits)

    def _rounds(self, timed_round: Callable[[], float]) -> list[float]:
        """Microseconds of a call, one figure for each round; the first round is not counted."""
        timed_round()
        end_s = time.perf_counter() + self._effort.seconds
        times: list[float] = []
        while len(times) < MIN_ROUNDS or time.perf_counter() < end_s:
            times.append(timed_round() * 1e6)
        return times

    def _kernel_round(self, case: Case) -> Callable[[], float]:
        calls = case.calls(Workspace(CPU, cpu=self._kernels), self._effort.sizes.cold_bytes)
        with self._kernels.capture() as noted:
            for call in calls:
                call()
        captured = noted.finished()
        return lambda: timed(lambda: self._kernels.replay(captured, case.shape)) / len(calls)

    def _reference_round(self, case: Case) -> Callable[[], float]:
        # What the reference derives once a step, all layers share; here all rounds do.
        calls = case.calls(Workspace(CPU, native_dtypes(CPU)), self._effort.sizes.cold_bytes)

        def run() -> None:
            for call in calls:
                call()

        return lambda: timed(run) / len(calls)


def timed(run: Callable[[], None]) -> float:
    """Seconds."""
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


def op_line(result: dict[str, Any]) -> str:
    """A line of the table."""
    mark = f"   DISTURBED, others {max(result['foreign_cores']):.2f} cores" if result["is_disturbed"] else ""
    kernel_us, reference_us = result["kernel_us"]["median"], result["reference_us"]["median"]
    ceiling = f"{result['fraction_of_ceiling']:7.0%} {result['ceiling']}"
    return (
        f"{result['op']:18} {result['size']:22} {kernel_us:10.1f} {reference_us:10.1f} {result['speedup']:7.2f} "
        f"{result['gb_per_s']:8.1f} {result['gflop_per_s']:8.1f} {ceiling}{mark}"
    )


def title_line() -> str:
    """The head of the table."""
    return (
        f"{'op':18} {'size':22} {'kernel us':>10} {'torch us':>10} {'speedup':>7} {'GB/s':>8} {'GFLOP/s':>8} "
        f"{'share':>7} of the ceiling"
    )


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog=program_name("scripts.bench_ops"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", help="whose sizes: folder, .gguf file or hub name (default: the default model)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=positive, default=len(physical_cores()), help="of kernels and of torch")
    parser.add_argument("--ops", type=names_of(OPS), default=list(OPS), help=", ".join(OPS))
    parser.add_argument("--seconds", type=float, default=0.3, help="for how long each case is repeated")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, once: only shows that all of it works")
    add_limits(parser)
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Reads the command line, measures, prints; the exit code: 1 where there are no CPU kernels."""
    arguments = make_parser().parse_args(words)
    effort = QUICK if arguments.quick else Effort(OpSizes(), arguments.seconds)
    cores = physical_cores()
    kernels = load_cpu_kernels(arguments.threads, cores if arguments.threads == len(cores) else ())
    if kernels is None:
        return 1  # the log has said why
    dtype = getattr(torch, arguments.dtype)
    torch.set_num_threads(arguments.threads)
    ceilings = measure_ceilings(
        {torch.float32} | (native_dtypes(CPU) & {dtype}), effort.buffer_bytes, effort.matrix_size
    )
    results = {
        "machine": machine(),
        "settings": {name: getattr(arguments, name) for name in ("model", "dtype", "threads", "max_foreign")},
        "ceilings": {
            "read_gb_per_s": ceilings.read_bytes_per_s / 1e9,
            "gflop_per_s": {name: rate / 1e9 for name, rate in ceilings.flops_per_s.items()},
        },
    }
    print(json.dumps(results))
    print(title_line())
    bench = OpBench(kernels, ceilings, effort, chosen_limits(arguments))
    ops: list[dict[str, Any]] = []
    with torch.inference_mode():
        for case in OpCases(open_checkpoint(EngineConfig(model=arguments.model)).config, dtype, effort.sizes):
            if case.op in arguments.ops:
                ops.append(bench.measure(case))
                print(op_line(ops[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({**results, "ops": ops}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
