"""What a request's line in the log says of its candidates, and of what the engine has counted."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from contextlib import suppress
from dataclasses import replace

import pytest

from vllm_lite.config import EngineConfig
from vllm_lite.entrypoints.request_log import RequestRecord
from vllm_lite.outputs import CompletionDelta, FinishReason, RequestDelta, RequestTally

Ends = dict[int, FinishReason | None]


def logged(steps: list[Ends], caplog: pytest.LogCaptureFixture, *, is_beam_search: bool = False) -> tuple[str, bool]:
    """The last words of the line, and whether the request counts as aborted."""
    caplog.set_level(logging.INFO, logger="vllm_lite")
    with RequestRecord("id", EngineConfig()) as record:
        for step in steps:
            parent = 0 if is_beam_search else None
            outputs = tuple(CompletionDelta(index, "a", (1,), reason, parent=parent) for index, reason in step.items())
            record.add(RequestDelta("id", outputs, finished=False))
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


@pytest.mark.parametrize(
    ("tally", "words"),
    [
        (None, "0 prompt tokens, 0 output tokens, not queued, first token never, client left"),
        (
            RequestTally("abort", 0, 0, None, None),
            "0 prompt tokens, 0 output tokens, queued to its end, first token never, client left",
        ),
        (
            RequestTally("abort", 3, 9, 0.0, 0.0),
            "3 prompt tokens, 9 output tokens, queued, first token, client left",
        ),
        (
            RequestTally("length", 3, 9, 0.0, 0.0),
            "3 prompt tokens, 9 output tokens, queued, first token, client left after the end: length",
        ),
    ],
    ids=str,
)
def test_of_a_client_that_left_the_line_says_what_was_counted(
    tally: RequestTally | None, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="vllm_lite")
    with suppress(asyncio.CancelledError), RequestRecord("id", EngineConfig()) as record:
        if tally is not None:
            now_s = time.monotonic()
            is_admitted = tally.admission_time_s is not None
            record.end(replace(tally, admission_time_s=now_s, first_token_time_s=now_s) if is_admitted else tally)
        raise asyncio.CancelledError
    assert (
        re.sub(r"(queued|first token) -?[\d.]+ s|, total [\d.]+ s", r"\1", caplog.messages[-1])
        == f"request id: {words}"
    )
