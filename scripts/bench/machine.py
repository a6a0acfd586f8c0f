"""What a figure was measured on, so that it means something elsewhere."""

from __future__ import annotations

import datetime
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch
import transformers

import vllm_lite
from vllm_lite.kernels.cpu_library import cpu_flags, find_compiler
from vllm_lite.kernels.topology import available_cpus, physical_cores

INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def machine() -> dict[str, Any]:
    """The processor, its instructions, versions and the date."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.*)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    flags = cpu_flags()
    return {
        "cpu": found[1] if found else platform.processor(),
        "instructions": [name for name in INSTRUCTIONS if name in flags],
        "cpus": len(available_cpus()),
        "physical_cores": len(physical_cores()),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "compiler": find_compiler() is not None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "vllm_lite": vllm_lite.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }
