"""What the engine counts and how long things took, in constant memory. Knows nothing of who reads it.

Every accepted request is counted once, in exactly one of finished, failed and aborted, at the moment when it ends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from vllm_lite.outputs import FinishReason

BOUNDS_S = tuple(float(f"{digit}e{exponent}") for exponent in range(-5, 3) for digit in (1, 2, 5))
"""Upper bounds of the buckets of every histogram, inclusive: from 10 microseconds to 500 seconds."""

StepPhase = Literal["schedule", "execute", "postprocess"]


@dataclass(frozen=True)
class TimeCounts:
    """A histogram at one moment."""

    counts: tuple[int, ...]
    """[len(BOUNDS_S) + 1], how many times fell into each bucket; the last one has no bound."""
    sum_s: float

    @property
    def total(self) -> int:
        """How many times there are."""
        return sum(self.counts)


class TimeHistogram:
    """Sorts times in seconds into the buckets of `BOUNDS_S`."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def observe(self, time_s: float) -> None:
        """Takes one more."""
        self._counts[bisect_left(BOUNDS_S, time_s)] += 1
        self._sum_s += time_s

    def counts(self) -> TimeCounts:
        """A snapshot."""
        return TimeCounts(tuple(self._counts), self._sum_s)


@dataclass(frozen=True)
class EngineStats:
    """Gauges of this moment, and counters and histograms since the start."""

    num_running: int
    """Requests that own KV blocks."""
    num_waiting: int
    """Requests in the queue, preempted ones included."""
    num_free_blocks: int
    """KV blocks that no request owns."""
    num_total_blocks: int
    num_preemptions: int = 0
    """How often a running request lost its blocks and went back to the queue."""
    num_accepted: int = 0
    num_finished: dict[FinishReason, int] = field(default_factory=lambda: {"stop": 0, "length": 0})
    """By reason: "length" where a candidate was cut off, else "stop". A request of several candidates counts once."""
    num_aborted: int = 0
    """Requests that were ended before they were done."""
    num_failed: int = 0
    num_prompt_tokens: int = 0
    """Of the requests whose prompt has been computed."""
    num_generated_tokens: int = 0
    """Of all candidates and beams."""
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    """Tokens that were not computed because their K/V were there, of the queried ones."""
    queue_times: TimeCounts = field(default_factory=TimeHistogram().counts)
    """From being queued to the first admission: one for each request that was admitted."""
    first_token_times: TimeCounts = field(default_factory=TimeHistogram().counts)
    """From the arrival to the first token, tokenising included."""
    inter_token_times: TimeCounts = field(default_factory=TimeHistogram().counts)
    """Between steps that brought a request tokens, whether of one candidate or of several."""
    end_to_end_times: TimeCounts = field(default_factory=TimeHistogram().counts)
    """From the arrival to the last token, of finished requests."""
    step_times: dict[StepPhase, TimeCounts] = field(default_factory=lambda: StepClock().times())
    """A step that raises has no "postprocess"; "execute" includes handing over to the executor and back."""

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV blocks that requests own, from 0 to 1."""
        return 1 - self.num_free_blocks / self.num_total_blocks


@dataclass
class RequestCounts:
    """What became of requests, and when. The one place where their ends are counted."""

    num_accepted: int = 0
    num_finished: dict[FinishReason, int] = field(default_factory=lambda: {"stop": 0, "length": 0})
    num_aborted: int = 0
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    first_token_times: TimeHistogram = field(default_factory=TimeHistogram)
    inter_token_times: TimeHistogram = field(default_factory=TimeHistogram)
    end_to_end_times: TimeHistogram = field(default_factory=TimeHistogram)

    def finish(self, reasons: Sequence[FinishReason | None], time_s: float) -> FinishReason:
        """A request is done: why its candidates ended, and how long after its arrival. Returns what it counts as."""
        outcome: FinishReason = "length" if "length" in reasons else "stop"
        self.num_finished[outcome] += 1
        self.end_to_end_times.observe(time_s)
        return outcome


class StepClock:
    """Splits the time of each step into its phases, by a monotonic clock's seconds."""

    def __init__(self) -> None:
        self._histograms: dict[StepPhase, TimeHistogram] = {phase: TimeHistogram() for phase in get_args(StepPhase)}
        self._phase_start_s = 0.0

    def begin(self, now_s: float) -> None:
        """A step begins."""
        self._phase_start_s = now_s

    def end_phase(self, phase: StepPhase, now_s: float) -> None:
        """A phase ends, and the next one begins."""
        self._histograms[phase].observe(now_s - self._phase_start_s)
        self._phase_start_s = now_s

    def times(self) -> dict[StepPhase, TimeCounts]:
        """A snapshot."""
        return {phase: histogram.counts() for phase, histogram in self._histograms.items()}
