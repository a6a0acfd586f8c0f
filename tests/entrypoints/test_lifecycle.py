"""Stopping and dying: signals, grace time, exit codes, ports; on a server process with a scripted engine."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.helpers.doors import NATIVE, OPENAI, Door, events
from tests.helpers.server import (
    FAKE,
    REAL,
    ROOT,
    Response,
    Server,
    request_bytes,
    run_server,
    running_server,
)
from tests.helpers.waiting import ENDLESS, wait_for_requests, wait_until_refused
from vllm_lite.entrypoints.listening import bind

SLOW: dict[str, Any] = {"prompt": "!delay=0.02 x", "max_tokens": 30}


@contextlib.contextmanager
def requests_in_flight(server: Server, *bodies: dict[str, Any]) -> Iterator[list[Future[Response]]]:
    """Sends requests from threads, and goes on once the engine has them all."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        futures = [pool.submit(server.post, body) for body in bodies]
        wait_for_requests(server, len(bodies))
        yield futures


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_lets_running_requests_finish(door: Door, number: signal.Signals) -> None:
    with running_server(door=door) as server, requests_in_flight(server, SLOW, {**SLOW, "stream": True}) as futures:
        server.signal(number)
        answer, stream = (future.result(30) for future in futures)
        assert answer.status == 200
        assert stream.is_complete
        assert stream.texts()[-1] == answer.text()
        assert len(stream.texts()) > SLOW["max_tokens"] / 2  # not every token has text
        assert server.wait() == 0
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", server.port))


def test_stopping_server_refuses_new_requests(door: Door) -> None:
    with running_server(door=door) as server, server.connect() as kept_alive:
        kept_alive.sendall(request_bytes("GET", "/health", b"", "Connection: keep-alive"))
        assert server.read(kept_alive).status == 200
        with requests_in_flight(server, {**SLOW, "stream": True}) as [stream]:
            server.signal(signal.SIGTERM)
            wait_until_refused(server.port)
            kept_alive.sendall(server.request(SLOW, "Connection: keep-alive"))
            refusal = server.read(kept_alive)
            assert refusal.status == 503
            assert refusal.failure()
            assert refusal.headers["connection"] == "close"
            assert kept_alive.recv(1) == b""
            assert stream.result(30).is_complete
        assert server.wait() == 0


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_reads_slowly_gets_the_end_of_its_answer_from_a_server_that_stops(
    door: Door, is_stream: bool
) -> None:
    """What the system does not take waits in the process, which must not end before it is sent."""
    fields: dict[str, Any] = {
        "prompt": "a",
        "max_tokens": 400,
        "stream": is_stream,
        **(door.deltas if is_stream else {}),
    }
    with running_server(script={"pieces": ["x" * 1000]}, door=door) as server, socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        reader.settimeout(30)
        reader.connect(("127.0.0.1", server.port))
        reader.sendall(server.request(fields))
        received = bytearray(reader.recv(4096))
        server.signal(signal.SIGTERM)
        while data := reader.recv(4096):
            received += data
            time.sleep(0.001)
        assert received.count(b"x" * 1000) == 400
        assert server.wait(10) == 0


def test_requests_beyond_the_grace_time_end_cleanly(door: Door) -> None:
    with running_server("--shutdown-grace-s", "0.3", "--max-num-seqs", "2", door=door) as server:
        bodies = [{**ENDLESS, "stream": True}, ENDLESS]
        with requests_in_flight(server, *bodies) as futures, ThreadPoolExecutor(1) as pool:
            queued = pool.submit(server.post, {**ENDLESS, "stream": True})
            wait_for_requests(server, 3)
            start = time.monotonic()
            server.signal(signal.SIGTERM)
            stream, answer = (future.result(30) for future in futures)
            assert server.wait() == 0
            assert 0.3 <= time.monotonic() - start < 5
            assert stream.texts()[-1]
            if door is NATIVE:
                assert stream.is_complete
            else:  # whose clients can be told that it is not the whole text
                assert not stream.is_complete
                assert "stopping" in OPENAI.failure(json.loads(events(stream.body)[-1]))
            for response in (answer, queued.result(30)):
                assert response.status == 503
                assert "stopping" in response.failure()
        assert "Traceback" not in server.log


def test_an_answer_of_several_candidates_that_is_cut_off_is_no_answer(door: Door) -> None:
    with running_server("--shutdown-grace-s", "0.1", door=door) as server:
        with requests_in_flight(server, {**ENDLESS, "n": 3}) as [answer]:
            server.signal(signal.SIGTERM)
            assert answer.result(30).status == 503
            assert server.wait() == 0
        assert ", abort x 3" in server.log


def test_stalled_reader_does_not_hold_the_exit(door: Door) -> None:
    with running_server("--shutdown-grace-s", "0.2", door=door) as server, server.connect() as stalled:
        stalled.sendall(server.request({"prompt": "x" * 100_000, "stream": True, "max_tokens": 100_000}))
        wait_for_requests(server, 1)
        start = time.monotonic()
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert time.monotonic() - start < 8


def test_second_signal_ends_at_once(door: Door) -> None:
    with running_server(door=door) as server, server.connect() as connection:
        connection.sendall(server.request({**ENDLESS, "stream": True}))
        received = connection.recv(65536)
        server.signal(signal.SIGTERM)
        wait_until_refused(server.port)
        server.signal(signal.SIGTERM)
        assert server.wait(5) == -signal.SIGTERM
        with contextlib.suppress(ConnectionResetError):
            while data := connection.recv(65536):
                received += data
        assert not received.endswith(b"\r\n0\r\n\r\n")


@pytest.mark.parametrize("module", ["torch", "aiohttp"])
def test_interrupt_while_modules_are_imported_ends_at_once(module: str) -> None:
    """The process interrupts itself as soon as it looks for the module."""
    start = f"""
import os, runpy, signal, sys
class Interrupt:
    def find_spec(self, name, *rest):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
runpy.run_module({REAL!r}, run_name="__main__")
"""
    result = subprocess.run([sys.executable, "-c", start], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGINT, "", "")


def test_dead_engine_ends_its_clients_then_health_then_the_process(door: Door) -> None:
    with (
        running_server(door=door) as server,
        requests_in_flight(server, {**ENDLESS, "stream": True}, ENDLESS) as futures,
    ):
        victim = server.post({"prompt": "!die=2 !delay=0.1 x"})
        stream, answer = (future.result(30) for future in futures)
        health = server.get("/health")
        for response in (victim, answer, health):
            assert response.status == 503
            assert response.failure()
        assert stream.status == 200
        assert not stream.is_complete
        assert server.post({"prompt": "a"}).status == 503
        assert server.wait(10) == 1
        assert "dead" in server.log


def test_port_of_a_server_that_still_loads_is_taken() -> None:
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        second = run_server("--port", str(port), module=FAKE)
    assert second.returncode == 1
    assert f"port {port} on 127.0.0.1 is taken" in second.stderr


def test_restarted_server_gets_its_port_back_at_once() -> None:
    """Although connections that the server closed linger in TIME_WAIT."""
    port = 0
    for _ in range(3):
        with running_server("--port", str(port)) as server:
            port = server.port
            assert server.get("/health").status == 200
            assert server.get("/health").status == 200
