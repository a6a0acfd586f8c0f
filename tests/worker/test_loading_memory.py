"""What loading takes beside the weights themselves, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.checkpoints import make_model, save_checkpoint

ROOT = Path(__file__).parents[2]
STATUS = Path("/proc/self/status")
needs_linux = pytest.mark.skipif(not STATUS.exists(), reason="only Linux tells a process's memory in /proc")


def assert_loads_within(dtype: str, model: Path | None = None) -> None:
    """At most 1.3 times the weights in the dtype of the run; no less than them, or nothing was measured."""
    command = [sys.executable, "-m", "tests.helpers.loading_peak", dtype, *([] if model is None else [str(model)])]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    measured = json.loads(result.stdout)
    assert 0.95 < measured["peak"] / measured["weights"] <= 1.3, measured


@needs_linux
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_default_model(dtype: str) -> None:
    assert_loads_within(dtype)


@needs_linux
def test_shards_that_hold_twice_as_many_bytes_as_the_run(tmp_path: Path) -> None:
    model = make_model(
        vocab_size=16384, hidden_size=512, intermediate_size=1536, num_hidden_layers=6, num_key_value_heads=4
    )
    save_checkpoint(tmp_path, model, dtype=torch.float32, max_shard_size="30MB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert_loads_within("bfloat16", tmp_path)
