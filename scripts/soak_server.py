"""A server process as the soak sees it: its log line by line, its metrics, its memory, and its end. Linux.

Knows nothing of requests but the lines that the log has of them.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scripts.soak_checks import Line, parse_line
from tests.helpers.server import REAL, Server, running_server

PROC = Path("/proc")
TROUBLE = re.compile(r"^Traceback| (?:ERROR|CRITICAL) ")
MAX_TROUBLE = 5
STOP_BEYOND_GRACE_S = 15.0
"""How much longer than its grace a server may take to end."""
NOTICE_S = 10.0
"""Within which a server says that it stops."""
POLL_S = 0.02
TAIL_BYTES = 2**16


@dataclass(frozen=True)
class Resources:
    """What a process has."""

    rss_kib: int
    num_fds: int
    num_threads: int


def resources(process_id: int) -> Resources:
    """Of a process that runs."""
    folder = PROC / str(process_id)
    status = (folder / "status").read_text()
    found = {name: int(value) for name, value in re.findall(r"^(VmRSS|Threads):\s+(\d+)", status, re.MULTILINE)}
    return Resources(found["VmRSS"], len(os.listdir(folder / "fd")), found["Threads"])


def session_members(session_id: int) -> list[int]:
    """The processes of a session: a server that was started in one of its own, and its children."""
    members = []
    for folder in PROC.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            stat = (folder / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        state, _, _, session = stat.rpartition(") ")[2].split()[:4]
        if int(session) == session_id and state != "Z":
            members.append(int(folder.name))
    return members


def is_port_free(port: int) -> bool:
    """Whether a server can listen there at once."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
            sock.listen()
        except OSError:
            return False
    return True


@dataclass(frozen=True)
class LifeOptions:
    """What is different about one life of the server."""

    name: str
    grace_s: float = 120.0
    """Enough for all that run and wait, with a real model on a busy machine, where it is not meant to be little."""
    timeout_s: float | None = None

    @property
    def has_little_grace(self) -> bool:
        """Whether requests may be ended before they are done when it stops."""
        return self.grace_s < 1

    def flags(self) -> list[str]:
        """As a command line."""
        flags = ["--shutdown-grace-s", str(self.grace_s)]
        return flags if self.timeout_s is None else [*flags, "--request-timeout-s", str(self.timeout_s)]


class Life:
    """A server from its start to its end."""

    def __init__(self, server: Server, options: LifeOptions) -> None:
        self.server = server
        self.options = options
        self.start_s = time.monotonic()
        self.lines: list[Line] = []
        self.lines_of: defaultdict[str, list[Line]] = defaultdict(list)
        """By the client's id."""
        self.trouble: list[str] = []
        """What the log has of tracebacks and errors, and of requests that ended in no known way."""
        self.is_stopping = False
        """Whether the server has been told to stop."""
        self.samples: list[dict[str, Any]] = []
        self._log_bytes = 0

    @property
    def process_id(self) -> int:
        """The server's."""
        return self.server.process.pid

    def note(self, label: str, now: Resources) -> None:
        """Takes note of what the process has now."""
        self.samples.append({"s": round(time.monotonic() - self.start_s, 2), "at": label, **asdict(now)})

    def read_log(self) -> None:
        """Takes in what the log has got since the last time."""
        with self.server.log_path.open("rb") as log:
            log.seek(self._log_bytes)
            data = log.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._log_bytes += len(whole)
        for text in whole.decode(errors="replace").splitlines():
            line = parse_line(text)
            if line is not None:
                self.lines.append(line)
                if line.client_id is not None:
                    self.lines_of[line.client_id].append(line)
            is_trouble = TROUBLE.search(text) if line is None else line.is_odd
            if is_trouble and len(self.trouble) < MAX_TROUBLE:
                self.trouble.append(text)

    def tell_to_stop(self) -> None:
        """Sends SIGTERM."""
        self.is_stopping = True
        self.server.signal(signal.SIGTERM)

    def says_that_it_stops(self) -> bool:
        """Waits until the log says so; False where it does not in time."""
        end_s = time.monotonic() + NOTICE_S
        while b" stopping: " not in self._end_of_log():
            if time.monotonic() > end_s:
                return False
            time.sleep(POLL_S)
        return True

    def _end_of_log(self) -> bytes:
        with self.server.log_path.open("rb") as log:
            log.seek(max(0, self.server.log_path.stat().st_size - TAIL_BYTES))
            return log.read()

    def takes_new_ones(self) -> bool:
        """Whether a new connection is served."""
        try:
            with socket.create_connection(("127.0.0.1", self.server.port), timeout=NOTICE_S) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
                return connection.recv(12).endswith(b"200")
        except OSError:
            return False

    def wrong_end(self) -> list[str]:
        """Waits for the process, and says what it has left behind."""
        try:
            code = self.server.wait(self.options.grace_s + STOP_BEYOND_GRACE_S)
        except subprocess.TimeoutExpired:
            return [f"the server did not end within {self.options.grace_s:g} + {STOP_BEYOND_GRACE_S:g} s after SIGTERM"]
        wrong = [] if code == 0 else [f"the server exited with {code} after SIGTERM"]
        if not is_port_free(self.server.port):
            wrong.append(f"port {self.server.port} is not free after the server's end")
        if members := session_members(self.process_id):
            wrong.append(f"the server left processes behind: {members}")
        return wrong


@contextmanager
def living(flags: Sequence[str], options: LifeOptions) -> Iterator[Life]:
    """Starts a server, and ends it whatever happens."""
    with running_server(*flags, *options.flags(), module=REAL) as server:
        yield Life(server, options)
