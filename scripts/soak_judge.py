"""Whether what a client has seen, and what the log says of its request, is right under the circumstances.

Knows how clients behave and what a server may do while it stops; knows no socket and no process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scripts.soak_checks import (
    Line,
    Solo,
    wrong_answer,
    wrong_beginning,
    wrong_line,
    wrong_line_of_unfinished,
    wrong_refusal,
)
from scripts.soak_client import HANG_S, Result

SLOW_WAYS = ("read slowly", "stop reading")
MAY_BE_CUT = ("stop reading", "half-close", "too large")
"""Where the server may rightly close a connection before the end of its answer."""
NOT_SERVED = ("malformed", "too long", "too large", "leave in the body")
REFUSALS = ("400", "408", "413", "503")
EXCERPT = 500


@dataclass(frozen=True)
class Circumstances:
    """What a server may do now."""

    has_time_limit: bool = False
    """It ends requests that take long."""
    is_stopping: bool = False
    """It has been told to stop: new requests are refused, or nobody takes them."""
    has_little_grace: bool = False
    """And what runs may be ended."""

    @property
    def may_end_early(self) -> bool:
        """Whether a request may be ended before it is done."""
        return self.has_time_limit or self.has_little_grace


def judge(result: Result, solo: Solo | None, now: Circumstances) -> tuple[str, str | None]:
    """The name of an outcome, and what is wrong with it as far as the client can tell."""
    visit, status = result.visit, result.status
    if result.outcome == "hung":
        return "hung", f"the client waited for more than {HANG_S:g} s"
    if result.outcome != "answered":
        wrong = wrong_beginning(visit.asked, solo, result.body) if status == 200 else None
        if (
            wrong is not None and visit.asked.is_stream and now.may_end_early
        ):  # it may have been ended before it was left
            wrong = wrong_beginning(visit.asked, solo, result.body, is_ended_early=True)
        if wrong is not None:
            return "wrong", wrong
        is_right = result.outcome == "left" or now.is_stopping or visit.way in MAY_BE_CUT
        return result.outcome, None if is_right else f"the connection ended: {result.outcome}"
    if status != 200:
        return str(status), wrong_refusal(status, result.headers, result.body) or _wrong_status(result, now)
    if visit.way == "other route":
        return "right", None
    if visit.way in NOT_SERVED:
        return "wrong", "answered 200"
    wrong = wrong_answer(visit.asked, solo, result.body)
    if wrong is None:
        return "right", None
    is_early = visit.asked.is_stream and now.may_end_early  # whether it was ended is in the log
    if is_early and wrong_beginning(visit.asked, solo, result.body, is_ended_early=True) is None:
        return "ended early", None
    return "wrong", wrong


def _wrong_status(result: Result, now: Circumstances) -> str | None:
    status, way = result.status, result.visit.way
    expected = {400} if way in ("malformed", "too long") else {413} if way == "too large" else set()
    if way != "other route" or now.is_stopping:
        expected.add(503)
    if now.has_time_limit and way != "other route":
        expected |= {504, 408}  # 408 where the body was late
    return None if status in expected else f"answered {status}: {result.body[:EXCERPT]!r}"


def wrong_lines(
    result: Result, outcome: str, solo: Solo | None, lines: Sequence[Line], now: Circumstances
) -> str | None:
    """What is wrong with the log's lines of a request, given the name of its outcome."""
    asked, way = result.visit.asked, result.visit.way
    must_be_logged = result.outcome == "answered" and way != "other route" and not now.is_stopping
    if len(lines) > 1 or (must_be_logged and not lines):
        return f"has {len(lines)} lines in the log"
    if not lines:
        return (
            f"was answered {result.status} without a line in the log" if outcome == "right" and way == "read" else None
        )
    line = lines[0]
    if result.outcome == "answered" and not line.is_queued and line.refusal_status != result.status:
        return f"was answered {result.status}, but its line in the log says {line.words!r}"
    if line.outcome == "failed":
        return f"failed: {line.words}"
    # What was ended before a last token without text looks like what came to its own end.
    is_ended = now.may_end_early and asked.is_stream and line.outcome == "abort"
    if outcome == "right" and not is_ended and (asked.is_repeatable or not now.may_end_early):
        return wrong_line(asked, solo, line)
    if outcome == "ended early" and line.outcome != "abort":
        return f"ended early, but its line in the log says {line.words!r}"
    if outcome in REFUSALS:
        is_wrong = line.is_queued and not now.may_end_early
        return f"was refused with {outcome}, but it was queued" if is_wrong else None
    if outcome == "504" and "timed out" not in line.words:
        return f"was answered 504, but its line in the log says {line.words!r}"
    is_cut = outcome in ("lost", "cut") and way not in (*SLOW_WAYS, "half-close")
    if is_cut and line.is_queued and not now.has_little_grace:
        return f"was queued but never answered to its end: {line.words}"
    return wrong_line_of_unfinished(asked, solo, line, result.body)
