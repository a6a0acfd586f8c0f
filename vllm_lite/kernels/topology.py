"""Which cores this process may compute on. Knows Linux's files about them, no kernel."""

from __future__ import annotations

import os
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
