"""What a request's line in the log says of its candidates."""

from __future__ import annotations

import logging

import pytest

from vllm_lite.config import EngineConfig
from vllm_lite.entrypoints.request_log import RequestRecord
from vllm_lite.outputs import CompletionDelta, FinishReason, RequestDelta

Ends = dict[int, FinishReason | None]


def logged(steps: list[Ends], caplog: pytest.LogCaptureFixture, *, is_beam_search: bool = False) -> tuple[str, bool]:
    """The last words of the line, and whether the request counts as aborted."""
    caplog.set_level(logging.INFO, logger="vllm_lite")
    with RequestRecord("id", EngineConfig()) as record:
        for step in steps:
            parent = 0 if is_beam_search else None
            outputs = tuple(CompletionDelta(index, "a", (1,), reason, parent=parent) for index, reason in step.items())
            record.add(RequestDelta("id", outputs, finished=False), 1, None)
    return caplog.messages[-1].split(" s, ")[-1], record.is_aborted


@pytest.mark.parametrize(
    ("steps", "words", "is_aborted"),
    [
        ([], "unfinished", False),
        ([{0: None}], "unfinished", False),
        ([{0: None}, {0: "stop"}], "stop", False),
        ([dict.fromkeys(range(256)), dict.fromkeys(range(256), "length")], "length x 256", False),
        ([{0: "stop", 1: None, 2: None}, {1: "length", 2: None}, {2: "stop"}], "stop x 2, length", False),
        ([{0: None}, {0: "abort"}], "abort", True),
        ([{0: None, 1: None}, {0: "abort", 1: "abort"}], "abort x 2", True),
        ([{0: "stop", 1: None}, {1: "abort"}], "stop, abort", True),
    ],
    ids=str,
)
def test_reasons_of_all_candidates_are_counted(
    steps: list[Ends], words: str, is_aborted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert logged(steps, caplog) == (words, is_aborted)


def test_of_beams_those_of_the_last_step_count(caplog: pytest.LogCaptureFixture) -> None:
    steps: list[Ends] = [{0: None, 1: None, 2: "stop"}, {0: "length", 1: "stop"}]
    assert logged(steps, caplog, is_beam_search=True) == ("length, stop", False)
