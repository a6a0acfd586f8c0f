"""Loads a checkpoint's weights as a server does, and prints how much memory that takes at its worst.

    python -m tests.helpers.loading_peak DTYPE [MODEL]

Prints a JSON object: the weights' bytes, the peak of the process's resident memory above what it was before, seconds.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import torch

from vllm_lite.config import EngineConfig
from vllm_lite.models.registry import build_model
from vllm_lite.worker.checkpoint import open_checkpoint
from vllm_lite.worker.cpu import find_cpu_kernels

STATUS = Path("/proc/self/status")


def kib(field: str) -> int:
    """A line of the process's status, in KiB."""
    found = re.search(rf"^{field}:\s*(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    assert found, field
    return int(found[1])


def main(dtype: str, model_path: str | None = None) -> None:
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(EngineConfig(model=model_path))
    cpu = find_cpu_kernels(None, checkpoint.config)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, started = kib("VmRSS"), time.perf_counter()
    panel_rows = 1 if cpu is None else cpu.panel_rows
    model = build_model(checkpoint.config, getattr(torch, dtype), 128, panel_rows=panel_rows)
    checkpoint.load_into(model.weight_targets(), model.is_ignored)
    if cpu is not None:
        cpu.pack_all(model.options.matrices)
    seconds = time.perf_counter() - started
    num_bytes = sum(target.numel() * target.element_size() for target in model.weight_targets().values())
    print(json.dumps({"weights": num_bytes, "peak": (kib("VmHWM") - before) * 1024, "seconds": seconds}))


if __name__ == "__main__":
    main(*sys.argv[1:])
