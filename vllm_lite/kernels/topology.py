"""Which cores this process may compute on. Knows Linux's files about them, no kernel."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path


def available_cpus() -> list[int]:
    """The logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def physical_cores(system: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """One logical CPU of each physical core that this process may run on: a core's others share its arithmetic."""
    cores: dict[str, int] = {}
    for cpu in available_cpus():
        siblings = system / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        cores.setdefault(siblings.read_text().strip() if siblings.exists() else str(cpu), cpu)
    return list(cores.values())


def cpu_quota(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """How many CPUs' time the process's control groups leave it, rounded up; None where they set no limit.

    More threads than that would be stopped together for most of each period.
    """
    return min((max(1, math.ceil(quota)) for quota in _quotas(proc, cgroups)), default=None)


def _quotas(proc: Path, cgroups: Path) -> Iterator[float]:
    """Of the process's group and those around it, in CPUs; versions 2 and 1."""
    listing = proc / "self" / "cgroup"
    for line in listing.read_text().splitlines() if listing.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = cgroups / "cpu" if controllers else cgroups
        folder = root / path.lstrip("/")
        # Inside a container the path may be the host's, which does not exist here: then only the root does.
        for group in (folder, *folder.parents):
            if group.is_relative_to(root):
                yield from _quota_of(group)


def _quota_of(group: Path) -> Iterator[float]:
    both = group / "cpu.max"
    each = (group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us")
    if both.exists():
        numbers = both.read_text().split()
    elif all(path.exists() for path in each):
        numbers = [path.read_text().strip() for path in each]
    else:
        return
    if len(numbers) == 2 and all(number.isdigit() for number in numbers) and int(numbers[1]):
        yield int(numbers[0]) / int(numbers[1])
