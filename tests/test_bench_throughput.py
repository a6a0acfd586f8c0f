"""The benchmark that the README quotes, on a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from scripts import bench_throughput
from tests.helpers.checkpoints import cached_checkpoint


def test_both_engines_run_and_the_figures_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    sizes = ["--num-prompts", "3", "--prompt-len", "8", "--output-len", "5", "--repeats", "2", "--threads", "1"]
    model = ["--model", str(cached_checkpoint("llama")), "--dtype", "float32"]
    monkeypatch.setattr(sys, "argv", ["bench_throughput", *model, *sizes, "--json", str(file)])
    bench_throughput.main()
    figures = json.loads(file.read_text())
    for name in ("vllm_lite_tokens_per_s", "transformers_tokens_per_s", "ratio"):
        assert 0 < figures[name]["min"] <= figures[name]["median"] <= figures[name]["max"]
    assert capsys.readouterr().out.count("load") == 2


def test_too_few_tokens_are_no_measurement() -> None:
    with pytest.raises(RuntimeError, match="10 tokens were asked for, 3 came"):
        bench_throughput.timed(lambda: [[1, 2], [3]], 10)
