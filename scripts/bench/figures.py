"""From the times of tokens to figures, and from figures of several rounds to medians and ratios."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scripts.bench.workloads import Workload

Spread = dict[str, float]
"""Keys median, min and max."""

UNITS = {
    "tokens_per_s": "tokens/s",
    "decode_tokens_per_s": "tokens/s decode",
    "first_token_ms": "ms to first token",
    "longest_gap_ms": "ms longest gap",
}

PERCENTILES = (50, 90, 99)
COMPARED_FIGURES = ("tokens_per_s", "decode_tokens_per_s", "first_token_ms")


@dataclass(frozen=True)
class Run:
    """What came of a workload. Times are seconds since its start."""

    seconds: float
    """Until the last answer was complete."""
    num_tokens: int
    token_times: list[list[float]]
    """When each message of each request came; no list where answers come whole."""


def figures(workload: Workload, run: Run) -> dict[str, float]:
    """`tokens_per_s` counts new tokens over the whole run, prompts included; the others need streams.

    `first_token_ms` and `decode_tokens_per_s` (from the first token to the last) are those of a single stream;
    `longest_gap_ms` is the longest wait between two tokens of any stream. Raises RuntimeError where tokens are missing.
    """
    if run.num_tokens != workload.num_tokens:
        raise RuntimeError(f"{workload.num_tokens} tokens were asked for, {run.num_tokens} came")
    values = {"tokens_per_s": run.num_tokens / run.seconds}
    if not run.token_times:
        return values
    if workload.num_prompts == 1:
        first_s, last_s = run.token_times[0][0], run.token_times[0][-1]
        values["first_token_ms"] = first_s * 1e3
        if last_s > first_s:  # not where all of them lay in the client's socket already
            values["decode_tokens_per_s"] = (workload.output_len - 1) / (last_s - first_s)
    gaps = (b - a for times in run.token_times for a, b in itertools.pairwise(times))
    values["longest_gap_ms"] = max(gaps, default=0.0) * 1e3
    return values


def spread(values: Sequence[float]) -> Spread:
    """Median, least and greatest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Mean, p50, p90, p99 and greatest, interpolated between neighbours."""
    found = {f"p{share}": float(np.percentile(values, share)) for share in PERCENTILES}
    return {"mean": statistics.fmean(values), **found, "max": max(values)}


def spreads(rounds: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    """For each figure that every round has."""
    names = [name for name in rounds[0] if all(name in values for values in rounds)]
    return {name: spread([values[name] for values in rounds]) for name in names}


def ratios(ours: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    """Ours over theirs, round by round, for each speed or time that both have in every round."""
    shared = [name for name in COMPARED_FIGURES if all(name in values for values in (*ours, *theirs))]
    return {name: spread([a[name] / b[name] for a, b in zip(ours, theirs, strict=True)]) for name in shared}
