"""scripts/soak.py: a real server stands it, and what a server might do wrong is found."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from scripts import soak_checks
from scripts.soak_checks import Line, Solo, parse_line
from scripts.soak_client import Body, Client, Result
from scripts.soak_judge import Circumstances, judge, wrong_lines
from scripts.soak_requests import WAYS, PoolRequest, Visit, make_pool, make_visit
from scripts.soak_server import Life, LifeOptions, is_port_free, resources, session_members
from tests.helpers.doors import NATIVE
from tests.helpers.server import Server
from vllm_lite.entrypoints.native.request_body import parse_generate_request

LOG_LINE = (
    "2026-11-30 16:00:00,000 INFO vllm_lite.entrypoints.request_log: request {name}: 3 prompt tokens, 5 output tokens, "
    "{queued}, first token 0.010 s, total 0.020 s, {words}"
)
ACCEPTED = "num_requests_accepted_total"
LENGTH = 'request_success_total{finished_reason="length"}'
STOP = 'request_success_total{finished_reason="stop"}'


def refused(status: int) -> str:
    return f'num_requests_refused_total{{status="{status}"}}'


def test_visits_depend_on_seed_and_number_alone_and_requests_are_valid() -> None:
    pool = make_pool(3, 84)
    visits = [make_visit(3, number, pool) for number in range(600)]
    assert [make_visit(3, number, make_pool(3, 84)) for number in reversed(range(600))] == visits[::-1]
    assert [make_visit(4, number, pool) for number in range(600)] != visits
    assert {visit.way for visit in visits} == set(WAYS)
    assert len({asked.body for asked in pool}) == 84
    for asked in pool:
        request = parse_generate_request(asked.body)
        assert request.is_stream == asked.is_stream and request.params.n == asked.num_outputs


def stream(*texts: list[str], **more: Any) -> bytes:
    return b"".join(json.dumps({"text": text, **more}).encode() + b"\0" for text in texts)


GREEDY = PoolRequest(0, "greedy", {"prompt": "p", "stream": True})
WHOLE = PoolRequest(0, "greedy", {"prompt": "p"})
PAIR = PoolRequest(0, "candidates", {"prompt": "p", "stream": True, "n": 2}, "candidates")
PAIR_DELTAS = PoolRequest(0, "candidates", {"prompt": "p", "stream": True, "stream_deltas": True, "n": 2}, "candidates")
ALONE = Solo(stream(["pa"], ["pab"], ["pabc"]), 1, 3, "length")
PAIR_ALONE = Solo(stream(["pa", "px"], ["pxy", "pab"]), 1, 4, "stop")
DELTAS_ALONE = Solo(stream(["a", "x"], ["b", "y"]), 1, 4, "stop")
UNSEEDED = replace(PAIR, is_repeatable=False)


@pytest.mark.parametrize(
    ("asked", "solo", "body", "message"),
    [
        (WHOLE, Solo(b'{"text":["pab"]}', 1, 2, "stop"), b'{"text":["pab"]}', None),
        (WHOLE, Solo(b'{"text":["pab"]}', 1, 2, "stop"), b'{"text":["pac"]}', "at byte 12"),
        (GREEDY, ALONE, ALONE.body, None),
        (GREEDY, ALONE, stream(["pa"], ["pabc"]), "differs"),
        (GREEDY, ALONE, stream(["pa"], ["pab"]), "differs"),
        (PAIR, PAIR_ALONE, stream(["pa", "p"], ["pa", "px"], ["pxy", "pab"]), None),
        (PAIR, PAIR_ALONE, stream(["pa", "pz"], ["pxy", "pab"]), "'pz' is the beginning of none"),
        (PAIR, PAIR_ALONE, stream(["pa", "px"], ["pab", "pxy"]), "differs"),
        (PAIR_DELTAS, DELTAS_ALONE, stream(["a", ""], ["", "x"], ["b", "y"]), None),
        (PAIR_DELTAS, DELTAS_ALONE, stream(["a", "x"], ["b", ""]), "differs"),
        (UNSEEDED, None, stream(["pr", "ps"]), None),
        (UNSEEDED, None, stream(["pr"]), "has not 2 texts"),
        (UNSEEDED, None, stream(["pr", "s"]), "has not 2 texts"),
        (UNSEEDED, None, b"\0", "is no answer"),
    ],
)
def test_a_wrong_answer_is_found(asked: PoolRequest, solo: Solo | None, body: bytes, message: str | None) -> None:
    wrong = soak_checks.wrong_answer(asked, solo, body)
    assert wrong is None if message is None else message in str(wrong)


@pytest.mark.parametrize(
    ("asked", "solo", "body", "is_early", "is_right"),
    [
        (GREEDY, ALONE, ALONE.body[:20], False, True),
        (GREEDY, ALONE, b"", False, True),
        (GREEDY, ALONE, ALONE.body[:20] + b"?", False, False),
        (GREEDY, ALONE, stream(["pa"], ["pabZ"]), False, False),
        (GREEDY, ALONE, stream(["pa"], ["pabZ"]), True, True),  # held back
        (GREEDY, ALONE, stream(["pZ"], ["pabZ"]), True, False),
        (WHOLE, Solo(b'{"text":["pab"]}', 1, 2, "stop"), b'{"te', False, True),
        (WHOLE, Solo(b'{"text":["pab"]}', 1, 2, "stop"), b'{"ta', False, False),
        (PAIR, PAIR_ALONE, stream(["p", "p"], ["px", "pa"]) + b'{"te', False, True),
        (PAIR, PAIR_ALONE, stream(["p", "p"], ["px", "pc"]), False, False),
        (PAIR_DELTAS, DELTAS_ALONE, stream(["a", ""], ["b", ""]), False, True),
        (PAIR_DELTAS, DELTAS_ALONE, stream(["a", ""], ["", "y"]), False, False),
    ],
)
def test_what_came_before_the_end_must_be_the_beginning(
    asked: PoolRequest, solo: Solo, body: bytes, is_early: bool, is_right: bool
) -> None:
    assert (soak_checks.wrong_beginning(asked, solo, body, is_ended_early=is_early) is None) == is_right


@pytest.mark.parametrize(
    ("name", "queued", "words", "outcome", "client_id"),
    [
        ("c-1 (abc)", "queued 0.001 s", "length", "length", "c-1"),
        ("abc", "queued 0.001 s", "stop x 2, length", "length", None),
        ("abc", "queued 0.001 s", "stop x 2", "stop", None),
        ("abc", "queued 0.001 s", "abort, timed out", "abort", None),
        ("abc", "not queued", "timed out", None, None),
        ("abc", "not queued", "refused: 'prompt is required, got stop.'", None, None),
        ("abc", "not queued", "client left", None, None),
        ("abc", "queued to its end", "client left", "abort", None),
        ("abc", "queued 0.001 s", "client left after the end: stop", "stop", None),
        ("abc", "queued 0.001 s", "failed: 'The step failed'", "failed", None),
    ],
)
def test_lines_of_the_log_are_read(
    name: str, queued: str, words: str, outcome: str | None, client_id: str | None
) -> None:
    line = parse_line(LOG_LINE.format(name=name, queued=queued, words=words))
    assert line == Line(client_id, 3, 5, queued != "not queued", queued.endswith(" s"), words)
    assert line.outcome == outcome
    assert (line.refusal_status is None) == line.is_queued and not line.is_odd


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("client left", 499),
        ("timed out", 504),
        ("unfinished", 503),
        ("refused: '24 requests are waiting already (--max-waiting-requests); try later.'", 503),
        ("refused: 'the server is stopping; send the request to another one or wait for its restart.'", 503),
        ("failed: 'no such thing'", 500),
        ("refused: 'Request Entity Too Large'", 413),
        ("refused: 'Request Timeout'", 408),
        ("refused: 'n must be 1, got 2.'", 400),
        ("refused: \"'timed out' is not a known field.\"", 400),
    ],
)
def test_what_was_not_queued_is_counted_by_the_status_that_the_log_tells(words: str, status: int) -> None:
    line = Line("a", 0, 0, False, False, words)
    assert line.refusal_status == status and line.outcome is None
    assert soak_checks.expected_counts([line, line])[refused(status)] == 2


@pytest.mark.parametrize(
    ("queued", "words"),
    [
        ("queued 0.001 s", "refused: 'prompt is required, got stop.'"),
        ("queued 0.001 s", "unfinished"),
        ("queued to its end", "timed out"),
        ("queued 0.001 s", "client left after the end: lost"),
        ("not queued", "stop"),
        ("not queued", "client left after the end: stop"),
        ("not queued", "abort, timed out"),
    ],
)
def test_a_line_with_an_end_that_there_must_not_be_is_a_finding(tmp_path: Path, queued: str, words: str) -> None:
    log_path = tmp_path / "log"
    text = LOG_LINE.format(name="c-1 (abc)", queued=queued, words=words)
    right = LOG_LINE.format(name="abc", queued="queued 0.001 s", words="stop")
    log_path.write_text(f"{right}\n{text}\n{right}\n")
    life = Life(Server(cast(Any, None), "http://127.0.0.1:1", log_path, "", NATIVE), LifeOptions("main"))
    life.read_log()
    assert life.trouble == [text]
    is_queued = queued != "not queued"
    assert soak_checks.expected_counts(life.lines)[ACCEPTED] == 2 + is_queued  # and counts go on


def lines() -> list[Line]:
    return [
        Line("a", 3, 5, True, True, "length"),
        Line("b", 4, 2, True, True, "client left"),
        Line("c", 0, 0, True, False, "client left"),
        Line("d", 0, 0, False, False, "refused: 'x'"),
        Line("e", 0, 0, False, False, "client left"),
    ]


def exact_metrics() -> dict[str, float]:
    gauges: dict[str, float] = {
        refused(413): 0,
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0,
    }
    return {**soak_checks.expected_counts(lines()), **gauges, "num_free_kv_blocks": 8, "num_total_kv_blocks": 8}


def test_counters_are_compared_exactly() -> None:
    metrics = exact_metrics()
    assert metrics[ACCEPTED] == 3 and metrics[LENGTH] == 1 and metrics["num_requests_aborted_total"] == 2
    assert {name: value for name, value in metrics.items() if "refused" in name} == {
        refused(400): 1,
        refused(499): 1,
        refused(413): 0,
    }
    assert metrics["prompt_tokens_total"] == 7 and metrics["generation_tokens_total"] == 7
    assert metrics["request_queue_time_seconds_count"] == metrics["time_to_first_token_seconds_count"] == 2
    assert soak_checks.wrong_counts(metrics, lines()) == []
    for name in metrics:
        if name != "num_total_kv_blocks":
            wrong = soak_checks.wrong_counts({**metrics, name: metrics[name] + 1}, lines())
            assert len(wrong) == 1, name


def test_a_line_that_is_missing_is_a_leaked_count() -> None:
    wrong = soak_checks.wrong_counts(exact_metrics(), lines()[1:])
    assert any(ACCEPTED in one and "is 3, the requests make 2" in one for one in wrong)
    assert soak_checks.wrong_counts(exact_metrics(), lines()[:-1]) == [f"{refused(499)} is 1, the requests make 0"]


def test_a_refusal_that_is_not_counted_is_found() -> None:
    metrics = exact_metrics()
    del metrics[refused(499)]
    assert soak_checks.wrong_counts(metrics, lines()) == [f"{refused(499)} is 0, the requests make 1"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({LENGTH: 3}, "not 4 answered <= 3 finished"),
        ({ACCEPTED: 9}, "9 accepted <= 8 sent"),
        ({"num_requests_running": 0}, "0 run or wait"),
        ({"num_free_kv_blocks": 9}, "9 of 8 blocks"),
        ({STOP: -1, LENGTH: 5}, "went from 0 to -1"),
    ],
)
def test_counters_under_load_stay_within_what_is_known(changes: dict[str, float], message: str | None) -> None:
    metrics = {ACCEPTED: 6, LENGTH: 4, STOP: 0, "num_requests_aborted_total": 1, "num_requests_failed_total": 0}
    metrics |= {"num_requests_running": 1, "num_requests_waiting": 0, "num_free_kv_blocks": 5, "num_total_kv_blocks": 8}
    before = {name: 0.0 for name in metrics}
    wrong = soak_checks.wrong_counts_under_load(before, {**metrics, **changes}, 4, 8)
    assert wrong == [] if message is None else any(message in one for one in wrong)


def test_an_answered_request_has_the_line_of_the_idle_server() -> None:
    assert soak_checks.wrong_line(GREEDY, ALONE, Line("a", 1, 3, True, True, "length")) is None
    for line in (
        Line("a", 2, 3, True, True, "length"),
        Line("a", 1, 4, True, True, "length"),
        Line("a", 1, 3, True, True, "stop"),
        Line("a", 1, 3, True, True, "client left"),
    ):
        assert soak_checks.wrong_line(GREEDY, ALONE, line) is not None


@pytest.mark.parametrize(
    ("line", "body", "is_right"),
    [
        (Line("a", 1, 2, True, True, "client left"), ALONE.body[:32], True),
        (Line("a", 0, 0, True, False, "client left"), b"", True),
        (Line("a", 0, 0, False, False, "client left"), b"", True),
        (Line("a", 1, 3, True, True, "client left after the end: length"), b"", True),
        (Line("a", 1, 2, True, True, "client left after the end: length"), b"", False),
        (Line("a", 1, 0, True, True, "client left"), ALONE.body[:32], False),
        (Line("a", 1, 4, True, True, "client left"), b"", False),
        (Line("a", 2, 2, True, True, "client left"), b"", False),
        (Line("a", 0, 0, False, False, "client left"), ALONE.body[:32], False),
        (Line("a", 1, 1, True, True, "abort, timed out"), stream(["pa"], ["pab"]), True),
        (Line("a", 1, 0, True, True, "abort, timed out"), stream(["pa"], ["pab"]), False),
    ],
)
def test_a_request_that_was_left_has_no_more_tokens_than_alone_and_no_less_than_came(
    line: Line, body: bytes, is_right: bool
) -> None:
    assert (soak_checks.wrong_line_of_unfinished(GREEDY, ALONE, line, body) is None) == is_right


def result_of(outcome: Any, status: int = 200, body: bytes = ALONE.body, way: Any = "read") -> Result:
    return Result(Visit(1, way, GREEDY, False, 0.0, False, b"{}"), "visit-1", outcome, status, {}, body)


STOPPING = Circumstances(is_stopping=True)
HASTY = Circumstances(is_stopping=True, has_little_grace=True)
LIMITED = Circumstances(has_time_limit=True)
DETAIL = b'{"detail": "x"}'


@pytest.mark.parametrize(
    ("result", "now", "name", "is_right"),
    [
        (result_of("answered"), Circumstances(), "right", True),
        (result_of("answered", body=stream(["pZ"])), Circumstances(), "wrong", False),
        (result_of("answered", body=stream(["pa"])), Circumstances(), "wrong", False),
        (result_of("answered", body=stream(["pa"])), STOPPING, "wrong", False),
        (result_of("answered", body=stream(["pa"])), HASTY, "ended early", True),
        (result_of("answered", body=stream(["pa"])), LIMITED, "ended early", True),
        (result_of("answered", way="malformed"), Circumstances(), "wrong", False),
        (result_of("answered", 400, DETAIL, "malformed"), Circumstances(), "400", True),
        (result_of("answered", 400, DETAIL), Circumstances(), "400", False),
        (result_of("answered", 500, DETAIL), STOPPING, "500", False),
        (result_of("answered", 504, DETAIL), Circumstances(), "504", False),
        (result_of("answered", 504, DETAIL), LIMITED, "504", True),
        (result_of("hung"), STOPPING, "hung", False),
        (result_of("left", body=ALONE.body[:20]), Circumstances(), "left", True),
        (result_of("left", body=b"Z"), Circumstances(), "wrong", False),
        (result_of("left", body=stream(["pa"], ["pa\ufffd"])), Circumstances(), "wrong", False),
        (result_of("left", body=stream(["pa"], ["pa\ufffd"])), LIMITED, "left", True),
        (result_of("left", body=stream(["pZ"], ["pZ\ufffd"])), LIMITED, "wrong", False),
        (result_of("cut", body=b""), Circumstances(), "cut", False),
        (result_of("cut", body=b"", way="stop reading"), Circumstances(), "cut", True),
        (result_of("lost", 0, b""), Circumstances(), "lost", False),
        (result_of("lost", 0, b""), STOPPING, "lost", True),
        (result_of("no connection", 0, b""), Circumstances(), "no connection", False),
    ],
)
def test_what_is_right_depends_on_the_circumstances(
    result: Result, now: Circumstances, name: str, is_right: bool
) -> None:
    outcome, wrong = judge(result, ALONE, now)
    assert (outcome, wrong is None) == (name, is_right), wrong


DONE = Line("visit-1", 1, 3, True, True, "length")
ABORTED = Line("visit-1", 1, 1, True, True, "abort")
REFUSED = Line("visit-1", 0, 0, False, False, "refused: 'x'")
FULL = replace(REFUSED, words="refused: '24 requests are waiting already (--max-waiting-requests); try later.'")


@pytest.mark.parametrize(
    ("result", "outcome", "found", "now", "message"),
    [
        (result_of("answered"), "right", [DONE], Circumstances(), None),
        (result_of("answered"), "right", [], Circumstances(), "has 0 lines"),
        (result_of("answered"), "right", [], STOPPING, "without a line"),
        (result_of("answered"), "right", [DONE, DONE], Circumstances(), "has 2 lines"),
        (result_of("answered"), "right", [ABORTED], Circumstances(), "its line in the log says 'abort'"),
        (result_of("answered"), "right", [ABORTED], HASTY, "had 2 messages and 3 tokens alone, but 1 in the log"),
        (result_of("answered"), "right", [replace(ABORTED, num_output_tokens=2)], HASTY, None),
        (result_of("answered", body=stream(["pa"])), "ended early", [ABORTED], HASTY, None),
        (result_of("answered", body=stream(["pa"])), "ended early", [DONE], HASTY, "ended early"),
        (result_of("answered", 503), "503", [FULL], Circumstances(), None),
        (result_of("answered", 503), "503", [REFUSED], Circumstances(), "answered 503, but its line"),
        (result_of("answered", 400), "400", [REFUSED], Circumstances(), None),
        (result_of("answered", 400), "400", [replace(REFUSED, words="client left")], Circumstances(), "answered 400"),
        (result_of("answered", 503), "503", [ABORTED], STOPPING, "but it was queued"),
        (result_of("answered", 503), "503", [ABORTED], HASTY, None),
        (result_of("answered", 504), "504", [ABORTED], LIMITED, "answered 504"),
        (result_of("lost", 0, b""), "lost", [], STOPPING, None),
        (result_of("lost", 0, b""), "lost", [ABORTED], STOPPING, "never answered to its end"),
        (result_of("lost", 0, b""), "lost", [ABORTED], HASTY, None),
        (result_of("left", 0, b""), "left", [replace(ABORTED, words="failed: 'x'")], STOPPING, "failed"),
    ],
)
def test_the_log_must_say_what_the_client_saw(
    result: Result, outcome: str, found: list[Line], now: Circumstances, message: str | None
) -> None:
    wrong = wrong_lines(result, outcome, ALONE, found, now)
    assert wrong is None if message is None else message in str(wrong)


def test_growing_memory_and_leaked_descriptors_are_found() -> None:
    assert soak_checks.wrong_memory(100_000, 101_900) is None
    assert soak_checks.wrong_memory(100_000, 98_100) is None
    assert "100000 to 102100 KiB" in str(soak_checks.wrong_memory(100_000, 102_100))
    assert soak_checks.wrong_levels("file descriptors", [7, 7, 7]) is None
    assert "7, 8, 7" in str(soak_checks.wrong_levels("file descriptors", [7, 8, 7]))


@pytest.mark.parametrize(
    ("status", "headers", "body", "message"),
    [
        (400, {}, b'{"detail": "n must be 1, got 2."}', None),
        (400, {}, b"no", "without a detail"),
        (400, {}, b'{"detail": ["x"]}', "with the detail ['x']"),
        (503, {"retry-after": "1"}, b'{"detail": "24 requests are waiting already"}', None),
        (503, {}, b'{"detail": "24 requests are waiting already"}', "without Retry-After"),
    ],
)
def test_a_refusal_must_say_why(status: int, headers: dict[str, str], body: bytes, message: str | None) -> None:
    wrong = soak_checks.wrong_refusal(status, headers, body)
    assert wrong is None if message is None else message in str(wrong)


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_the_client_finds_the_end_of_an_answer(piece: int) -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nab\0\r\n1\r\nc\r\n0\r\n\r\n"
    known = b"HTTP/1.1 503 No\r\nContent-Length: 3\r\nRetry-After: 1\r\n\r\nabc"
    for sent, status, data in ((chunked, 200, b"ab\0c"), (known, 503, b"abc")):
        body = Body()
        for at in range(0, len(sent), piece):
            assert not body.is_complete
            body.feed(sent[at : at + piece])
        assert (body.is_complete, body.status, bytes(body.data)) == (True, status, data)
    assert not _fed(chunked[:-2]).is_complete and not _fed(known[:-1]).is_complete


def _fed(data: bytes) -> Body:
    body = Body()
    body.feed(data)
    return body


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]


def visit_to(serve: Serve, way: Any = "read") -> Any:
    async def visit() -> Any:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            client = Client("127.0.0.1", server.sockets[0].getsockname()[1], asyncio.Event(), 0.01)
            result = await client.make(Visit(1, way, GREEDY, False, 0.0, False, GREEDY.body), "visit-1")
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
            return result

    return asyncio.run(visit())


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def _says_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    await _close(writer)


async def _closes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(GREEDY.body)
    await _close(writer)


async def _cuts(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(GREEDY.body)
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nab\0\r\n1\r")
    await _close(writer)


def test_outcomes_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert visit_to(_closes).outcome == "lost"
    cut = visit_to(_cuts)
    assert (cut.outcome, cut.status, cut.body) == ("cut", 200, b"ab\0")
    assert visit_to(_cuts, "leave the stream").outcome == "left"
    assert visit_to(_says_nothing, "leave before the answer").outcome == "left"
    monkeypatch.setattr("scripts.soak_client.HANG_S", 0.05)
    assert visit_to(_says_nothing).outcome == "hung"


def test_the_process_is_looked_at() -> None:
    command = [sys.executable, "-c", "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, stderr=subprocess.DEVNULL) as process:
        while len(members := session_members(process.pid)) < 2:
            assert process.poll() is None
        assert process.pid in members
        assert process.stdin is not None
        process.stdin.close()
    assert session_members(process.pid) == []
    mine = resources(os.getpid())
    assert mine.rss_kib > 10_000 and mine.num_threads >= 1
    with open(os.devnull):
        assert resources(os.getpid()).num_fds == mine.num_fds + 1


def test_a_port_that_somebody_has_is_not_free() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        assert not is_port_free(port)
    assert is_port_free(port)
