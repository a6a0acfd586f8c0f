"""The report on the KV cache, on small runs."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "kv_report.py"


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_less_than_4_percent_of_the_allocated_slots_are_empty(report: dict[str, Any]) -> None:
    waste = report["report_waste"](num_requests=100, num_blocks=512, block_size=16, arrivals_per_step=0.2, seed=1)
    assert 0 < waste.waste < 0.04
    assert waste.num_preemptions > 0 and waste.recomputed > 0, "there were fewer blocks than needed"
    assert 100 < waste.mean_prompt_len < 220 and 220 < waste.mean_output_len < 450


def test_prompts_that_begin_alike_share_blocks(report: dict[str, Any]) -> None:
    def count(enable_prefix_caching: bool) -> int:
        num_blocks: int = report["count_blocks_of_shared_prompts"](
            num_prompts=8, prefix_len=128, own_len=16, block_size=16, enable_prefix_caching=enable_prefix_caching
        )
        return num_blocks

    without, shared = count(False), count(True)
    assert without >= 8 * 9
    assert without - shared == 7 * 128 // 16


@pytest.mark.parametrize(("is_beams", "least", "most"), [(False, 0.1, 0.5), (True, 0.3, 0.75)])
def test_candidates_share_blocks(report: dict[str, Any], is_beams: bool, least: float, most: float) -> None:
    share = report["share_saved_by_candidates"](num_requests=8, block_size=16, num_candidates=4, is_beams=is_beams)
    assert least < share < most


def test_the_command_prints_its_figures(
    report: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--num-requests",
        "20",
        "--num-blocks",
        "160",
        "--num-prompts",
        "4",
        "--prefix-len",
        "64",
        "--num-shared",
        "2",
    ]
    monkeypatch.setattr("sys.argv", ["kv_report", *arguments])
    report["main"]()
    assert "KV waste" in capsys.readouterr().out
