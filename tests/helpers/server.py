"""Server processes and a raw HTTP client for tests: real command lines, real sockets, 127.0.0.1 only.

Every wait is bounded: sockets have timeouts, and a process that does not get ready is killed by its id.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.helpers.doors import NATIVE, Door
from vllm_lite.config import API_KEY_VARIABLE

REAL = NATIVE.module
FAKE = "tests.helpers.fake_server"
"""The same server, on an engine that plays back a script."""
ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 180
"""Where two test processes compile the CPU kernels on two cores; a few seconds otherwise."""
SOCKET_TIMEOUT_S = 30


@dataclass
class Response:
    """A response as it came over the wire; `chunks` holds what each HTTP chunk carried."""

    status: int
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes
    chunks: list[bytes]
    is_complete: bool
    """Whether the body ended as its headers announced; where they announce nothing, in no reset."""
    raw: bytes
    door: Door = NATIVE

    def json(self) -> Any:
        return json.loads(self.body, parse_constant=_refuse_constant)

    def text(self) -> str:
        """Of the first candidate of a whole answer."""
        return self.door.text(self.json())

    def texts(self) -> list[str]:
        """Of the first candidate of a stream, as far as it has come after each message."""
        return self.door.texts(self.body)

    def failure(self) -> str:
        """What a failure says."""
        return self.door.failure(self.json())

    def messages(self, delimiter: bytes = b"\0") -> list[str]:
        """The text of each message of a stream with one candidate."""
        *messages, rest = self.body.split(delimiter)
        assert rest == b"", f"the stream ends in {rest[-80:]!r}"
        return [json.loads(message)["text"][0] for message in messages]


class Server:
    """A running server process."""

    def __init__(self, process: subprocess.Popen[str], url: str, log_path: Path, ready_line: str, door: Door) -> None:
        self.process = process
        self.url = url
        self.ready_line = ready_line
        self.door = door
        self.log_path = log_path
        self.port = int(url.rpartition(":")[2])

    @property
    def log(self) -> str:
        """What the process has written to stderr so far."""
        return self.log_path.read_text()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=SOCKET_TIMEOUT_S)

    def exchange(self, request: bytes) -> Response:
        """Sends bytes on a connection of their own and reads one response."""
        with self.connect() as connection:
            connection.sendall(request)
            return self.read(connection)

    def read(self, connection: socket.socket) -> Response:
        """The next response of a connection to this server."""
        return read_response(connection, self.door)

    def request(self, fields: dict[str, Any] | bytes, *headers: str) -> bytes:
        """A request to generate."""
        return generate_bytes(fields, *headers, path=self.door.path)

    def get(self, path: str, *headers: str) -> Response:
        return self.exchange(request_bytes("GET", path, b"", *headers))

    def post(self, fields: dict[str, Any] | bytes, *headers: str) -> Response:
        return self.exchange(self.request(fields, *headers))

    def text(self, **fields: Any) -> str:
        response = self.post(fields)
        assert response.status == 200, response.raw
        return response.text()

    def metrics(self) -> dict[str, float]:
        """The samples of `/metrics`, without the prefix of their names and the label of all, `model_name`."""
        families = text_string_to_metric_families(self.get("/metrics").body.decode())
        return {sample_name(sample): sample.value for family in families for sample in family.samples}

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = START_TIMEOUT_S) -> int:
        """The exit code."""
        return self.process.wait(timeout_s)


@contextmanager
def running_server(
    *flags: str,
    module: str = FAKE,
    script: dict[str, Any] | None = None,
    api_key: str | None = None,
    door: Door = NATIVE,
) -> Iterator[Server]:
    """Starts a server on a free port and ends it afterwards; `script` is for the fake engine alone.

    `module` is REAL, which stands for the door's own, or a server of the tests, which is told what to speak.
    `api_key` is what its environment has for the key: that of the developer's own servers is not passed on.
    """
    module = door.module if module == REAL else module
    command = [sys.executable, "-m", module, "--port", "0", *flags, *(() if module == door.module else door.test_flags)]
    if script is not None:
        command += ["--script", json.dumps(script)]
    with tempfile.TemporaryDirectory() as folder:
        log_path = Path(folder) / "stderr"
        with log_path.open("w") as log:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=_environment(api_key),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        watchdog = threading.Timer(START_TIMEOUT_S, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            ready_line = process.stdout.readline()
            watchdog.cancel()
            found = re.search(r"https?://[^ /]+", ready_line)
            assert found, f"no ready line but {ready_line!r}; log: {log_path.read_text()[-3000:]}"
            yield Server(process, found[0], log_path, ready_line, door)
        finally:
            watchdog.cancel()
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def run_server(*flags: str, module: str = REAL) -> subprocess.CompletedProcess[str]:
    """Runs a server that is expected to end by itself."""
    command = [sys.executable, "-m", module, *flags]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=_environment(None),
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )


def _environment(api_key: str | None) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name != API_KEY_VARIABLE}
    return own if api_key is None else {**own, API_KEY_VARIABLE: api_key}


def sample_name(sample: Sample) -> str:
    """A name and its labels, but for what all have."""
    labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items() if name != "model_name")
    return sample.name.removeprefix("vllm_lite:") + (f"{{{labels}}}" if labels else "")


def request_bytes(method: str, path: str, body: bytes, *headers: str) -> bytes:
    """A request that asks the server to close the connection afterwards, unless a header says otherwise."""
    lines = [f"{method} {path} HTTP/1.1", *headers]
    names = {header.partition(":")[0].lower() for header in headers}
    if "host" not in names:
        lines.append("Host: 127.0.0.1")
    if "connection" not in names:
        lines.append("Connection: close")
    if body and "transfer-encoding" not in names:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def generate_bytes(fields: dict[str, Any] | bytes, *headers: str, path: str = NATIVE.path) -> bytes:
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return request_bytes("POST", path, body, *headers)


class _Reader:
    """Reads from a socket and keeps everything it saw."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.raw = b""
        self.position = 0
        self.was_reset = False

    def until(self, end: bytes) -> bytes | None:
        """Bytes up to and without `end`; None where the connection ends before."""
        while (found := self.raw.find(end, self.position)) < 0:
            if not self._receive():
                return None
        piece, self.position = self.raw[self.position : found], found + len(end)
        return piece

    def exactly(self, count: int) -> bytes | None:
        while len(self.raw) - self.position < count:
            if not self._receive():
                return None
        piece, self.position = self.raw[self.position : self.position + count], self.position + count
        return piece

    def rest(self) -> bytes:
        while self._receive():
            pass
        piece, self.position = self.raw[self.position :], len(self.raw)
        return piece

    def _receive(self) -> bool:
        try:
            data = self._connection.recv(65536)
        except ConnectionResetError:
            self.was_reset = True
            return False
        self.raw += data
        return bool(data)


def read_response(connection: socket.socket, door: Door = NATIVE) -> Response:
    """Reads one response; one whose connection ends too early is not complete."""
    reader = _Reader(connection)
    head = reader.until(b"\r\n\r\n")
    assert head is not None, f"no response but {reader.raw!r}"
    status_line, *header_lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in header_lines)}
    chunks: list[bytes] = []
    body: bytes | None = b""
    if headers.get("transfer-encoding") == "chunked":
        is_complete = _read_chunks(reader, chunks)
        body = b"".join(chunks)
    elif "content-length" in headers:
        body = reader.exactly(int(headers["content-length"]))
        is_complete = body is not None
    else:
        body, is_complete = reader.rest(), not reader.was_reset
    return Response(int(status_line.split(" ")[1]), headers, body or b"", chunks, is_complete, reader.raw, door)


def _read_chunks(reader: _Reader, chunks: list[bytes]) -> bool:
    while (size := reader.until(b"\r\n")) is not None:
        chunk = reader.exactly(int(size, 16))
        if chunk is None or reader.exactly(2) != b"\r\n":
            return False
        if not chunk:
            return True
        chunks.append(chunk)
    return False


def _refuse_constant(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")


def assert_refused(response: Response, status: int, *words: str) -> None:
    """A JSON object of the protocol's shape, which holds all the words."""
    assert response.status == status, response.raw
    assert response.is_complete
    assert response.headers["content-type"] == "application/json"
    failure = response.failure()
    assert all(word in failure for word in words), failure
