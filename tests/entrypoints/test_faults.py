"""What breaks in a server and around it, one by one, on the real engine in a process of its own (cases F1, H7, O2)."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.byte_tokenizer import ByteTokenizer
from tests.helpers.checkpoints import cached_checkpoint
from tests.helpers.doors import NATIVE, OPENAI, Door, events
from tests.helpers.faulty_server import INSIDES
from tests.helpers.server import REAL, Response, Server, assert_refused, read_response, request_bytes, running_server
from tests.helpers.waiting import reader_of_much, wait_for_requests, wait_until_refused
from vllm_lite.entrypoints.listening import bind

FAULTY = "tests.helpers.faulty_server"
CONTEXT = 8192
LONG: dict[str, Any] = {
    "prompt": "a b",
    "max_tokens": 4000,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
    "allowed_token_ids": ByteTokenizer().encode("abc"),
}
"""Whose every token is a whole character, so that each makes a message."""
FLOODS: dict[str, dict[str, Any]] = {
    NATIVE.name: {"prompt": "x" * 3000},  # which comes again with every message
    OPENAI.name: {"n": 8, "temperature": 1, "logprobs": 20},
}
"""What makes a stream longer than all buffers on its way."""
GREETING: dict[str, Any] = {"prompt": "Hello", "max_tokens": 5, "ignore_eos": True, "temperature": 0}


def flags(*more: str) -> list[str]:
    return ["--model", str(cached_checkpoint(max_position_embeddings=CONTEXT)), "--num-kv-blocks", "1200", *more]


def at_both_doors(check: Callable[[Door], None]) -> None:
    """A server takes seconds to start: two at a time."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(check, [NATIVE, OPENAI]))


def open_stream(server: Server, **fields: Any) -> socket.socket:
    """A connection whose stream has begun."""
    connection = server.connect()
    connection.sendall(server.request({**LONG, **server.door.deltas, **fields}))
    assert connection.recv(1, socket.MSG_PEEK)
    return connection


def assert_cut(stream: Response, *words: str) -> None:
    """It had begun and ends without its last chunk; OpenAI's clients are told why, in a last event with these words."""
    assert stream.status == 200 and not stream.is_complete
    assert stream.texts()
    if stream.door is OPENAI:
        *_, last = events(stream.body)
        failure = OPENAI.failure(json.loads(last))
        assert all(word in failure for word in words), failure


def wait_for_metric(server: Server, name: str, value: float) -> None:
    deadline = time.monotonic() + 10
    while server.metrics()[name] != value:
        assert time.monotonic() < deadline, server.metrics()
        time.sleep(0.01)


def assert_no_process_left(server: Server) -> None:
    """Of those that the server has started, and of itself: its process group is empty."""
    with pytest.raises(ProcessLookupError):
        os.killpg(server.process.pid, 0)


@pytest.fixture(scope="module")
def server(door: Door) -> Iterator[Server]:
    with running_server(*flags("--slow-client-s", "1"), module=FAULTY, door=door) as server:
        yield server


# A step that does not end


def test_a_step_that_hangs_ends_its_clients_then_health_then_the_process() -> None:
    at_both_doors(check_a_step_that_hangs)


def check_a_step_that_hangs(door: Door) -> None:
    with running_server(*flags("--watchdog-s", "1"), module=FAULTY, door=door) as server:
        with open_stream(server) as stream, server.connect() as leaver, server.connect() as poisoned:
            poisoned.sendall(server.request({"prompt": "poison !sleep"}))
            wait_for_requests(server, 2)
            leaver.sendall(server.request(LONG))
            wait_for_requests(server, 3)
            leaver.close()  # is noticed although nothing is computed
            wait_for_metric(server, "num_requests_aborted_total", 1)
            assert server.get("/health").status == 200
            assert_refused(server.read(poisoned), 503, "1 s", "--watchdog-s")
            assert_cut(server.read(stream), "--watchdog-s")
        assert_refused(server.get("/health"), 503, "restart")
        assert_refused(server.post({"prompt": "a"}), 503, "--watchdog-s")
        assert server.wait(10) == 1
        [line] = [line for line in server.log.splitlines() if "declared dead" in line]
        assert "ERROR" in line and " 1 s (--watchdog-s)" in line
        assert "Traceback" not in server.log
        assert_no_process_left(server)


def test_a_step_that_hangs_while_the_server_stops_does_not_hold_the_exit() -> None:
    """Its requests have been ended by then: nobody but the watchdog is left to notice."""
    at_both_doors(check_a_step_that_hangs_at_the_end)


def check_a_step_that_hangs_at_the_end(door: Door) -> None:
    with running_server(*flags("--watchdog-s", "2", "--shutdown-grace-s", "0.2"), module=FAULTY, door=door) as server:
        with open_stream(server) as stream, server.connect() as poisoned:
            poisoned.sendall(server.request({"prompt": "poison !lock"}))
            wait_for_requests(server, 2)
            server.signal(signal.SIGTERM)
            start = time.monotonic()
            assert_refused(server.read(poisoned), 503, "stopping")
            ended = server.read(stream)
            if door is NATIVE:
                assert ended.is_complete
            else:
                assert_cut(ended, "stopping")
            assert server.wait(10) == 1
            assert 1 < time.monotonic() - start < 6
        assert re.search("ERROR .* 2 s .--watchdog-s.: the engine is declared dead", server.log)
        assert_no_process_left(server)


# A step that fails, and a tokenizer


@pytest.mark.parametrize("fault", ["raise", "memory", "oom"])
def test_a_step_that_fails_fails_its_requests_and_no_other(server: Server, fault: str) -> None:
    expected = server.text(**GREETING)
    with open_stream(server, prompt=f"beside {fault}") as bystander:
        poisoned = server.post({"prompt": f"now !{fault}"})
        cut = server.read(bystander)  # it was in the same step
    assert_refused(poisoned, 500, "failed", "the log says why")
    later = server.post({**LONG, **server.door.deltas, "prompt": f"later !{fault}=3"})
    for stream in (cut, later):
        assert_cut(stream, "failed", "the log says why")
    assert len(later.texts()) == 3
    if server.door is NATIVE:
        assert all(chunk.endswith(b"]}\0") for chunk in cut.chunks + later.chunks), "nothing but messages"
    assert server.text(**GREETING) == expected
    assert_unharmed(server)
    for response in (poisoned, cut, later):
        assert INSIDES not in response.raw.decode()
        assert_log_explains(server, response, "A step failed, and with it the requests")


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("fault", "reason"), [("encode", "prompt could not be tokenised"), ("decode", "tokenizer could not decode a token")]
)
def test_a_tokenizer_that_raises_fails_the_request_and_no_other(
    server: Server, fault: str, reason: str, is_stream: bool
) -> None:
    with open_stream(server, max_tokens=300) as bystander:
        poisoned = server.post({"prompt": f"a !{fault}", "stream": is_stream})
        assert server.read(bystander).is_complete
    assert_refused(poisoned, 500, reason, "the log says why")
    assert INSIDES not in poisoned.raw.decode()
    assert_log_explains(server, poisoned, reason)
    assert_unharmed(server)


def assert_unharmed(server: Server) -> None:
    wait_for_requests(server, 0)
    metrics = server.metrics()
    assert metrics["num_free_kv_blocks"] == metrics["num_total_kv_blocks"]
    assert metrics["kv_cache_usage_perc"] == 0
    assert server.get("/health").status == 200
    assert server.text(**GREETING)


def assert_log_explains(server: Server, response: Response, words: str) -> None:
    """One entry has the request's id and, behind its traceback, the error."""
    entries = re.split(r"^(?=\d{4}-)", server.log, flags=re.MULTILINE)
    request_id = response.headers["x-request-id"]
    [entry] = [entry for entry in entries if " ERROR " in entry and words in entry and request_id in entry]
    assert " ERROR " in entry and "Traceback" in entry and INSIDES in entry


# Clients


@pytest.mark.parametrize("moment", ["at once", "in the head", "in the body", "before the answer", "in the stream"])
def test_clients_that_reset_the_connection_leave_nothing_behind(server: Server, moment: str) -> None:
    num_tracebacks = server.log.count("Traceback")
    is_stream = moment == "in the stream"
    request = server.request({**LONG, "stream": is_stream, **(server.door.deltas if is_stream else {})})
    num_sent = {"at once": 0, "in the head": 30, "in the body": -10}.get(moment, len(request))
    with ExitStack() as stack:
        connections = [stack.enter_context(server.connect()) for _ in range(20)]
        for connection in connections:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(request[:num_sent])
        if num_sent == len(request):
            wait_for_requests(server, len(connections))
    assert_unharmed(server)
    assert server.log.count("Traceback") == num_tracebacks and "Unhandled" not in server.log


def test_case_f1_300_connections_at_once_are_all_answered(server: Server) -> None:
    with ExitStack() as stack:
        connections = [stack.enter_context(server.connect()) for _ in range(300)]
        for number, connection in enumerate(connections):
            connection.sendall(server.request({**GREETING, "stream": number % 2 == 0}))
        responses = [server.read(connection) for connection in connections]
    assert {response.status for response in responses} == {200}
    assert all(response.is_complete for response in responses)
    assert {response.texts()[-1] for response in responses[::2]} == {server.text(**GREETING)}
    assert {response.text() for response in responses[1::2]} == {server.text(**GREETING)}
    assert_unharmed(server)


def test_a_body_that_comes_byte_by_byte_delays_nobody(server: Server) -> None:
    request = server.request(GREETING)
    expected = server.text(**GREETING)
    with server.connect() as slow:
        slow.sendall(request[:-20])
        for position in range(len(request) - 20, len(request)):
            start = time.monotonic()
            assert server.text(**GREETING) == expected
            assert time.monotonic() - start < 1
            slow.sendall(request[position : position + 1])
        assert server.read(slow).text() == expected


def test_a_client_that_never_reads_is_cut_off_and_delays_nobody(server: Server) -> None:
    num_cut = server.log.count("the connection is cut")
    with reader_of_much(server, **{**LONG, **FLOODS[server.door.name]}):
        wait_for_requests(server, 1)
        expected = server.text(**GREETING)
        while server.log.count("the connection is cut") == num_cut:
            start = time.monotonic()
            assert server.text(**GREETING) == expected
            assert time.monotonic() - start < 1
        assert_unharmed(server)


# The life of a server


def test_case_h7_a_signal_lets_running_requests_finish_and_leaves_nothing() -> None:
    at_both_doors(check_signal)


def check_signal(door: Door) -> None:
    number = signal.SIGTERM if door is NATIVE else signal.SIGINT  # test_lifecycle has both at both
    with (
        running_server(*flags(), module=REAL, door=door) as server,
        ExitStack() as stack,
        server.connect() as kept_alive,
    ):
        streams = [stack.enter_context(open_stream(server, max_tokens=800)) for _ in range(3)]
        kept_alive.sendall(request_bytes("GET", "/health", b"", "Connection: keep-alive"))
        assert server.read(kept_alive).status == 200
        server.signal(number)
        wait_until_refused(server.port)
        kept_alive.sendall(server.request(GREETING))
        assert_refused(server.read(kept_alive), 503, "stopping")
        for stream in streams:
            response = server.read(stream)
            assert response.is_complete, (response.raw[-800:], server.log)
            assert len(response.texts()) == 800
        assert server.wait(10) == 0
        assert "Traceback" not in server.log
        assert_no_process_left(server)
        bind("127.0.0.1", server.port).close()


def test_case_o2_health_tells_the_truth_from_the_first_moment_to_the_last() -> None:
    at_both_doors(check_health)


def check_health(door: Door) -> None:
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
    while_loading: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        polling = pool.submit(poll_health, port, while_loading)
        with running_server(*flags("--port", str(port)), module=FAULTY, door=door) as server:
            polling.result(30)
            assert while_loading, "the server was looked at before it was ready"
            assert server.get("/health").status == 200
            with open_stream(server), open_stream(server):
                assert server.metrics()["num_requests_running"] == 2
                assert server.metrics()["num_free_kv_blocks"] < server.metrics()["num_total_kv_blocks"]
                for _ in range(20):
                    start = time.monotonic()
                    assert server.get("/health").status == 200
                    assert time.monotonic() - start < 1
            assert_unharmed(server)
            with open_stream(server) as stream:
                for prompt in ("a !raise", "b !raise", "c !raise"):  # the third of the same error with another prompt
                    assert server.post({"prompt": prompt}).status == 500
                assert_refused(server.get("/health"), 503, "restart")
                assert_cut(server.read(stream))
            assert server.wait(5) == 1
            assert INSIDES in server.log and "ERROR vllm_lite.entrypoints.lifecycle: the engine is dead" in server.log


def poll_health(port: int, refused: list[int]) -> None:
    """Until it is 200. Before that nothing but a refused connection is allowed; `refused` counts them."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
                connection.sendall(request_bytes("GET", "/health", b""))
                assert read_response(connection).status == 200
                return
        except ConnectionRefusedError:
            refused.append(port)
            time.sleep(0.02)
    raise AssertionError("the server never got ready")


def test_a_full_disk_for_the_kernels_costs_speed_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may write no large file, so there is no room in a temporary folder either."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    command = ["--device", "cpu", "--model", str(cached_checkpoint())]
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))  # what the process inherits
    try:
        with running_server(*command, module=REAL) as server:
            assert_unharmed(server)
            [line] = [line for line in server.log.splitlines() if "WARNING" in line]
            assert "torch computes everything" in line and "File too large, and kernels take 8 MiB" in line
            assert "Traceback" not in server.log
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
