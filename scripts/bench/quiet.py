"""Whether other processes disturbed a measurement: the machine's CPU time next to that of our own processes. Linux.

A run that was disturbed is repeated, a bounded number of times; the least disturbed one counts, and is marked.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

Value = TypeVar("Value")

PROC = Path("/proc")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
WINDOW_S = 0.2
"""For how long the machine is watched to tell whether it is idle: twenty ticks, which its clock counts in."""


@dataclass(frozen=True)
class Sample:
    """CPU seconds used up to a moment."""

    time_s: float
    machine_s: float
    """By everything that runs on the machine, and by its host in its place."""
    own_s: float
    """By our own processes."""


@dataclass(frozen=True)
class Limits:
    """When a run counts as disturbed and what is done about it."""

    max_foreign: float = 0.05
    """Cores that other processes may be busy on."""
    idle_wait_s: float = 15.0
    """For how long the machine may take to become idle before a run; then it begins anyway."""
    max_tries: int = 4


@dataclass(frozen=True)
class Measured(Generic[Value]):
    """The least disturbed of a few runs."""

    value: Value
    foreign: float
    """Cores that other processes were busy on."""
    is_disturbed: bool
    num_discarded: int
    load: float
    """The machine's load average of a minute, at the end."""


def foreign_cores(before: Sample, after: Sample) -> float:
    """Cores that other processes were busy on between two samples."""
    machine_s, own_s = after.machine_s - before.machine_s, after.own_s - before.own_s
    return max(0.0, machine_s - own_s) / (after.time_s - before.time_s)


def undisturbed(run: Callable[[], Value], sample: Callable[[], Sample], limits: Limits) -> Measured[Value]:
    """Runs until a run was not disturbed, at most `max_tries` times."""
    best: Measured[Value] | None = None
    for num_discarded in range(limits.max_tries):
        before = wait_until_idle(sample, limits)
        value = run()
        foreign = foreign_cores(before, sample())
        is_disturbed = foreign > limits.max_foreign
        if best is not None and best.foreign <= foreign:
            best = Measured(best.value, best.foreign, best.is_disturbed, num_discarded, best.load)
        else:
            best = Measured(value, foreign, is_disturbed, num_discarded, os.getloadavg()[0])
        if not is_disturbed:
            break
    assert best is not None, "max_tries is at least 1"
    return best


def wait_until_idle(sample: Callable[[], Sample], limits: Limits) -> Sample:
    """Returns, with the last sample, once other processes leave the machine alone or the time for that is over."""
    last = sample()
    end_s = last.time_s + limits.idle_wait_s
    is_idle = False
    while last.time_s < end_s and not is_idle:
        time.sleep(WINDOW_S)
        before, last = last, sample()
        is_idle = foreign_cores(before, last) <= limits.max_foreign
    return last


def take_sample(own_ids: Iterable[int], proc: Path = PROC) -> Sample:
    """Of the machine, and of these processes with all that descend from them."""
    return Sample(time.perf_counter(), machine_cpu_s(proc), tree_cpu_s(own_ids, proc))


def machine_cpu_s(proc: Path = PROC) -> float:
    """Without interrupts: the traffic of our own sockets is handled in them, and they belong to no process."""
    fields = (proc / "stat").read_text().split("\n", 1)[0].split()
    user, nice, system, _idle, _iowait, _irq, _softirq, steal = map(int, fields[1:9])
    return (user + nice + system + steal) / TICKS_PER_S


def tree_cpu_s(root_ids: Iterable[int], proc: Path = PROC) -> float:
    """CPU seconds of processes and their descendants, those included that have ended and been waited for."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for folder in proc.iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):  # it has just ended
                continue
            fields = stat.rpartition(")")[2].split()  # a name may contain anything
            parents[int(folder.name)] = int(fields[1])
            ticks[int(folder.name)] = sum(map(int, fields[11:15]))
    ours = set(root_ids) & ticks.keys()
    while children := {child for child, parent in parents.items() if parent in ours} - ours:
        ours |= children
    return sum(ticks[process_id] for process_id in ours) / TICKS_PER_S
