"""A small server of OpenAI's completions on a thread: answers every prompt with the same word, token by token."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "fake-model"


@dataclass
class FakeOpenAI:
    """`missing` tokens are left out of each answer; without `counts_tokens` no usage is sent."""

    port: int = 0
    counts_tokens: bool = True
    missing: int = 0
    requests: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def running_openai_server(**options: Any) -> Iterator[FakeOpenAI]:
    fake = FakeOpenAI(**options)

    class Handler(_Handler):
        server_state = fake

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fake.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_state: FakeOpenAI

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._send_json(200, {"data": [{"id": MODEL}]} if self.path == "/v1/models" else {"data": []})

    def do_POST(self) -> None:
        fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server_state.requests.append(fields)
        if self.path != "/v1/completions" or fields["model"] != MODEL:
            self._send_json(404, {"error": "no such model"})
            return
        num_tokens = fields["max_tokens"] - self.server_state.missing
        usage = {"completion_tokens": num_tokens}
        if not fields["stream"]:
            self._send_json(200, {"choices": [{"text": " word" * num_tokens}], "usage": usage})
            return
        events: list[dict[str, Any]] = [{"choices": [{"text": " word"}]}] * num_tokens
        events = [*events, {"choices": [{"text": "", "finish_reason": "length"}]}]
        if self.server_state.counts_tokens:
            events.append({"choices": [], "usage": usage})
        self._send_events(events)

    def _send_json(self, status: int, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_events(self, events: list[dict[str, Any]]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for data in [*map(json.dumps, events), "[DONE]"]:
            event = f": a comment\n\ndata: {data}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
        self.wfile.write(b"0\r\n\r\n")
