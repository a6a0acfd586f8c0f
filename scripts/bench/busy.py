"""How contenders fare beside another process that always computes, on the same cores."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from scripts.bench.contenders import Contender
from scripts.bench.figures import Spread, ratios, spread
from scripts.bench.rounds import Rounds
from scripts.bench.workloads import Prompt, Workload


@contextmanager
def busy_process() -> Iterator[None]:
    """A process that uses all it can get of one core, at normal priority."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"], stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure_busy(
    workload: Workload, contenders: Sequence[Contender], prompts: Sequence[Sequence[Prompt]], rounds: Rounds
) -> dict[str, dict[str, Spread]]:
    """For each contender, quiet and busy runs in turn, one pair for each of `prompts`.

    `slowdown` is quiet over busy tokens per second; the longest gaps are given where tokens come one by one.
    """
    results: dict[str, dict[str, Spread]] = {}
    for contender in contenders:
        quiet: list[dict[str, float]] = []
        busy: list[dict[str, float]] = []
        for same_prompts in prompts:
            quiet.append(rounds.run(f"{workload.name}, quiet", workload, contender, same_prompts).value)
            with busy_process():
                busy.append(rounds.run(f"{workload.name}, busy", workload, contender, same_prompts).value)
        result = {"slowdown": ratios(quiet, busy)["tokens_per_s"]}
        for name, values in (("quiet", quiet), ("busy", busy)):
            if "longest_gap_ms" in values[0]:
                result[f"longest_gap_ms_{name}"] = spread([figures["longest_gap_ms"] for figures in values])
        results[contender.name] = result
    return results
