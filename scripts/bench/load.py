"""A load on a server of the native protocol: threads that send streamed requests, and when every token came.

Closed loop: each thread sends its next request when the last one is answered. With due times: a request is sent when it
is due, or as soon as a thread is free, and its times count from when it was due, so that a queue in front of the server
is not hidden.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

from scripts.bench.client import Address, exchange, post_bytes
from scripts.bench.figures import percentiles
from scripts.bench.protocols import NativeProtocol

MAX_REASON_CHARS = 200
TIMES = {
    "first_token_ms": "first token",
    "inter_token_ms": "between two tokens",
    "end_to_end_ms": "whole request",
    "ms_per_token": "whole request / its tokens",
}
"""What is measured of each request, in milliseconds."""


@dataclass(frozen=True)
class Job:
    """One request to send."""

    prompt: str
    max_tokens: int
    due_s: float | None = None
    """Seconds since the start of the load; None is at once."""


@dataclass(frozen=True)
class Outcome:
    """What came of a job. Times are seconds since the start of the load."""

    max_tokens: int
    begin_s: float
    """When it was due, or else sent."""
    end_s: float
    token_times: list[float] = field(default_factory=list)
    failure: str | None = None


@dataclass(frozen=True)
class Load:
    """A whole run."""

    seconds: float
    outcomes: list[Outcome]
    num_not_sent: int
    """Jobs that the limit of time, or Ctrl-C, came before."""

    @property
    def answered(self) -> list[Outcome]:
        """Those that did not fail."""
        return [outcome for outcome in self.outcomes if outcome.failure is None]


def poisson_times(rate: float, count: int, generator: random.Random) -> list[float]:
    """Seconds at which `count` requests are due that come at random, `rate` a second on average."""
    return list(itertools.accumulate(generator.expovariate(rate) for _ in range(count)))


class LoadRunner:
    """Sends jobs over a fixed number of threads. `fields` are added to every request."""

    def __init__(self, address: Address, fields: dict[str, Any], *, num_threads: int, timeout_s: float) -> None:
        self._address = address
        self._fields = fields
        self._num_threads = num_threads
        self._timeout_s = timeout_s
        self._is_over = threading.Event()
        self._start_s = 0.0

    def run(self, jobs: Sequence[Job], *, time_limit_s: float, on_outcome: Callable[[Outcome], None]) -> Load:
        """Sends all jobs, none later than `time_limit_s`. `on_outcome` is called by one thread at a time.

        A request ends at its timeout, which is for how long the server sends nothing, so the run ends, too. After
        Ctrl-C no more are sent.
        """
        self._start_s = time.perf_counter()
        limit = threading.Timer(time_limit_s, self._is_over.set)
        limit.start()
        try:
            with ThreadPoolExecutor(self._num_threads) as pool:
                sent = [pool.submit(self._send, job) for job in jobs]
                try:
                    for future in as_completed(sent):
                        if (outcome := future.result()) is not None:
                            on_outcome(outcome)
                except KeyboardInterrupt:
                    self._is_over.set()
        finally:
            limit.cancel()
        outcomes = [outcome for future in sent if (outcome := future.result()) is not None]
        return Load(time.perf_counter() - self._start_s, outcomes, len(jobs) - len(outcomes))

    def _send(self, job: Job) -> Outcome | None:
        if job.due_s is not None:
            self._is_over.wait(min(max(0.0, job.due_s - self._now_s()), threading.TIMEOUT_MAX))
        if self._is_over.is_set():
            return None
        sent_s = self._now_s()
        begin_s = sent_s if job.due_s is None else job.due_s
        fields = {**self._fields, "prompt": job.prompt, "max_tokens": job.max_tokens, "stream": True}
        try:
            (response,) = exchange(
                self._address, [post_bytes(self._address, "/generate", fields)], timeout_s=self._timeout_s
            )
            answer = NativeProtocol().read(response.body(), job.max_tokens, is_stream=True)
            if not answer.token_times:
                raise RuntimeError("the stream has no message")
        except (OSError, RuntimeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"[:MAX_REASON_CHARS]
            return Outcome(job.max_tokens, begin_s, self._now_s(), failure=reason)
        times = [sent_s + time_s for time_s in answer.token_times]
        return Outcome(job.max_tokens, begin_s, sent_s + response.end_s, times)

    def _now_s(self) -> float:
        return time.perf_counter() - self._start_s


def milliseconds(load: Load) -> dict[str, list[float]]:
    """The times of all answered requests, by what they measure.

    `ms_per_token` is a request's whole time over its tokens; `inter_token_ms` has every gap between two tokens of a
    request.
    """
    found: dict[str, list[float]] = {name: [] for name in TIMES}
    for outcome in load.answered:
        whole_s = outcome.end_s - outcome.begin_s
        found["first_token_ms"].append(1e3 * (outcome.token_times[0] - outcome.begin_s))
        found["inter_token_ms"] += [1e3 * (b - a) for a, b in itertools.pairwise(outcome.token_times)]
        found["end_to_end_ms"].append(1e3 * whole_s)
        found["ms_per_token"].append(1e3 * whole_s / len(outcome.token_times))
    return found


def load_figures(load: Load) -> dict[str, Any]:
    """Counts, speeds, and percentiles of `milliseconds`."""
    num_answered, num_tokens = len(load.answered), sum(len(outcome.token_times) for outcome in load.answered)
    failures = Counter(outcome.failure for outcome in load.outcomes if outcome.failure is not None)
    return {
        "num_answered": num_answered,
        "num_failed": len(load.outcomes) - num_answered,
        "failures": dict(failures.most_common()),
        "num_not_sent": load.num_not_sent,
        "seconds": load.seconds,
        "num_tokens": num_tokens,
        "tokens_per_s": num_tokens / load.seconds,
        "requests_per_s": num_answered / load.seconds,
        **{name: percentiles(values) for name, values in milliseconds(load).items() if values},
    }
