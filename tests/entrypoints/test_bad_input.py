"""What clients do wrong, many times over, while others are served: nobody else notices, and nothing is left behind."""

from __future__ import annotations

import itertools
import json
import random
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.checkpoints import cached_checkpoint
from tests.helpers.native_requests import BAD_BODIES
from tests.helpers.server import FAKE, REAL, Server, generate_bytes, read_response, running_server

MAX_RUNNING = 8
NUM_BODIES = 500
NUM_STREAMS = 8
NUM_CLIENTS = 64
WRONG_VALUES: dict[str, list[Any]] = {
    "n": [0, -1, "1", 1.0, True, [1], 10**30],
    "best_of": [0, -3, "2", {}],
    "presence_penalty": [2.5, -3, "x", False, []],
    "frequency_penalty": [1e30, "0", {}],
    "repetition_penalty": [0, -1, "1", True],
    "temperature": [-0.1, "hot", True, [0.5], float("nan"), float("inf")],
    "top_p": [0, 1.1, -1, "1", True],
    "top_k": [-2, 1.5, "5", True],
    "min_p": [-0.1, 1.5, "0"],
    "use_beam_search": [1, "true", []],
    "length_penalty": ["1", 0.5, True],
    "early_stopping": [1, "always", True],
    "stop": ["", [""], [1], 5, ["x"] * 65, "y" * 1025, {"a": 1}],
    "stop_token_ids": [5, ["1"], [1.5], [True], [10**9], [0] * 1025],
    "include_stop_str_in_output": [1, "yes"],
    "ignore_eos": [0, "no"],
    "max_tokens": [0, -1, 1.5, "16", True, float("-inf")],
    "min_tokens": [-1, 17, 1.5, "0"],
    "logprobs": [-1, 10**6, "5", 1.5],
    "prompt_logprobs": [-1, 10**6, "5", True],
    "skip_special_tokens": [1, "x"],
    "spaces_between_special_tokens": [0, []],
    "seed": [2**63, -(2**63) - 1, 1.5, "7", True],
    "logit_bias": [[1], {"x": 1}, {"1": "y"}, {"999999999": 1}, {"1": 101}, {"-1": 0}],
    "allowed_token_ids": [[], ["a"], [10**9], 5],
    "bad_words": [[""], [5], "x" * 3, ["z"] * 1025],
    "truncate_prompt_tokens": [0, -1, "5", 1.5],
    "details": [1, "x", []],
    "stream_deltas": [0, "x", {}],
    "prompt": [5, None, ["a"], {}, True, 1.5],
}


@pytest.fixture(scope="module", params=["scripted", "real"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """The scripted engine, and the real one on a tiny model whose context is long enough to leave in the middle."""
    if request.param == "scripted":
        flags, module, script = [], FAKE, {"delay_s": 0.01}
    else:
        model = str(cached_checkpoint(max_position_embeddings=4096))
        flags, module, script = ["--model", model, "--block-size", "8", "--num-kv-blocks", "1024"], REAL, None
    with running_server("--max-num-seqs", str(MAX_RUNNING), *flags, module=module, script=script) as server:
        yield server


def malformed_bodies(seed: int, count: int) -> Iterator[tuple[bytes, str]]:
    """Bodies with a word that the answer must hold: the field at fault, where there is one."""
    generator = random.Random(seed)
    good = json.dumps({"prompt": "Hé", "max_tokens": 4, "temperature": 0.5, "stop": ["x"]}).encode()
    for _ in range(count):
        kind = generator.randrange(4)
        if kind == 0:
            yield generator.choice(BAD_BODIES)
        elif kind == 1:
            name = generator.choice(list(WRONG_VALUES))
            fields = {"prompt": "a", "stream": generator.random() < 0.5, name: generator.choice(WRONG_VALUES[name])}
            yield json.dumps(fields).encode(), name
        elif kind == 2:
            yield good[: generator.randrange(len(good))], "JSON"
        else:
            name = "".join(generator.choices("abcdefgh_", k=generator.randint(1, 40)))
            yield json.dumps({"prompt": "a", name: 1}).encode(), name


def test_malformed_bodies_disturb_nobody(server: Server) -> None:
    streams = [
        {"prompt": f"stream {k}", "stream": True, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        for k in range(NUM_STREAMS)
    ]
    solo = [server.post(fields).messages() for fields in streams]
    free_before = server.metrics()["num_free_kv_blocks"]
    bodies = list(malformed_bodies(seed=7, count=NUM_BODIES))
    too_large = b'{"prompt":"' + b"x" * (33 * 2**20) + b'"}'
    with ThreadPoolExecutor(NUM_STREAMS + 4) as pool:
        is_done = False

        def repeat(k: int) -> int:
            count = 0
            while not is_done or not count:
                assert server.post(streams[k]).messages() == solo[k]
                count += 1
            return count

        readers = [pool.submit(repeat, k) for k in range(NUM_STREAMS)]
        try:
            refusals = list(pool.map(server.post, [body for body, _ in bodies]))
            oversized = server.post(too_large)
        finally:
            is_done = True
        assert all(reader.result(60) for reader in readers)
    for (body, word), response in zip(bodies, refusals):
        assert response.status == 400, (body[:200], response.raw)
        assert list(response.json()) == ["detail"]
        assert word in response.json()["detail"], (body[:200], response.body)
    assert oversized.status == 413
    assert server.metrics()["num_free_kv_blocks"] == free_before
    assert "Traceback" not in server.log


def test_large_bodies_do_not_delay_other_streams(server: Server) -> None:
    """Bodies of 8 MiB, refused or cheap to refuse, while a stream of a token every 10 ms runs."""
    size = 8 * 2**20
    bodies = [b'{"prompt":"' + b"x" * size + b'"}', b'{"prompt":[' + b"1," * (size // 8) + b"1]}"]
    with server.connect() as stream, ThreadPoolExecutor(2) as pool:
        stream.sendall(generate_bytes({"prompt": "a", "stream": True, "max_tokens": 3000, "ignore_eos": True}))
        assert stream.recv(65536)
        refusals = [pool.submit(server.post, body) for body in bodies * 3]
        gaps = []
        begin = time.monotonic()
        while not all(refusal.done() for refusal in refusals):
            start = time.monotonic()
            assert stream.recv(65536)
            gaps.append(time.monotonic() - start)
        assert {refusal.result().status for refusal in refusals} == {400}
    assert max(gaps) < max(0.5, (time.monotonic() - begin) / 2)


def resident_mib(server: Server) -> float:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) / 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory of a process from /proc")
def test_refused_bodies_leave_no_memory_behind() -> None:
    bodies = [b'{"prompt":"' + b"x" * 8 * 2**20 + b'"}', b'{"prompt":"' + b"x" * 33 * 2**20 + b'"}']
    with running_server() as server:
        assert [server.post(body).status for body in bodies] == [400, 413]
        before = resident_mib(server)
        assert [server.post(body).status for body in bodies * 10] == [400, 413] * 10
        assert resident_mib(server) < before + 32


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory of a process from /proc")
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("count", [10**6, 10**9, 10**99])
@pytest.mark.parametrize("name", ["n", "best_of", "top_k", "truncate_prompt_tokens", "logprobs"])
def test_no_number_makes_the_server_allocate(server: Server, name: str, count: int, is_stream: bool) -> None:
    """With temperature above zero, since greedy requests with many candidates are refused before their number."""
    before = resident_mib(server)
    response = server.post({"prompt": "a", "max_tokens": 4, "temperature": 1, "stream": is_stream, name: count})
    assert response.status == (400 if name in ("n", "best_of", "logprobs") else 200), response.raw
    assert resident_mib(server) < before + 32
    assert "Traceback" not in server.log


def leave(server: Server, seed: int) -> None:
    """A client that streams or not, and leaves at a random moment: before, while or after it is served."""
    generator = random.Random(seed)
    fields = {"prompt": f"client {seed}", "stream": generator.random() < 0.5, "max_tokens": 400, "ignore_eos": True}
    request = generate_bytes(fields)
    with server.connect() as connection:
        connection.sendall(request[: generator.choice([len(request), len(request), len(request) - 5, 30])])
        connection.settimeout(generator.uniform(0, 1))
        end = time.monotonic() + generator.uniform(0, 1)
        try:
            while time.monotonic() < end and connection.recv(4096):
                pass
        except TimeoutError:
            pass


def wait_until_idle(server: Server, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while True:
        metrics = server.metrics()
        is_idle = metrics["num_requests_running"] == metrics["num_requests_waiting"] == 0
        if is_idle and metrics["num_free_kv_blocks"] == metrics["num_total_kv_blocks"]:
            return
        assert time.monotonic() < deadline, metrics
        time.sleep(0.02)


def test_clients_that_leave_at_random_moments_leave_nothing_behind(server: Server) -> None:
    """Eight are served at a time, so most of those that leave are still in the queue."""
    num_aborted = server.metrics()["num_requests_aborted_total"]
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        list(pool.map(leave, [server] * NUM_CLIENTS, range(NUM_CLIENTS)))
    wait_until_idle(server, within_s=1)
    assert server.metrics()["num_requests_aborted_total"] - num_aborted > NUM_CLIENTS / 4
    assert server.post({"prompt": "a", "max_tokens": 2}).status == 200
    assert "Traceback" not in server.log
    assert "client left" in server.log
    assert "Unhandled" not in server.log


def test_running_and_queued_requests_of_clients_that_left_are_aborted(server: Server) -> None:
    num_aborted = server.metrics()["num_requests_aborted_total"]
    connections = [server.connect() for _ in range(MAX_RUNNING + 4)]
    for connection, is_stream in zip(connections, itertools.cycle([True, False])):
        asked = {"prompt": "a", "stream": is_stream, "max_tokens": 4000, "ignore_eos": True}
        connection.sendall(generate_bytes(asked))
    deadline = time.monotonic() + 10
    while (server.metrics()["num_requests_running"], server.metrics()["num_requests_waiting"]) != (MAX_RUNNING, 4):
        assert time.monotonic() < deadline
    assert server.get("/health").status == 200
    for connection in connections:
        connection.close()
    wait_until_idle(server, within_s=1)
    assert server.metrics()["num_requests_aborted_total"] - num_aborted == len(connections)
    assert "Traceback" not in server.log


def test_reader_that_stalls_stalls_only_itself(server: Server) -> None:
    """Its stream is larger than what the kernel buffers, so the server has to wait for it, and loses nothing."""
    asked = {
        "prompt": "!delay=0.001 " + "s" * 3000,
        "stream": True,
        "max_tokens": 1000,
        "temperature": 0,
        "ignore_eos": True,
    }
    quick = {"prompt": "quick", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    expected = server.text(**quick)
    with socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.settimeout(60)
        stalled.connect(("127.0.0.1", server.port))
        stalled.sendall(generate_bytes(asked))
        assert stalled.recv(1, socket.MSG_PEEK)
        for _ in range(10):
            assert server.text(**quick) == expected
        response = read_response(stalled)
    assert response.is_complete
    assert len(response.messages()) == 1000
    wait_until_idle(server, within_s=1)
