"""However long a prompt is, no stream that runs and no `/health` waits for it, beyond the model's steps.

The model's steps cost nothing here, so that every pause is the server's own. Other processes on the same cores make
pauses, too: the time in which threads of the server could run and got no core is taken off, and a pause counts if it
comes in each of three rounds.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers.checkpoints import cached_checkpoint
from tests.helpers.server import Server, generate_bytes, read_response, running_server

INSTANT = "tests.helpers.instant_server"
MAX_PAUSE_S = 0.3
NUM_ROUNDS = 3
CONTEXT = 1_000_000
PROMPT_BYTES = 900_000
"""Nearly as many tokens, since the tokenizer knows bytes and a few merges: 56,250 blocks of the cache at most."""
REFUSED_BYTES = 8 * 2**20
HELD_UP_S = 0.6
HEALTH_INTERVAL_S = 0.005


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    model = str(cached_checkpoint(max_position_embeddings=CONTEXT))
    flags = ["--model", model, "--num-kv-blocks", "64000", "--max-num-seqs", "8", "--dtype", "float32"]
    with running_server(*flags, "--num-threads", "1", module=INSTANT) as running:
        yield running


class Watch:
    """Reads a stream and asks for `/health`, each on a thread of its own, as long as its block lasts."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._read_stream), threading.Thread(target=self._ask_health)]
        self._is_running = threading.Event()
        self.longest_gap_s = 0.0
        self.longest_health_s = 0.0

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        assert self._is_running.wait(30), "the stream has begun"
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _read_stream(self) -> None:
        fields = {"prompt": "a b", "stream": True, "stream_deltas": True, "max_tokens": None, "ignore_eos": True}
        with self._server.connect() as connection:
            connection.sendall(generate_bytes(fields))
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
            self._is_running.set()
            last_s = self._own_time_s()
            while not self._is_over.is_set():
                assert connection.recv(65536), "the stream goes on"
                now_s = self._own_time_s()
                self.longest_gap_s, last_s = max(self.longest_gap_s, now_s - last_s), now_s

    def _ask_health(self) -> None:
        while not self._is_over.wait(HEALTH_INTERVAL_S):
            start_s = self._own_time_s()
            assert self._server.get("/health").status == 200
            self.longest_health_s = max(self.longest_health_s, self._own_time_s() - start_s)

    def _own_time_s(self) -> float:
        """A clock that stands while a thread of the server waits for a core."""
        waited_ns = 0
        for thread in Path(f"/proc/{self._server.process.pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
                waited_ns += int((thread / "schedstat").read_text().split()[1])
        return time.monotonic() - waited_ns / 1e9


def long_prompt(number: int) -> str:
    """Another one for each number, from its first block on."""
    return (f"word{number} " * PROMPT_BYTES)[:PROMPT_BYTES]


def status_of(server: Server, prompt: str, **fields: object) -> int:
    with server.connect() as connection:
        connection.settimeout(120)
        connection.sendall(generate_bytes({"prompt": prompt, "max_tokens": 1, **fields}))
        return read_response(connection).status


def refused(server: Server, _: int) -> None:
    assert status_of(server, "x" * REFUSED_BYTES) == 400


def truncated(server: Server, number: int) -> None:
    assert status_of(server, long_prompt(number), truncate_prompt_tokens=2000) == 200


def admitted(server: Server, number: int) -> None:
    assert status_of(server, long_prompt(number)) == 200


def pause_s(server: Server, act: Callable[[Server, int], None]) -> float:
    """The longest in the round that has the shortest one."""
    pauses: list[tuple[float, float]] = []
    for number in range(NUM_ROUNDS):
        with Watch(server) as watch:
            act(server, number)
        pauses.append((watch.longest_gap_s, watch.longest_health_s))
        if max(pauses[-1]) < MAX_PAUSE_S:  # one round without a pause shows that the server makes none
            break
    print("longest gap of the stream and longest /health, in seconds, round by round:", pauses)
    return min(map(max, pauses))


@pytest.mark.parametrize("act", [refused, truncated, admitted])
def test_a_long_prompt_holds_up_nobody(server: Server, act: Callable[[Server, int], None]) -> None:
    assert pause_s(server, act) < MAX_PAUSE_S


def test_nor_does_one_whose_blocks_are_all_there(server: Server) -> None:
    admitted(server, 0)
    hits = server.metrics()["prefix_cache_hits_total"]
    assert pause_s(server, lambda server, _: admitted(server, 0)) < MAX_PAUSE_S
    assert server.metrics()["prefix_cache_hits_total"] - hits > 0.9 * PROMPT_BYTES


def test_a_server_that_is_held_up_is_found_out(server: Server) -> None:
    with Watch(server) as watch:
        server.signal(signal.SIGSTOP)
        time.sleep(HELD_UP_S)
        server.signal(signal.SIGCONT)
    assert watch.longest_gap_s > MAX_PAUSE_S and watch.longest_health_s > MAX_PAUSE_S
