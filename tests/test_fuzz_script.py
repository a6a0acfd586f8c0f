"""scripts/fuzz.py: a real server stands it, and faults that a server might have are found."""

from __future__ import annotations

import ast
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from scripts import fuzz
from scripts.bench.client import Address
from scripts.fuzz_cases import Case, Cases
from tests.helpers.json_schema import allows
from vllm_lite.chat_template import ChatTemplate
from vllm_lite.config import EngineConfig, ServerConfig
from vllm_lite.entrypoints.native.openapi import openapi_document, request_schema
from vllm_lite.entrypoints.native.request_body import parse_generate_request
from vllm_lite.entrypoints.openai.chat_request import parse_chat_request
from vllm_lite.entrypoints.openai.completion_request import parse_completion_request
from vllm_lite.entrypoints.openai.openapi import chat_schema, completion_schema

NATIVE = {"/generate": request_schema(EngineConfig())}
OPENAI = {
    "/v1/completions": completion_schema(EngineConfig(), ServerConfig()),
    "/v1/chat/completions": chat_schema(EngineConfig()),
}
TEMPLATE = ChatTemplate("", lambda conversation, **_: "x", {})
METRICS = """\
vllm_lite:num_requests_running 0.0
vllm_lite:num_requests_waiting 0.0
vllm_lite:num_free_kv_blocks{model="a"} %s
vllm_lite:num_total_kv_blocks 8.0
"""


@pytest.mark.parametrize(("flags", "num_requests"), [([], 500), (["--openai"], 200)])
def test_a_real_server_stands_it(flags: list[str], num_requests: int, capsys: pytest.CaptureFixture[str]) -> None:
    exit_code = fuzz.main([*flags, "--requests", str(num_requests), "--seed", "1"])
    printed = capsys.readouterr().out
    assert exit_code == 0, printed
    assert f"{num_requests} requests of seed 1" in printed
    head, *_, total = printed.partition(f"\n{num_requests} requests")[0].splitlines()
    counts = dict(zip(head.split(), map(int, total.split()[1:])))
    assert sum(counts.values()) == num_requests
    assert counts["200"] > num_requests / 5 and counts["400"] > num_requests * 0.3
    assert counts["413"] > 3 and counts["left"] > num_requests / 50


def test_cases_depend_on_seed_and_number_alone_and_valid_ones_are() -> None:
    schema = request_schema(EngineConfig())
    cases = [Cases(NATIVE, 3).make(number) for number in range(400)]
    assert [Cases(NATIVE, 3).make(number) for number in reversed(range(400))] == cases[::-1]
    assert [Cases(NATIVE, 4).make(number) for number in range(400)] != cases
    bodies = [case.data.partition(b"\r\n\r\n")[2] for case in cases if case.kind in ("valid", "leaving")]
    assert len(bodies) > 50
    for body in bodies:
        parse_generate_request(body)
        assert allows(schema, json.loads(body))
    used = {name for body in bodies for name in json.loads(body)}
    assert set(schema["properties"]) - used == {"best_of", "prefix_pos"}


@pytest.mark.parametrize("path", list(OPENAI))
def test_valid_cases_of_the_openai_protocol_are(path: str) -> None:
    cases = [Cases({path: OPENAI[path]}, 3).make(number) for number in range(1000)]
    assert all(case.data.startswith(f"POST {path} ".encode()) for case in cases if case.kind in ("valid", "nested"))
    bodies = [case.data.partition(b"\r\n\r\n")[2] for case in cases if case.kind in ("valid", "leaving")]
    assert len(bodies) > 100
    for body in bodies:
        if path.endswith("/chat/completions"):
            parse_chat_request(body).chat.rendered(TEMPLATE)
        else:
            parse_completion_request(body, ServerConfig().max_waiting_requests)
        assert allows(OPENAI[path], json.loads(body))
    used = {name for body in bodies for name in json.loads(body)}
    assert set(OPENAI[path]["properties"]) - used == {"best_of", "model"}


@contextmanager
def faulty_server(*, answer: bytes = b"", free_blocks: int = 8, health: int = 200) -> Iterator[Address]:
    """Whatever is posted, it sends these bytes and closes the connection; without any it never answers."""
    is_over = threading.Event()
    pages = {
        "/openapi.json": json.dumps(openapi_document(EngineConfig(), ServerConfig())),
        "/metrics": METRICS % free_blocks,
        "/health": "",
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(health if self.path == "/health" else 200)
            self.end_headers()
            self.wfile.write(pages[self.path].encode())

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            if not answer:
                is_over.wait(60)
            self.wfile.write(answer)

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield Address("127.0.0.1", server.server_port)
        finally:
            is_over.set()
            server.shutdown()
            thread.join()


def number_of(kind: str) -> int:
    cases = Cases(NATIVE, 0)
    return next(number for number in range(1000) if cases.make(number).kind == kind)


def answer(status: str, body: bytes) -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status.encode(), len(body), body)


@pytest.mark.parametrize(
    "sent, kind, message",
    [
        (answer("500 Oops", b'{"detail":"x"}'), "valid", "answered 500"),
        (answer("503 Oops", b'{"detail":"x"}'), "broken JSON", "answered 503"),
        (answer("200 OK", b"{}"), "unknown field", "answered 200, expected 400"),
        (answer("400 No", b'{"detail":"x"}'), "valid", "answered 400, expected 200"),
        (answer("400 No", b"what?"), "unknown field", "answered 400 in a way that cannot be read"),
        (
            answer("400 No", b'{"detail":["x"]}'),
            "unknown field",
            "answered 400 with what is no failure of the document",
        ),
        (answer("200 OK", b"{}")[:-1], "valid", "answered 200 in a way that cannot be read"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n", "valid", "in a way that cannot be read"),
        (b"\r\n", "valid", "closed without an answer, expected 200"),
        (b"", "valid", "the connection did not end within 0.3 s"),
    ],
)
def test_a_fault_is_found_and_printed(sent: bytes, kind: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    number = number_of(kind)
    with faulty_server(answer=sent) as address:
        words = ["--port", str(address.port), "--only", str(number), "--timeout", "0.3" if not sent else "30"]
        assert fuzz.main(words) == 1
    printed = capsys.readouterr().out
    assert f"request {number} of seed 0 ({kind}): " in printed
    assert message in printed
    assert "1 findings" in printed
    data = ast.literal_eval(printed.splitlines()[-1].strip())
    assert data == Cases(NATIVE, 0).make(number).data


@pytest.mark.parametrize(
    "free_blocks, health, message",
    [(7, 200, "something is left"), (8, 503, "/health says 503 at the end"), (8, 200, None)],
)
def test_what_is_left_at_the_end_is_found(
    free_blocks: int, health: int, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzz, "IDLE_WITHIN_S", 0.2)
    with faulty_server(free_blocks=free_blocks, health=health) as address:
        found = fuzz.leftovers(address)
    assert [message in finding for finding in found] == [True] if message else found == []


def test_a_server_that_is_gone_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    with faulty_server() as address:
        pass
    assert fuzz.main(["--port", str(address.port)]) == 1
    assert "no /openapi.json" in capsys.readouterr().err
    assert "nobody answers" in str(fuzz.run_case(address, Case("valid", b"x", None), {}, 1.0))
    assert "does not answer at the end" in fuzz.leftovers(address)[0]


def test_many_bytes_are_kept_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = b"x" * (fuzz.MAX_PRINTED_BYTES + 1)
    assert "fuzz-5-6.bin" in fuzz.describe(6, 5, Case("valid", data, None), "answered 500")
    assert (tmp_path / "fuzz-5-6.bin").read_bytes() == data
