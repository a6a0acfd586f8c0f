"""What breaks in a server and around it, one by one, on the real engine in a process of its own (cases F1, H7, O2)."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from typing import Any

import pytest

from tests.entrypoints.test_lifecycle import wait_for_requests
from tests.entrypoints.test_native_protocol import assert_refused
from tests.helpers.checkpoints import cached_checkpoint
from tests.helpers.server import Server, generate_bytes, read_response, running_server

FAULTY = "tests.helpers.faulty_server"
CONTEXT = 8192
LONG: dict[str, Any] = {
    "prompt": "a b",
    "max_tokens": 4000,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
    "stream_deltas": True,
}


def flags(*more: str) -> list[str]:
    return ["--model", str(cached_checkpoint(max_position_embeddings=CONTEXT)), "--num-kv-blocks", "1200", *more]


def open_stream(server: Server, **fields: Any) -> socket.socket:
    """A connection whose stream has begun."""
    connection = server.connect()
    connection.sendall(generate_bytes({**LONG, **fields}))
    assert connection.recv(1, socket.MSG_PEEK)
    return connection


def wait_for_metric(server: Server, name: str, value: float) -> None:
    deadline = time.monotonic() + 10
    while server.metrics()[name] != value:
        assert time.monotonic() < deadline, server.metrics()
        time.sleep(0.01)


def assert_no_process_left(server: Server) -> None:
    """Of those that the server has started, and of itself: its process group is empty."""
    with pytest.raises(ProcessLookupError):
        os.killpg(server.process.pid, 0)


# A step that does not end


def test_a_step_that_hangs_ends_its_clients_then_health_then_the_process() -> None:
    with running_server(*flags("--watchdog-s", "1.5"), module=FAULTY) as server:
        with open_stream(server) as stream, server.connect() as leaver, server.connect() as poisoned:
            poisoned.sendall(generate_bytes({"prompt": "poison !sleep"}))
            wait_for_requests(server, 2)
            leaver.sendall(generate_bytes(LONG))
            wait_for_requests(server, 3)
            leaver.close()  # is noticed although nothing is computed
            wait_for_metric(server, "num_requests_aborted_total", 1)
            assert server.get("/health").status == 200
            assert_refused(read_response(poisoned), 503, "1.5 s", "--watchdog-s")
            cut = read_response(stream)
            assert cut.status == 200 and not cut.is_complete
        assert_refused(server.get("/health"), 503, "restart")
        assert_refused(server.post({"prompt": "a"}), 503, "--watchdog-s")
        assert server.wait(10) == 1
        [line] = [line for line in server.log.splitlines() if "declared dead" in line]
        assert "ERROR" in line and "1.5 s (--watchdog-s)" in line
        assert "Traceback" not in server.log
        assert_no_process_left(server)


def test_a_step_that_hangs_while_the_server_stops_does_not_hold_the_exit() -> None:
    """Its requests have been ended by then: nobody but the watchdog is left to notice."""
    with running_server(*flags("--watchdog-s", "2", "--shutdown-grace-s", "0.2"), module=FAULTY) as server:
        with open_stream(server) as stream, server.connect() as poisoned:
            poisoned.sendall(generate_bytes({"prompt": "poison !lock"}))
            wait_for_requests(server, 2)
            server.signal(signal.SIGTERM)
            start = time.monotonic()
            assert_refused(read_response(poisoned), 503, "stopping")
            assert read_response(stream).is_complete
            assert server.wait(10) == 1
            assert 1 < time.monotonic() - start < 6
        assert re.search("ERROR .* 2 s .--watchdog-s.: the engine is declared dead", server.log)
        assert_no_process_left(server)
