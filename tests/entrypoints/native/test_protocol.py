"""Every statement of the protocol about bytes, status codes, headers and bodies, over raw sockets to a real process."""

from __future__ import annotations

import functools
import gzip
import itertools
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from tests.helpers.checkpoints import cached_checkpoint
from tests.helpers.fake_server import MAX_PROMPT_CHARS, PIECES
from tests.helpers.native_requests import ASKED, BAD_BODIES, NASTY_PROMPTS, STREAMED
from tests.helpers.server import (
    REAL,
    Server,
    assert_refused,
    generate_bytes,
    read_response,
    request_bytes,
    running_server,
)

ANSWER = "Hé" + "".join(PIECES) * 2
GIBIBYTE_OF_ZEROS = gzip.compress(bytes(64 * 2**20), compresslevel=1) * 16


@pytest.fixture(scope="module")
def scripted() -> Iterator[Server]:
    """A server whose engine plays back `PIECES`, so that every byte is known."""
    with running_server() as server:
        yield server


@pytest.fixture(scope="module")
def real() -> Iterator[Server]:
    """A server with a tiny model."""
    with running_server("--model", str(cached_checkpoint()), "--num-kv-blocks", "64", module=REAL) as server:
        yield server


@pytest.fixture(params=["scripted", "real"])
def server(request: pytest.FixtureRequest) -> Server:
    server: Server = request.getfixturevalue(request.param)
    return server


@functools.cache
def reference(server: Server) -> str:
    """What the server answered to `ASKED` the first time."""
    text = server.text(**ASKED)
    assert len(text) > len(ASKED["prompt"])
    return text


def test_answer_is_compact_json_in_raw_utf8(scripted: Server) -> None:
    response = scripted.post(ASKED)
    assert response.raw.startswith(b"HTTP/1.1 200 OK\r\n")
    assert response.headers["content-type"] == "application/json"
    assert response.headers["content-length"] == str(len(response.body))
    assert response.body == json.dumps({"text": [ANSWER]}, ensure_ascii=False, separators=(",", ":")).encode()


def test_stream_is_one_chunk_a_message_to_the_byte(scripted: Server) -> None:
    response = scripted.post(STREAMED)
    texts = list(itertools.accumulate(PIECES * 2, initial="Hé"))[1:]
    messages = [json.dumps({"text": [text]}).encode("ascii") + b"\0" for text in texts]
    assert response.chunks == messages
    framed = b"".join(f"{len(message):x}\r\n".encode() + message + b"\r\n" for message in messages)
    assert response.raw.partition(b"\r\n\r\n")[2] == framed + b"0\r\n\r\n"


def test_stream_headers(server: Server) -> None:
    response = server.post(STREAMED, "Accept-Encoding: gzip, deflate, br")
    assert response.raw.startswith(b"HTTP/1.1 200 OK\r\n")
    assert response.headers["content-type"] == "application/octet-stream"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["transfer-encoding"] == "chunked"
    assert "content-length" not in response.headers
    assert "content-encoding" not in response.headers
    assert "python" not in response.headers["server"].lower()


def test_stream_only_grows_and_ends_in_the_answer(server: Server) -> None:
    texts = server.post(STREAMED).messages()
    assert len(texts) == ASKED["max_tokens"]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert texts[-1] == server.text(**ASKED)


def test_token_without_text_repeats_the_text(scripted: Server) -> None:
    texts = scripted.post({**STREAMED, "max_tokens": 3}).messages()
    assert texts[2] == texts[1]


@pytest.mark.parametrize("chunk_size", [1, 7, 512, 8192])
def test_old_clients_read_the_stream_in_chunks_of_any_size(server: Server, chunk_size: int) -> None:
    asked = {**STREAMED, "max_tokens": 100}
    with requests.post(f"{server.url}/generate", json=asked, stream=True, timeout=30) as response:
        lines = list(response.iter_lines(chunk_size=chunk_size, decode_unicode=False, delimiter=b"\0"))
    texts = [json.loads(line)["text"][0] for line in lines if line]
    assert texts == server.post(asked).messages()
    assert len(texts) == 100


def test_first_message_comes_long_before_the_last(scripted: Server) -> None:
    with scripted.connect() as connection:
        start = time.monotonic()
        connection.sendall(generate_bytes({"prompt": "!delay=0.02 x", "stream": True, "max_tokens": 100}))
        received = b""
        while b"\0" not in received:
            received += connection.recv(65536)
        first = time.monotonic() - start
        while connection.recv(65536):
            pass
        total = time.monotonic() - start
    assert received.count(b"\0") == 1
    assert first < 0.2 * total


def test_newline_delimiter() -> None:
    with running_server("--stream-delimiter", "newline") as server:
        response = server.post(STREAMED)
        assert all(chunk.endswith(b'"]}\n') and chunk.count(b"\n") == 1 for chunk in response.chunks)
        assert response.messages(b"\n")[-1] == ANSWER


@pytest.mark.parametrize("content_type", [None, "application/json", "application/x-www-form-urlencoded", "text/plain"])
def test_any_content_type(server: Server, content_type: str | None) -> None:
    headers = [f"Content-Type: {content_type}"] if content_type else []
    assert server.post(ASKED, *headers).json() == {"text": [reference(server)]}


def test_chunked_request_body(server: Server) -> None:
    body = json.dumps(ASKED).encode()
    framed = b"".join(f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in (body[:7], body[7:])) + b"0\r\n\r\n"
    request = request_bytes("POST", "/generate", b"", "Transfer-Encoding: chunked") + framed
    assert server.exchange(request).json() == {"text": [reference(server)]}


@pytest.mark.parametrize("stream", [True, 1, -0.5, "True", "false", [0], {"a": 1}])
def test_stream_is_on_by_json_truthiness(server: Server, stream: Any) -> None:
    assert server.post({**ASKED, "stream": stream}).messages()[-1] == reference(server)


@pytest.mark.parametrize("stream", [False, None, 0, 0.0, "", [], {}])
def test_stream_is_off_by_json_truthiness(server: Server, stream: Any) -> None:
    assert server.post({**ASKED, "stream": stream}).json() == {"text": [reference(server)]}


def test_null_is_the_default_of_every_optional_field(server: Server) -> None:
    names = ["stream", "details", "stream_deltas", "n", "top_p", "stop", "seed", "logit_bias", "top_k"]
    assert server.text(**ASKED, **dict.fromkeys(names)) == reference(server)


def test_prefix_pos_is_ignored(server: Server) -> None:
    assert server.text(**ASKED, prefix_pos=3) == reference(server)


def test_sixteen_tokens_by_default(server: Server) -> None:
    assert len(server.post({"prompt": "a", "stream": True, "ignore_eos": True}).messages()) == 16


@pytest.mark.parametrize("prompt", NASTY_PROMPTS)
def test_text_starts_with_the_prompt_as_it_was_sent(scripted: Server, prompt: str) -> None:
    fields = {"prompt": prompt, "max_tokens": 5, "temperature": 0}
    text = scripted.text(**fields)
    assert text.startswith(prompt)
    assert text[len(prompt) :] == "".join(PIECES[:5])
    assert scripted.post({**fields, "stream": True}).messages()[-1] == text
    raw = json.dumps(fields, ensure_ascii=False).encode()
    assert scripted.post(raw).json() == {"text": [text]}


@pytest.mark.parametrize("body, word", BAD_BODIES, ids=[body[:40].decode("latin-1") for body, _ in BAD_BODIES])
def test_bad_body_is_400_that_names_the_fault(server: Server, body: bytes, word: str) -> None:
    expected = reference(server)
    assert_refused(server.post(body), 400, word)
    assert server.text(**ASKED) == expected


@pytest.mark.parametrize("is_stream", [False, True])
def test_refusal_by_the_engine_is_400_for_streams_too(server: Server, is_stream: bool) -> None:
    assert_refused(
        server.post({"prompt": "a", "logprobs": 21, "stream": is_stream}), 400, "logprobs must be at most 20", "got 21"
    )


@pytest.mark.parametrize("num_chars", [900_000, 1_100_000])
def test_bodies_around_a_mebibyte_pass(scripted: Server, num_chars: int) -> None:
    prompt = "x" * num_chars
    assert scripted.text(prompt=prompt, max_tokens=1) == prompt + PIECES[0]


def test_body_of_escaped_cjk_is_no_413(scripted: Server) -> None:
    prompt = "你" * 300_000
    assert scripted.text(prompt=prompt, max_tokens=1) == prompt + PIECES[0]


def test_prompt_beyond_the_context_is_400_that_names_both_lengths(scripted: Server) -> None:
    response = scripted.post({"prompt": "x" * 8 * 2**20, "stream": True})
    assert_refused(response, 400, str(8 * 2**20), str(MAX_PROMPT_CHARS))


@pytest.mark.parametrize("is_chunked", [False, True])
def test_body_beyond_the_limit_is_413(server: Server, is_chunked: bool) -> None:
    body = b'{"prompt":"' + b"x" * (32 * 2**20) + b'"}'
    if is_chunked:
        request = request_bytes("POST", "/generate", b"", "Transfer-Encoding: chunked")
        request += f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
    else:
        request = generate_bytes(body)
    assert_refused(server.exchange(request), 413, "32 MiB", "--max-body-mib")


def test_body_limit_can_be_set() -> None:
    with running_server("--max-body-mib", "1") as server:
        assert_refused(server.post({"prompt": "x" * 2**20}), 413, "1 MiB")
        assert server.text(**ASKED) == ANSWER


def test_failure_in_mid_stream_closes_without_the_last_chunk(scripted: Server) -> None:
    response = scripted.post({"prompt": "!fail=3 x", "stream": True})
    assert response.status == 200
    assert not response.is_complete
    assert len(response.chunks) == 3
    assert b"\r\n0\r\n" not in response.raw
    assert scripted.get("/health").status == 200


def test_failure_before_the_first_message_is_500(scripted: Server) -> None:
    assert_refused(scripted.post({"prompt": "!fail=0 x", "stream": True}), 500, "failed")


def test_failure_without_stream_is_500(scripted: Server) -> None:
    assert_refused(scripted.post({"prompt": "!fail=3 x"}), 500, "failed")


def test_health_is_200_with_an_empty_body(server: Server) -> None:
    response = server.get("/health")
    assert (response.status, response.body, response.headers["content-length"]) == (200, b"", "0")


def test_metrics_are_prometheus_text(server: Server) -> None:
    response = server.get("/metrics")
    assert response.status == 200
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert b"# TYPE vllm_lite:num_requests_running gauge\n" in response.body
    assert b"# TYPE vllm_lite:num_preemptions_total counter\n" in response.body
    metrics = server.metrics()
    assert metrics["num_requests_running"] == metrics["num_requests_waiting"] == 0
    assert metrics["num_free_kv_blocks"] == metrics["num_total_kv_blocks"] > 0
    assert {"num_preemptions_total", "num_requests_aborted_total"} <= set(metrics)


@pytest.mark.parametrize("path", ["/", "/v1/models", "/generate/", "/favicon.ico"])
def test_unknown_path_is_404(server: Server, path: str) -> None:
    assert_refused(server.get(path), 404, path)


@pytest.mark.parametrize(
    "method, path, allowed",
    [
        ("GET", "/generate", "POST"),
        ("PUT", "/generate", "POST"),
        ("POST", "/health", "GET"),
        ("POST", "/metrics", "GET"),
    ],
)
def test_wrong_method_is_405(server: Server, method: str, path: str, allowed: str) -> None:
    response = server.exchange(request_bytes(method, path, b""))
    assert_refused(response, 405, method)
    assert allowed in response.headers["allow"]


def test_garbage_is_400_and_leaves_no_traceback(server: Server) -> None:
    assert server.exchange(b"garbage\r\n\r\n").status == 400
    assert_refused(server.exchange(request_bytes("POST", "/generate", b"zz", "Content-Encoding: gzip")), 400, "body")
    assert "Traceback" not in server.log


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "GZip", "identity, gzip", "made-up"])
def test_compressed_body_is_refused(server: Server, encoding: str) -> None:
    assert_refused(server.post(gzip.compress(b"x"), f"Content-Encoding: {encoding}"), 400, "Content-Encoding", encoding)
    assert server.post(ASKED, "Content-Encoding: identity").json() == {"text": [reference(server)]}


@pytest.mark.parametrize("path, status", [("/generate", 400), ("/nothing", 404)])
def test_bomb_is_not_inflated_even_where_nobody_reads_it(scripted: Server, path: str, status: int) -> None:
    bomb = request_bytes("POST", path, GIBIBYTE_OF_ZEROS, "Content-Encoding: gzip", "Connection: keep-alive")
    with scripted.connect() as connection:
        start = time.monotonic()
        for _ in range(10):
            connection.sendall(bomb)
            assert read_response(connection).status == status
        assert time.monotonic() - start < 3  # inflating takes about a second for each


def test_pages_of_other_sites_are_refused(server: Server) -> None:
    host = f"Host: localhost:{server.port}"
    for origin in (
        "http://evil.example",
        "null",
        f"https://localhost:{server.port}",
        "http://localhost",
        "http://e\xff",
    ):
        assert_refused(server.post(ASKED, host, f"Origin: {origin}"), 403, "--allowed-origins")
        assert_refused(server.get("/metrics", host, f"Origin: {origin}"), 403)
    assert server.post(ASKED, host, f"Origin: http://localhost:{server.port}").status == 200
    assert server.post(ASKED, "Host: localhost", "Origin: http://LOCALHOST:80").status == 200
    for own in ("127.0.0.1:8000", "[::1]:8000", "[::1]", "192.0.2.1"):
        assert server.post(ASKED, f"Host: {own}", f"Origin: http://{own}").status == 200
    assert server.post(ASKED, "Host: tunnel.example").status == 200


@pytest.mark.parametrize("name", ["evil.example:8000", "evil.example", "127.0.0.1.evil.example", "localhost.evil:8000"])
def test_a_name_that_was_made_to_point_here_is_foreign(server: Server, name: str) -> None:
    """DNS rebinding: the page's own name has become this machine's, so Origin and Host agree."""
    assert_refused(server.post(ASKED, f"Host: {name}", f"Origin: http://{name}"), 403, "--allowed-origins")


@pytest.mark.parametrize("allowed", ["http://a.example,https://b.example:8443/", "*"])
def test_allowed_origins(allowed: str) -> None:
    with running_server("--allowed-origins", allowed) as server:
        for origin in ("http://a.example", "https://b.example:8443"):
            assert server.post(ASKED, f"Origin: {origin}").status == 200
        assert server.post(ASKED, "Origin: http://c.example").status == (200 if allowed == "*" else 403)


def test_a_connection_serves_many_requests(server: Server) -> None:
    with server.connect() as connection:
        for fields in (ASKED, STREAMED, {"prompt": 5}, ASKED):
            connection.sendall(generate_bytes(fields, "Connection: keep-alive"))
            response = read_response(connection)
            assert response.is_complete
        assert response.json() == {"text": [reference(server)]}


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
def test_http_1_0_streams_until_the_connection_closes(server: Server, connection: str) -> None:
    request = generate_bytes(STREAMED, f"Connection: {connection}").replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    response = server.exchange(request)
    assert "transfer-encoding" not in response.headers
    assert response.messages()[-1] == reference(server)


def test_many_connections_at_once_are_all_accepted(scripted: Server) -> None:
    """The server is stopped meanwhile, so that all of them have to wait in the backlog."""
    connections = []
    try:
        for _ in range(300):
            connections.append(socket.create_connection(("127.0.0.1", scripted.port), timeout=30))
        for connection in connections:
            connection.sendall(generate_bytes(ASKED))
        assert all(read_response(connection).status == 200 for connection in connections)
    finally:
        for connection in connections:
            connection.close()
