"""What is no HTTP, or not the HTTP that is spoken here, gets one answer like any other, and the connection ends."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from scripts.bench.client import Address
from scripts.fuzz import send
from scripts.fuzz_cases import BROKEN_HTTP, CHUNKED, HEAD, Case
from tests.helpers.server import (
    Response,
    Server,
    assert_refused,
    generate_bytes,
    read_response,
    request_bytes,
    running_server,
)

TIMEOUT_S = 20
VERSION = "the request must be HTTP/1.1 or HTTP/1.0, got HTTP/"
NOT_VALID = "the request is not valid HTTP/1.1: "


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server("--log-level", "debug") as server:
        yield server
        assert "Traceback" not in server.log and "Unhandled" not in server.log


def assert_like_any_other(response: Response) -> None:
    """No version of a library is told, there is an id, and nothing follows."""
    assert response.headers["server"] == "vllm_lite"
    assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])
    assert response.raw.count(b"HTTP/") - response.body.count(b"HTTP/") == 1, response.raw


def exchange(server: Server, *pieces: bytes) -> Response:
    """Sends pieces, each once the server has had the time to take the one before, and reads all until it closes."""
    with server.connect() as connection:
        for piece in pieces:
            connection.sendall(piece)
            assert server.get("/health").status == 200  # one thread serves all: it has seen the piece
        response = read_response(connection)
        response.raw += b"".join(iter(lambda: connection.recv(65536), b""))
        return response


@pytest.mark.parametrize("sent", BROKEN_HTTP[1:], ids=lambda sent: repr(sent)[2:60])
def test_every_refusal_is_json_without_versions(server: Server, sent: bytes) -> None:
    received = send(Address("127.0.0.1", server.port), Case("broken HTTP", sent, None, may_wait=True), TIMEOUT_S)
    assert re.match(rb"HTTP/[01]\.[019] 400 Bad Request\r\n", received), received
    assert b"\r\nContent-Type: application/json\r\n" in received
    assert b"\r\nServer: vllm_lite\r\n" in received
    assert re.search(rb'\r\n\r\n\{"detail":"[^\r\n]{10,}"\}$', received), received
    assert b"aiohttp" not in received and b"Python" not in received


def test_blank_lines_alone_are_no_request(server: Server) -> None:
    assert send(Address("127.0.0.1", server.port), Case("", BROKEN_HTTP[0], None, may_wait=True), TIMEOUT_S) == b""


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"GET /health HTTP/9.9\r\n\r\n", [NOT_VALID, "Invalid HTTP version", "HTTP/9.9"]),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64), [NOT_VALID, "HTTPS"]),
        (HEAD + b"Content-Length: -1\r\n\r\n", [NOT_VALID, "Content-Length: -1"]),
        (CHUNKED + b"x\r\n", [NOT_VALID, "chunk size"]),
        (b"GET /health\r\n\r\n", [VERSION + "0.9"]),
        (b"GET /health HTTP/2.0\r\nHost: a\r\n\r\n", [VERSION + "2.0"]),
        (b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"[:-2] + b"X: " + b"x" * 10_000 + b"\r\n\r\n", [NOT_VALID, "8190"]),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_the_detail_says_what_is_wrong(server: Server, sent: bytes, words: list[str]) -> None:
    response = exchange(server, sent)
    assert_refused(response, 400, *words)
    assert len(response.json()["detail"]) < 400
    assert_like_any_other(response)


@pytest.mark.parametrize(
    "rest",
    [
        b"zz\r\n",
        b"0\r\nTrailer\r\n\r\n",
        b"1\r\nab\r\n",
        b"f" * 40 + b"\r\n",
        b"0\r\nT: " + b"x" * 20_000 + b"\r\n\r\n",
    ],
    ids=lambda rest: repr(rest)[:30],
)
def test_a_body_that_breaks_while_it_is_awaited_is_refused_at_once(server: Server, rest: bytes) -> None:
    response = exchange(server, CHUNKED + b"2\r\n{}\r\n", rest)
    assert_refused(response, 400, "the body cannot be read")
    assert_like_any_other(response)


def test_garbage_behind_a_request_leaves_its_answer_alone(server: Server) -> None:
    fields = {"prompt": "!delay=0.05 a", "max_tokens": 4}
    with server.connect() as connection:
        connection.sendall(generate_bytes(fields, "Connection: keep-alive"))
        assert server.get("/health").status == 200
        connection.sendall(b"GARBAGE\r\n\r\n")
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    answer, refused = re.findall(rb"HTTP/1\.[01] (\d+) .*?\r\n\r\n(\{[^}]*\})", received, flags=re.DOTALL)
    assert answer[0] == b"200" and answer[1].startswith(b'{"text":["!delay=0.05 a')
    assert refused[0] == b"400" and b"GARBAGE" in refused[1]


def test_requests_behind_each_other_are_all_served(server: Server) -> None:
    """A request that has come while the one before is being answered is no broken body."""
    keep = "Connection: keep-alive"
    chunked = request_bytes(
        "POST", "/generate", b'5\r\n{"pro\r\n9\r\nmpt":"b"}\r\n0\r\n\r\n', keep, "Transfer-Encoding: chunked"
    )
    whole = generate_bytes({"prompt": "!delay=0.01 a", "max_tokens": 2}, keep)
    with server.connect() as connection:
        connection.sendall(whole + chunked + whole)
        received = b""
        while received.count(b'{"text":') < 3:
            received += connection.recv(65536)
    assert received.count(b"HTTP/1.1 200 OK") == 3


def test_http_1_0_is_spoken(server: Server) -> None:
    response = server.exchange(generate_bytes({"prompt": "a"}).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
    assert response.status == 200 and response.json()["text"][0].startswith("a")


@pytest.mark.parametrize("path", ["/health", "/generate", "/nothing"])
def test_an_expectation_that_nobody_meets_is_417(server: Server, path: str) -> None:
    response = server.get(path, "Expect: the worst")
    assert_refused(response, 417, "the worst")
    assert_like_any_other(response)
