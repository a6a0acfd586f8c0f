"""The soak's clients: raw HTTP over asyncio, with all the ways to behave badly. Knows nothing of what is right.

Every wait has an end, so a server that hangs is an outcome like any other.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import Literal

from scripts.soak_requests import Visit

Outcome = Literal["answered", "cut", "lost", "left", "hung", "no connection"]
HANG_S = 180.0
"""A client that has waited for so long says that the server hangs: a real model on a busy machine takes a minute."""
READ_BYTES = 2**16
SMALL_BUFFER = 4096
"""Of the socket of a client that reads slowly or not at all."""
MAX_LINE = 2**16
LEAVE_WITHIN_S = 0.25
"""How long the most patient client waits before it leaves without an answer."""
LEAVE_AFTER_MESSAGES = 40


@dataclass
class Result:
    """What a client has seen."""

    visit: Visit
    request_id: str
    outcome: Outcome
    """Answered: to its end; cut: it ended before that; lost: no byte came; left: the client went."""
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    begin_s: float = 0.0
    end_s: float = 0.0
    """Monotonic seconds."""


class Connection:
    """One connection, for one request after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, host: str, port: int, *, is_narrow: bool = False) -> Connection:
        """Raises OSError. A narrow one takes few bytes that nobody reads."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if is_narrow:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
            await asyncio.wait_for(asyncio.get_running_loop().sock_connect(sock, (host, port)), HANG_S)
            return cls(*await asyncio.open_connection(sock=sock, limit=SMALL_BUFFER if is_narrow else MAX_LINE))
        except BaseException:
            sock.close()
            raise

    def close(self, *, is_reset: bool = False) -> None:
        """At once: unread bytes are dropped."""
        if is_reset:
            sock = self.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


class Body:
    """Takes an answer as it comes and finds its end."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.data = bytearray()
        self.is_complete = False
        self._raw = bytearray()
        self._length: int | None = None
        self._is_chunked = False

    def feed(self, data: bytes) -> None:
        """The next bytes. Raises ValueError for what is no HTTP."""
        self._raw += data
        if not self.status and not self._take_head():
            return
        if self._is_chunked:
            self._take_chunks()
        else:
            self.data += self._raw
            self._raw.clear()
            self.is_complete = self._length is not None and len(self.data) >= self._length

    def _take_head(self) -> bool:
        head, separator, rest = self._raw.partition(b"\r\n\r\n")
        if not separator:
            return False
        status_line, *lines = head.decode("latin-1").split("\r\n")
        if not (found := re.match(r"HTTP/1\.1 ([0-9]{3}) ", status_line)):
            raise ValueError(f"an answer begins with {status_line[:80]!r}")
        self.status = int(found[1])
        self.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        self._is_chunked = self.headers.get("transfer-encoding") == "chunked"
        if "content-length" in self.headers:
            self._length = int(self.headers["content-length"])
        self._raw = rest
        return True

    def _take_chunks(self) -> None:
        position = 0
        while not self.is_complete and (end := self._raw.find(b"\r\n", position)) >= 0:
            size = int(self._raw[position:end], 16)
            if len(self._raw) < end + size + 4:
                break
            self.data += self._raw[end + 2 : end + 2 + size]
            position = end + size + 4
            self.is_complete = size == 0
        del self._raw[:position]


def head_of(visit: Visit, request_id: str) -> bytes:
    """The head of its request."""
    method = "GET" if visit.way == "other route" else "POST"
    lines = [f"{method} {visit.path} HTTP/1.1", "Host: 127.0.0.1", f"X-Request-Id: {request_id}"]
    if method == "POST":
        lines.append(f"Content-Length: {len(visit.body)}")
    if not visit.keeps_connection:
        lines.append("Connection: close")
    return "\r\n".join([*lines, "", ""]).encode()


class Client:
    """One client, who makes one visit after the other and may keep its connection."""

    def __init__(self, host: str, port: int, hurry: asyncio.Event, stall_s: float) -> None:
        """Clients that read slowly stop doing so when `hurry` is set; `stall_s` is how long they do not read at all."""
        self._host = host
        self._port = port
        self._hurry = hurry
        self._stall_s = stall_s
        self._kept: Connection | None = None

    def close(self) -> None:
        """Lets go of the connection that was kept."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    async def make(self, visit: Visit, request_id: str) -> Result:
        """A visit from its connection to its end."""
        begin_s = time.monotonic()
        body = Body()
        connection: Connection | None = None
        try:
            connection = await self._connection(visit)
            outcome = await asyncio.wait_for(self._behave(connection, visit, request_id, body), HANG_S)
        except asyncio.TimeoutError:
            outcome = "hung"
        except OSError:
            outcome = "no connection" if connection is None else "cut" if body.status else "lost"
        if connection is not None:
            may_keep = visit.keeps_connection and body.headers.get("connection", "").lower() != "close"
            if outcome == "answered" and may_keep and visit.way in ("read", "malformed", "too long", "other route"):
                self._kept = connection
            else:
                connection.close(is_reset=visit.is_reset and outcome == "left")
        data, end_s = bytes(body.data), time.monotonic()
        return Result(visit, request_id, outcome, body.status, body.headers, data, begin_s, end_s)

    async def _connection(self, visit: Visit) -> Connection:
        is_narrow = visit.way in ("read slowly", "stop reading")
        kept, self._kept = self._kept, None
        if kept is not None:
            if not is_narrow:
                return kept
            kept.close()
        return await Connection.open(self._host, self._port, is_narrow=is_narrow)

    async def _behave(self, connection: Connection, visit: Visit, request_id: str, body: Body) -> Outcome:
        data = head_of(visit, request_id) + visit.body * (visit.way != "other route")
        if visit.way == "leave in the body":
            data = data[: len(data) - 1 - int(visit.patience * (len(visit.body) - 1))]
        connection.writer.write(data)
        try:
            await connection.writer.drain()
        except ConnectionError:  # refused before the last byte was sent: the answer may be there
            if visit.way != "too large":
                raise
        if visit.way in ("leave before the answer", "leave in the body"):
            return await self._leave(connection, body, visit.patience * LEAVE_WITHIN_S)
        if visit.way == "half-close":
            connection.writer.write_eof()
        if visit.way == "leave the stream":
            return await _read(connection, body, max_messages=1 + int(visit.patience * LEAVE_AFTER_MESSAGES))
        if visit.way == "read slowly":
            return await self._read_slowly(connection, body, visit.patience)
        if visit.way == "stop reading":
            return await self._stop_reading(connection, body)
        return await _read(connection, body)

    async def _leave(self, connection: Connection, body: Body, after_s: float) -> Outcome:
        try:
            return await asyncio.wait_for(_read(connection, body), after_s)
        except asyncio.TimeoutError:
            return "left"

    async def _read_slowly(self, connection: Connection, body: Body, patience: float) -> Outcome:
        while not body.is_complete:
            data = await connection.reader.read(256 + int(1000 * patience))
            if not data:
                return _ended(body)
            body.feed(data)
            await self._dawdle(0.005 * patience)
        return "answered"

    async def _stop_reading(self, connection: Connection, body: Body) -> Outcome:
        body.feed(await connection.reader.read(SMALL_BUFFER))
        await asyncio.sleep(self._stall_s)
        return await _read(connection, body)

    async def _dawdle(self, seconds: float) -> None:
        if not self._hurry.is_set():
            try:
                await asyncio.wait_for(self._hurry.wait(), seconds)
            except asyncio.TimeoutError:
                return


async def _read(connection: Connection, body: Body, *, max_messages: int | None = None) -> Outcome:
    """Reads to the end, or until there are so many messages."""
    while not body.is_complete:
        if max_messages is not None and body.data.count(0) >= max_messages:
            return "left"
        data = await connection.reader.read(READ_BYTES)
        if not data:
            return _ended(body)
        body.feed(data)
    return "answered"


def _ended(body: Body) -> Outcome:
    """What an end of the connection means."""
    return "cut" if body.status else "lost"
