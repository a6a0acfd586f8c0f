"""What the server refuses or ends so that no load and no client takes more than its share."""

from __future__ import annotations

import json
import re
import select
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from tests.helpers.checkpoints import cached_checkpoint
from tests.helpers.doors import NATIVE, OPENAI, Door, events
from tests.helpers.server import REAL, Server, assert_refused, request_bytes, running_server
from tests.helpers.waiting import ENDLESS, reader_of_much, wait_for_cut, wait_for_requests


@pytest.mark.parametrize("is_stream", [False, True])
def test_requests_beyond_those_that_may_wait_are_refused_at_once(door: Door, is_stream: bool) -> None:
    fields: dict[str, Any] = {**ENDLESS, "stream": is_stream}
    with running_server("--max-num-seqs", "1", "--max-waiting-requests", "2", door=door) as server:
        open_requests = [server.connect() for _ in range(3)]
        for number, connection in enumerate(open_requests, 1):
            connection.sendall(server.request(fields))
            wait_for_requests(server, number)
        refused = server.post(fields)
        assert_refused(refused, 503, "2 requests are waiting", "--max-waiting-requests")
        assert refused.headers["retry-after"] == "1"
        with server.connect() as unread:  # nothing of a body is awaited
            unread.sendall(request_bytes("POST", door.path, b"", "Content-Length: 1000000"))
            assert server.read(unread).status == 503
        assert server.get("/health").status == server.get("/metrics").status == 200
        open_requests.pop().close()
        wait_for_requests(server, 2)
        with server.connect() as accepted:
            accepted.sendall(server.request(fields))
            wait_for_requests(server, 3)
        for connection in open_requests:
            connection.close()
        wait_for_requests(server, 0)
        assert server.post({"prompt": "a", "stream": is_stream}).status == 200
        assert "refused: '2 requests are waiting" in server.log


def test_a_burst_on_the_real_engine_is_served_or_refused_and_nothing_is_left(door: Door) -> None:
    flags = ["--model", str(cached_checkpoint()), "--max-num-seqs", "1", "--max-waiting-requests", "3"]
    with running_server(*flags, module=REAL, door=door) as server:
        with ThreadPoolExecutor(32) as pool:
            barrier = threading.Barrier(32)

            def ask(_: int) -> int:
                barrier.wait(30)
                return server.post({"prompt": "a b c", "max_tokens": 20, "ignore_eos": True}).status

            statuses = list(pool.map(ask, range(32)))
        assert set(statuses) == {200, 503}
        assert server.post({"prompt": "a"}).status == 200
        metrics = server.metrics()
        assert metrics["num_requests_waiting"] == metrics["num_requests_running"] == 0


@pytest.fixture(scope="module")
def hasty(door: Door) -> Iterator[Server]:
    """The real engine, which is never done in time with an answer of any length."""
    model = str(cached_checkpoint(max_position_embeddings=65536))
    flags = ["--model", model, "--max-num-seqs", "2", "--request-timeout-s", "0.7", "--num-kv-blocks", "9000"]
    with running_server(*flags, module=REAL, door=door) as server:
        yield server
        assert "Traceback" not in server.log


LONG: dict[str, Any] = {"prompt": "a b", "max_tokens": 60_000, "ignore_eos": True}


def test_a_stream_ends_in_time_with_the_text_it_has(hasty: Server) -> None:
    start = time.monotonic()
    response = hasty.post({**LONG, **hasty.door.deltas, "stream": True})
    assert 0.6 < time.monotonic() - start < 5
    assert response.status == 200
    assert len(response.texts()) > 1
    if hasty.door is NATIVE:
        assert response.is_complete
    else:  # whose clients can be told that it is not the whole text
        assert not response.is_complete
        assert "--request-timeout-s" in OPENAI.failure(json.loads(events(response.body)[-1]))
    wait_for_requests(hasty, 0)
    assert ", abort, timed out" in hasty.log


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_has_no_status_yet_is_504(door: Door, is_stream: bool) -> None:
    """A stream, too, whose first message would come later."""
    with running_server("--request-timeout-s", "0.1", door=door) as server:
        late = server.post({"prompt": "!delay=0.3 x", "max_tokens": 5, "stream": is_stream})
        assert_refused(late, 504, "0.1 s", "--request-timeout-s")


def test_what_runs_and_what_waits_gives_up_its_place(hasty: Server) -> None:
    fields = {"prompt": "a b", "max_tokens": 60_000, "ignore_eos": True}
    with ThreadPoolExecutor(8) as pool:
        for response in pool.map(hasty.post, [fields] * 8):
            assert_refused(response, 504, "0.7 s", "--request-timeout-s")
    wait_for_requests(hasty, 0)
    metrics = hasty.metrics()
    assert metrics["num_free_kv_blocks"] == metrics["num_total_kv_blocks"]


@pytest.mark.parametrize("is_trickle", [False, True])
def test_a_body_that_does_not_arrive_is_408(hasty: Server, is_trickle: bool) -> None:
    """A client that sends a byte now and then has no more time than one that sends nothing."""
    with hasty.connect() as connection:
        request = hasty.request({"prompt": "a" * 1000}, "Connection: keep-alive")
        connection.sendall(request[:-900])
        if is_trickle:
            send_slowly(connection, request[-900:], every_s=0.1)
        response = hasty.read(connection)
        assert_refused(response, 408, "0.7 s", "--request-timeout-s")
        assert response.headers["connection"] == "close"


def send_slowly(connection: socket.socket, data: bytes, every_s: float) -> None:
    """Byte by byte, until the server has something to say."""
    for position in range(len(data)):
        if select.select([connection], [], [], every_s)[0]:
            return
        connection.sendall(data[position : position + 1])
    raise AssertionError("the server has taken everything")


def test_a_request_that_is_done_in_time_notices_nothing(hasty: Server) -> None:
    with hasty.connect() as connection:
        for _ in range(2):
            connection.sendall(hasty.request({"prompt": "a", "max_tokens": 3}, "Connection: keep-alive"))
            assert hasty.read(connection).status == 200
        time.sleep(0.8)  # the time of both is over
        connection.sendall(hasty.request({"prompt": "a", "max_tokens": 3}, "Connection: keep-alive"))
        assert hasty.read(connection).status == 200


def test_a_head_that_does_not_arrive_cuts_the_connection_and_nothing_else_does() -> None:
    head = request_bytes("GET", "/health", b"", "Connection: keep-alive")
    with running_server("--slow-client-s", "0.5") as server, ExitStack() as stack:
        silent, cut_short, trickle, second_head, resting, busy = (
            stack.enter_context(server.connect()) for _ in range(6)
        )
        for connection in (second_head, resting):
            connection.sendall(head)
            assert server.read(connection).status == 200
        busy.sendall(server.request({"prompt": "!delay=0.1 a", "max_tokens": 12}, "Connection: keep-alive"))
        start = time.monotonic()
        for connection in (cut_short, second_head):
            connection.sendall(head[:20])
        send_slowly(trickle, head, every_s=0.05)
        for connection in (silent, cut_short, trickle, second_head):
            assert connection.recv(1) == b""
        assert 0.4 < time.monotonic() - start < 5
        assert server.log.count("is cut (--slow-client-s)") == 4
        assert server.read(busy).status == 200  # took 1.2 s
        for connection in (resting, busy):
            connection.sendall(head)
            assert server.read(connection).status == 200


MUCH = {"pieces": ["x" * 100_000]}


def test_a_reader_that_stalls_is_cut_off(door: Door) -> None:
    with running_server("--slow-client-s", "0.5", "--max-num-seqs", "1", script=MUCH, door=door) as server:
        start = time.monotonic()
        with reader_of_much(server, stream=True, **door.deltas):
            wait_for_requests(server, 1)
            wait_for_cut(server, 1)
            assert time.monotonic() - start > 0.4
            wait_for_requests(server, 0)
            # Of 100 KB each, and most of them in the reader's own buffer: the system would take some thirty by itself.
            [num_messages] = re.findall(r" (\d+) output tokens", server.log)
            assert int(num_messages) < 12
        assert server.metrics()["num_requests_aborted_total"] == 1
        with reader_of_much(server) as reader:  # no request any more, but a body that waits
            wait_for_cut(server, 2)
            assert not server.read(reader).is_complete
        assert server.post({"prompt": "a", "max_tokens": 1}).status == 200
        assert "Traceback" not in server.log and "Error handling" not in server.log


def test_a_reader_that_is_slow_but_reads_is_served(door: Door) -> None:
    with running_server("--slow-client-s", "0.8", script=MUCH, door=door) as server:
        start = time.monotonic()
        received = bytearray()
        with reader_of_much(server, stream=True, **door.deltas) as reader:
            while data := reader.recv(65536):
                received += data
                time.sleep(0.004)
        assert time.monotonic() - start > 0.9
        assert received.endswith(b"\r\n0\r\n\r\n")
        assert received.count(b"x" * 100_000) == 200
        assert "is cut" not in server.log
