"""However long a prompt is, no stream that runs and no `/health` waits for it, beyond the model's steps.

A gap of a stream counts without the time that the server needed to compute the step behind it, which the server writes
down; a `/health` counts as a whole, since it has no step to wait for. Where steps cost nothing, every pause is the
server's own; the other models are real, on one thread.

Other processes on the same cores make pauses, too: the time in which the event loop or a step could run and got no core
is taken off, and a pause counts if it comes in each of three rounds.
"""

from __future__ import annotations

import signal
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

from tests.helpers.checkpoints import cached_checkpoint
from tests.helpers.server import Server, generate_bytes, read_response, running_server
from tests.helpers.timed_server import HELD_UP_S, Moment, Step, steps_in

MAX_PAUSE_S = 0.3
NUM_ROUNDS = 3
PROMPT_BYTES = 900_000
NUM_TRUNCATED = 1000
"""Two steps of 512 tokens, which take a slow core 5 s in the default model."""
REFUSED_BYTES = 8 * 2**20
HELD_UP_BYTES = 200_000
"""A second's work."""
HEALTH_INTERVAL_S = 0.005
DELIMITER = b"\0"


@dataclass(frozen=True)
class Model:
    """What is served, and how."""

    server: str
    flags: Sequence[str] = ()
    tiny: dict[str, Any] | None = None
    """A tiny checkpoint with these changes; without it the default model."""
    prompt_bytes: int = PROMPT_BYTES

    def command_line(self) -> list[str]:
        checkpoint = [] if self.tiny is None else ["--model", str(cached_checkpoint(**self.tiny))]
        return [*checkpoint, *self.flags, "--max-num-seqs", "8", "--num-threads", "1"]


INSTANT, TIMED = "tests.helpers.instant_server", "tests.helpers.timed_server"
LONG = {"max_position_embeddings": 1_000_000}
CACHE = ("--num-kv-blocks", "64000", "--dtype", "float32")
"""A prompt has as many tokens as bytes, since this tokenizer has nothing else: 56,250 blocks."""
MODELS = {
    "instant": Model(INSTANT, CACHE, LONG),
    # With full attention a prompt would take more than an hour.
    "windowed": Model(
        TIMED,
        (*CACHE, "--max-num-batched-tokens", "2048"),
        {**LONG, "family": "mistral", "sliding_window": 64, "num_hidden_layers": 1},
    ),
    # The longest prompt that a context of 8,192 tokens admits.
    "default": Model(TIMED, prompt_bytes=64 * 1024 + 64 * 8192),
}


@dataclass(frozen=True)
class Served:
    model: Model
    server: Server

    def prompt(self, number: int) -> str:
        """The longest, another one for each number from its first block on."""
        return (f"word{number} " * self.model.prompt_bytes)[: self.model.prompt_bytes]


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    model = MODELS[request.param]
    with running_server(*model.command_line(), module=model.server) as server:
        yield Served(model, server)


class Watch:
    """Reads a stream and asks for `/health`, each on a thread of its own, as long as its block lasts."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._read_stream), threading.Thread(target=self._ask_health)]
        self._is_running = threading.Event()
        self._received: list[tuple[Moment, int]] = []
        """When, and how many messages."""
        self.longest_gap_s = 0.0
        """Of the stream, beyond the model's steps."""
        self.longest_health_s = 0.0
        self.longest_step_s = 0.0

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        assert self._is_running.wait(30), "the stream has begun"
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        first, last = self._received[0][0], self._received[-1][0]
        steps = [step for step in steps_in(self._server.log) if first < step.ended < last]
        self.longest_gap_s = longest_gap_s(self._received, steps)
        self.longest_step_s = max(step.busy_s for step in steps)

    def _read_stream(self) -> None:
        fields = {"prompt": "a b", "stream": True, "stream_deltas": True, "max_tokens": None, "ignore_eos": True}
        with self._server.connect() as connection:
            connection.sendall(generate_bytes(fields))
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
            self._received.append((self._now(), 0))
            self._is_running.set()
            while not self._is_over.is_set():
                data = connection.recv(65536)
                assert data, "the stream goes on"
                self._received.append((self._now(), data.count(DELIMITER)))

    def _ask_health(self) -> None:
        while not self._is_over.wait(HEALTH_INTERVAL_S):
            start = self._now()
            assert self._server.get("/health").status == 200
            self.longest_health_s = max(self.longest_health_s, self._now().since(start))

    def _now(self) -> Moment:
        return Moment.now(self._server.process.pid)


def longest_gap_s(received: list[tuple[Moment, int]], steps: list[Step]) -> float:
    """Between messages, in seconds beyond the computing of the one step that each of them had to wait for.

    That is the first to end after the message before: what is computed while a message is held back excuses nothing.
    """
    gaps = [0.0]
    for (last, _), (now, num_messages) in pairwise(received):
        first = bisect_right(steps, last, key=lambda step: step.ended)
        waited_for = steps[first : first + num_messages]
        gaps.append(now.since(last) - sum(step.computed_s(since=last) for step in waited_for))
    return max(gaps)


def status_of(served: Served, prompt: str, **fields: object) -> int:
    with served.server.connect() as connection:
        connection.settimeout(120)
        connection.sendall(generate_bytes({"prompt": prompt, "max_tokens": 1, **fields}))
        return read_response(connection).status


def refused(served: Served, _: int) -> None:
    assert status_of(served, "x" * REFUSED_BYTES) == 400


def truncated(served: Served, number: int) -> None:
    assert status_of(served, served.prompt(number), truncate_prompt_tokens=NUM_TRUNCATED) == 200


def admitted(served: Served, number: int) -> None:
    assert status_of(served, served.prompt(number)) == 200


def pause_s(served: Served, act: Callable[[Served, int], None]) -> float:
    """The longest in the round that has the shortest one."""
    pauses: list[tuple[float, float]] = []
    for number in range(NUM_ROUNDS):
        with Watch(served.server) as watch:
            act(served, number)
        pauses.append((watch.longest_gap_s, watch.longest_health_s))
        print("longest gap beyond steps, /health and step in s:", *pauses[-1], watch.longest_step_s)
        if max(pauses[-1]) < MAX_PAUSE_S:  # one round without a pause shows that the server makes none
            break
    return min(map(max, pauses))


@pytest.mark.parametrize("served", MODELS, indirect=True)
@pytest.mark.parametrize("act", [refused, truncated])
def test_a_long_prompt_holds_up_nobody(served: Served, act: Callable[[Served, int], None]) -> None:
    assert pause_s(served, act) < MAX_PAUSE_S


@pytest.mark.parametrize("served", ["instant", "windowed"], indirect=True)
def test_nor_does_one_that_is_computed_as_a_whole(served: Served) -> None:
    assert pause_s(served, admitted) < MAX_PAUSE_S


@pytest.mark.parametrize("served", ["instant"], indirect=True)
def test_nor_does_one_whose_blocks_are_all_there(served: Served) -> None:
    admitted(served, 0)
    hits = served.server.metrics()["prefix_cache_hits_total"]
    assert pause_s(served, lambda served, _: admitted(served, 0)) < MAX_PAUSE_S
    assert served.server.metrics()["prefix_cache_hits_total"] - hits > 0.9 * PROMPT_BYTES


@pytest.mark.parametrize("served", ["windowed"], indirect=True)
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGSTOP, id="the process"),
        pytest.param(signal.SIGUSR1, id="the event loop alone"),
        pytest.param(signal.SIGUSR2, id="whoever needs the interpreter"),
    ],
)
def test_a_server_that_is_held_up_is_found_out(served: Served, number: signal.Signals) -> None:
    """While it computes the steps of a long prompt."""
    with Watch(served.server) as watch, served.server.connect() as connection:
        connection.sendall(generate_bytes({"prompt": served.prompt(number)[:HELD_UP_BYTES], "max_tokens": 1}))
        wait_until_two_run(served.server)
        served.server.signal(number)
        time.sleep(HELD_UP_S)
        served.server.signal(signal.SIGCONT)
    assert watch.longest_gap_s > MAX_PAUSE_S and watch.longest_health_s > MAX_PAUSE_S


def wait_until_two_run(server: Server) -> None:
    deadline = time.monotonic() + 60
    while server.metrics()["num_requests_running"] < 2:
        assert time.monotonic() < deadline, server.log[-3000:]


def moment(time_s: float) -> Moment:
    return Moment(time_s, waited_s=0)


@pytest.mark.parametrize(
    "steps, gap_s",
    [
        pytest.param([(0.9, 1.1, 0.2), (1.1, 3, 1.9)], 1.9, id="one message, two steps"),
        pytest.param([(0.9, 3, 0.5)], 1.5, id="a step that waits"),
        pytest.param([(0.2, 3, 2.8)], 0, id="a step that began before"),
        pytest.param([(1.2, 2.8, 1.6)], 0.4, id="before and after the step"),
        pytest.param([(1.1, 3.1, 2)], 0, id="no step yet"),
    ],
)
def test_what_a_step_excuses(steps: list[tuple[float, float, float]], gap_s: float) -> None:
    """Of the gap between a message at second 1 and one at second 3."""
    timed = [Step(moment(began), moment(ended), busy_s) for began, ended, busy_s in steps]
    assert longest_gap_s([(moment(1), 1), (moment(3), 1)], timed) == pytest.approx(gap_s)
