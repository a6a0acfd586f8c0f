"""Times a call in a way that a busy machine disturbs little."""

from __future__ import annotations

import time
from collections.abc import Callable


def best_time(call: Callable[[], object], num_runs: int = 5) -> float:
    """Seconds of CPU time that this thread needs for the fastest of some runs."""
    times = []
    for _ in range(num_runs):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return min(times)
