"""An HTTP client that takes as little of the measured server's cores as it can: it notes when bytes come.

What they mean is worked out when all of them are there. Every request has a connection of its own.
"""

from __future__ import annotations

import bisect
import itertools
import json
import re
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

TIMEOUT_S = 600
RECEIVE_BYTES = 2**18

TimedBytes = list[tuple[float, bytes]]
"""Bytes, each piece with the time in seconds since the start at which it had come."""


@dataclass(frozen=True)
class Address:
    """Where a server listens, the path that its URLs begin with, and the key that it asks for."""

    host: str
    port: int
    prefix: str = ""
    api_key: str | None = field(default=None, repr=False)

    def headers(self) -> dict[str, str]:
        """Of every request with a JSON body."""
        key = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        return {"Content-Type": "application/json", **key}


@dataclass
class Response:
    """What came over one connection until the server closed it."""

    received: TimedBytes = field(default_factory=list)

    @property
    def end_s(self) -> float:
        """When the last byte had come."""
        return self.received[-1][0] if self.received else 0.0

    def body(self) -> TimedBytes:
        """The body, chunk by chunk where it has chunks. Raises RuntimeError for an error status or a cut answer."""
        raw = b"".join(data for _, data in self.received)
        head, separator, _ = raw.partition(b"\r\n\r\n")
        if not separator:
            raise RuntimeError(f"the server closed the connection after {raw[:200]!r}")
        status_line, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        start = len(head) + len(separator)
        version, _, status = status_line.partition(" ")
        if not version.startswith("HTTP/"):
            raise RuntimeError(f"the server does not speak HTTP, it answered {status_line[:200]!r}")
        if status.partition(" ")[0] != "200":
            raise RuntimeError(f"the server answered {status_line!r}: {raw[start:][:500].decode(errors='replace')}")
        if headers.get("transfer-encoding", "").lower() == "chunked":
            return self._chunks(raw, start)
        if len(raw) - start != int(headers.get("content-length", len(raw) - start)):
            raise RuntimeError(f"the answer ends after {len(raw) - start} of {headers['content-length']} bytes")
        return self._pieces(start)

    def _pieces(self, start: int) -> TimedBytes:
        pieces: TimedBytes = []
        for time_s, data in self.received:
            if len(data) > start:
                pieces.append((time_s, data[start:]))
            start = max(0, start - len(data))
        return pieces

    def _chunks(self, raw: bytes, position: int) -> TimedBytes:
        ends = list(itertools.accumulate(len(data) for _, data in self.received))
        chunks: TimedBytes = []
        while True:
            line_end = raw.find(b"\r\n", position)
            size = _chunk_size(raw[position:line_end]) if line_end >= 0 else 0
            start, position = line_end + 2, line_end + 2 + size + 2
            if line_end < 0 or position > len(raw):
                raise RuntimeError("the server closed the connection in the middle of its answer")
            if size == 0:
                return chunks
            time_s, _ = self.received[bisect.bisect_left(ends, start + size)]
            chunks.append((time_s, raw[start : start + size]))


def _chunk_size(line: bytes) -> int:
    digits = line.split(b";")[0].strip()
    if not re.fullmatch(rb"[0-9a-fA-F]+", digits):
        raise RuntimeError(f"the server does not speak HTTP, it began a chunk with {line[:200]!r}")
    return int(digits, 16)


def split_messages(body: TimedBytes, delimiter: bytes) -> TimedBytes:
    """The messages of a stream, each with the time at which its end came. Raises RuntimeError for half a message."""
    messages: TimedBytes = []
    rest = b""
    for time_s, data in body:
        *whole, rest = (rest + data).split(delimiter)
        messages += [(time_s, message) for message in whole]
    if rest:
        raise RuntimeError(f"the stream ends in {rest[-200:]!r}")
    return messages


def post_bytes(address: Address, path: str, fields: dict[str, Any]) -> bytes:
    """A POST request with a JSON body, after which the server shall close the connection."""
    body = json.dumps(fields).encode()
    lines = [
        f"POST {address.prefix}{path} HTTP/1.1",
        f"Host: {address.host}:{address.port}",
        *(f"{name}: {value}" for name, value in address.headers().items()),
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def check_listening(address: Address, timeout_s: float) -> None:
    """Raises OSError that says so where nobody does."""
    try:
        socket.create_connection((address.host, address.port), timeout_s).close()
    except (OSError, UnicodeError) as error:
        raise OSError(no_answer(address, error)) from error


def no_answer(address: Address, error: Exception) -> str:
    """What to say of a server that cannot be reached."""
    return f"no answer from {address.host}:{address.port}: {error}; is the server running there?"


def exchange(address: Address, requests: Sequence[bytes], timeout_s: float = TIMEOUT_S) -> list[Response]:
    """Sends all requests at once and reads until every connection is closed. Raises TimeoutError."""
    responses = [Response() for _ in requests]
    start_s = time.perf_counter()
    with selectors.DefaultSelector() as selector:
        for request, response in zip(requests, responses):
            connection = socket.create_connection((address.host, address.port), timeout_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(request)
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_READ, response)
        try:
            _receive_all(selector, start_s, timeout_s)
        finally:
            for key in list(selector.get_map().values()):
                _connection(key).close()
    return responses


def _receive_all(selector: selectors.BaseSelector, start_s: float, timeout_s: float) -> None:
    while selector.get_map():
        ready = selector.select(timeout_s)
        if not ready:
            raise TimeoutError(f"the server sent nothing for {timeout_s} s")
        for key, _ in ready:
            connection = _connection(key)
            data = connection.recv(RECEIVE_BYTES)
            if data:
                key.data.received.append((time.perf_counter() - start_s, data))
            else:
                selector.unregister(connection)
                connection.close()


def _connection(key: selectors.SelectorKey) -> socket.socket:
    assert isinstance(key.fileobj, socket.socket)
    return key.fileobj
