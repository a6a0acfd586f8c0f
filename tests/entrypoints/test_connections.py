"""How connections end: for clients that do too little, for streams that fail, and never for those that merely rest."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.doors import OPENAI, Door
from tests.helpers.fake_server import FAULTS, INSIDES
from tests.helpers.server import Server, request_bytes, running_server
from tests.helpers.waiting import wait_for_cut, wait_for_requests

LIMIT_S = 0.5
NUM_CLIENTS = 5
KEEP = "Connection: keep-alive"
HEALTH = request_bytes("GET", "/health", b"", KEEP)
FIVE_TOKENS: dict[str, Any] = {"prompt": "a", "max_tokens": 5}


@pytest.fixture(scope="module")
def server(door: Door) -> Iterator[Server]:
    """25 KB a token: five of them fill the system's buffers for a client that reads nothing, and block no write."""
    script = {"pieces": ["x" * 25_000]}
    with running_server("--slow-client-s", str(LIMIT_S), script=script, door=door) as server:
        yield server


def num_sockets(server: Server) -> int:
    """That the process has open."""
    links = [os.readlink(path) for path in Path(f"/proc/{server.process.pid}/fd").iterdir()]
    return sum(link.startswith("socket:") for link in links)


def wait_until(is_true: Callable[[], bool], server: Server) -> None:
    deadline = time.monotonic() + 10
    while not is_true():
        assert time.monotonic() < deadline, server.log
        time.sleep(0.01)


def narrow_connection(server: Server) -> socket.socket:
    """One whose client's buffer takes little."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", server.port))
    return connection


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"stream": True, "prompt": "!fail=4 a"}], ids=repr)
def test_what_fits_the_buffers_waits_no_longer_than_what_does_not(
    server: Server, fields: dict[str, Any], connection: str
) -> None:
    num_before, num_cut = num_sockets(server), server.log.count("the connection is cut")
    deltas = server.door.deltas if "stream" in fields else {}
    with ExitStack() as stack:
        for _ in range(NUM_CLIENTS):
            client = stack.enter_context(narrow_connection(server))
            client.sendall(server.request({**FIVE_TOKENS, **deltas, **fields}, f"Connection: {connection}"))
        start = time.monotonic()
        wait_for_cut(server, num_cut + NUM_CLIENTS)
        assert time.monotonic() - start > LIMIT_S * 0.9
        wait_until(lambda: num_sockets(server) == num_before, server)
    assert "Traceback" not in server.log


def test_who_has_read_an_answer_may_rest_and_who_reads_late_has_it_all(server: Server) -> None:
    with server.connect() as resting, narrow_connection(server) as late:
        for connection in (resting, late):
            connection.sendall(server.request(FIVE_TOKENS, KEEP))
        assert server.read(resting).is_complete
        time.sleep(LIMIT_S / 2)
        assert server.read(late).is_complete
        time.sleep(LIMIT_S * 3)
        for connection in (resting, late):
            connection.sendall(HEALTH)
            assert server.read(connection).status == 200


GET_PART = HEALTH[:20]


def whole_request(server: Server, kind: str) -> bytes:
    if kind == "without body":
        return HEALTH
    request = server.request({"prompt": "!delay=0.05 a", "max_tokens": 2}, KEEP)
    if kind == "with a length":
        return request
    head, body = request.split(b"\r\n\r\n")
    head = re.sub(rb"Content-Length: \d+", b"Transfer-Encoding: chunked", head)
    return head + b"\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


@pytest.mark.parametrize("kind", ["without body", "with a length", "chunked"])
@pytest.mark.parametrize("when", ["in one piece", "while it is handled", "once it is answered"])
def test_a_part_of_a_head_behind_a_request_has_its_time_wherever_it_comes(server: Server, kind: str, when: str) -> None:
    """A whole head there, or none, has no limit."""
    whole, num_cut = whole_request(server, kind), server.log.count("without a whole head")
    with server.connect() as partial, server.connect() as pipelined, server.connect() as resting:
        for connection, behind in [(partial, GET_PART), (pipelined, HEALTH), (resting, b"")]:
            if when == "in one piece":
                connection.sendall(whole + behind)
            else:
                connection.sendall(whole)
                if when == "while it is handled":
                    time.sleep(0.02)
                    connection.sendall(behind)
            assert server.read(connection).status == 200
            if when == "once it is answered":
                connection.sendall(behind)
        start = time.monotonic()
        assert partial.recv(1) == b""
        assert time.monotonic() - start < LIMIT_S * 4
        assert server.log.count("without a whole head") == num_cut + 1
        time.sleep(LIMIT_S * 2)
        for connection in (pipelined, resting):
            connection.sendall(HEALTH)
            assert server.read(connection).status == 200


def test_a_body_that_takes_long_and_a_head_in_two_pieces_are_fine(server: Server) -> None:
    request = server.request(FIVE_TOKENS, KEEP)
    with server.connect() as connection:
        for position in (20, -5, -1):
            for piece in (request[:position], request[position:]):
                connection.sendall(piece)
                time.sleep(LIMIT_S * (1.5 if position < 0 else 0.5))
            assert server.read(connection).is_complete


@pytest.fixture(scope="module")
def failing(door: Door) -> Iterator[Server]:
    with running_server(script={"pieces": ["x"]}, door=door) as server:
        yield server
        assert "Unhandled" not in server.log and "Error handling" not in server.log


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_a_stream_that_fails_after_its_first_message_is_seen_to_fail(failing: Server, fault: str, version: str) -> None:
    """Whatever the error: nothing but messages and last words come, and the end is an error for every client."""
    log_before = failing.log
    asked = failing.request({"prompt": f"!{fault}=3 a", "max_tokens": 6, "stream": True, **failing.door.deltas})
    response = failing.exchange(asked.replace(b"HTTP/1.1", f"HTTP/{version}".encode(), 1))
    assert response.status == 200 and not response.is_complete
    assert response.raw.count(b"HTTP/1") == 1 and INSIDES.encode() not in response.raw
    assert len(response.texts()) == 3
    if failing.door is OPENAI:
        assert b'data: {"error":' in response.body
    wait_for_requests(failing, 0)
    log = failing.log.removeprefix(log_before)
    num_unexpected = 0 if fault in ("fail", "dead") else 1
    assert log.count("Traceback") == log.count("an error in mid-stream") == num_unexpected, log


def test_an_http_1_0_stream_that_is_complete_ends_without_an_error(server: Server) -> None:
    asked = server.request({"prompt": "a", "max_tokens": 2, "stream": True, **server.door.deltas})
    response = server.exchange(asked.replace(b"HTTP/1.1", b"HTTP/1.0", 1))
    assert response.is_complete and len(response.texts()) == 2


def test_an_http_1_0_stream_that_is_cut_off_ends_in_an_error(server: Server) -> None:
    num_cut = server.log.count("the connection is cut")
    asked = server.request({"prompt": "a", "max_tokens": 50, "stream": True, **server.door.deltas})
    with narrow_connection(server) as client:
        client.sendall(asked.replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        wait_for_cut(server, num_cut + 1)
        assert not server.read(client).is_complete
