"""Clients that keep a server busy, and waiting for what becomes of them, on either protocol."""

from __future__ import annotations

import socket
import time
from typing import Any

from tests.helpers.server import Server

ENDLESS: dict[str, Any] = {"prompt": "!delay=0.02 x", "max_tokens": 100_000}


def wait_for_requests(server: Server, count: int) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        metrics = server.metrics()
        if metrics["num_requests_running"] + metrics["num_requests_waiting"] == count:
            return
        time.sleep(0.01)
    raise AssertionError(f"never had {count} requests")


def wait_until_refused(port: int) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
        except ConnectionRefusedError:
            return
        time.sleep(0.01)
    raise AssertionError("the port is still open")


def reader_of_much(server: Server, **fields: Any) -> socket.socket:
    """A connection that has asked for more than the system's buffers hold, 100 KB a token, and has read nothing."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(server.request({"prompt": "a", "max_tokens": 200, **fields}))
    return connection


def wait_for_cut(server: Server, count: int) -> None:
    deadline = time.monotonic() + 10
    while server.log.count("the connection is cut") < count:
        assert time.monotonic() < deadline, server.log
        time.sleep(0.01)
