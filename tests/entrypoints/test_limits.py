"""What the server refuses or ends so that no load and no client takes more than its share."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.entrypoints.test_lifecycle import ENDLESS, wait_for_requests
from tests.entrypoints.test_native_protocol import assert_refused
from tests.helpers.checkpoints import cached_checkpoint
from tests.helpers.server import REAL, generate_bytes, read_response, request_bytes, running_server


@pytest.mark.parametrize("is_stream", [False, True])
def test_requests_beyond_those_that_may_wait_are_refused_at_once(is_stream: bool) -> None:
    fields: dict[str, Any] = {**ENDLESS, "stream": is_stream}
    with running_server("--max-num-seqs", "1", "--max-waiting-requests", "2") as server:
        open_requests = [server.connect() for _ in range(3)]
        for number, connection in enumerate(open_requests, 1):
            connection.sendall(generate_bytes(fields))
            wait_for_requests(server, number)
        refused = server.post(fields)
        assert_refused(refused, 503, "2 requests are waiting", "--max-waiting-requests")
        assert refused.headers["retry-after"] == "1"
        with server.connect() as unread:  # nothing of a body is awaited
            unread.sendall(request_bytes("POST", "/generate", b"", "Content-Length: 1000000"))
            assert read_response(unread).status == 503
        assert server.get("/health").status == server.get("/metrics").status == 200
        open_requests.pop().close()
        wait_for_requests(server, 2)
        with server.connect() as accepted:
            accepted.sendall(generate_bytes(fields))
            wait_for_requests(server, 3)
        for connection in open_requests:
            connection.close()
        wait_for_requests(server, 0)
        assert server.post({"prompt": "a", "stream": is_stream}).status == 200
        assert "refused: '2 requests are waiting" in server.log


def test_a_burst_on_the_real_engine_is_served_or_refused_and_nothing_is_left() -> None:
    flags = ["--model", str(cached_checkpoint()), "--max-num-seqs", "1", "--max-waiting-requests", "3"]
    with running_server(*flags, module=REAL) as server:
        with ThreadPoolExecutor(32) as pool:
            barrier = threading.Barrier(32)

            def ask(_: int) -> int:
                barrier.wait(30)
                return server.post({"prompt": "a b c", "max_tokens": 20, "ignore_eos": True}).status

            statuses = list(pool.map(ask, range(32)))
        assert set(statuses) == {200, 503}
        assert server.post({"prompt": "a"}).status == 200
        metrics = server.metrics()
        assert metrics["num_requests_waiting"] == metrics["num_requests_running"] == 0
