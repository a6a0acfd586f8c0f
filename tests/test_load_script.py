"""scripts/load_test.py: the chunks, the figures, and loads on a real server."""

from __future__ import annotations

import itertools
import json
import random
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import load_test
from scripts.bench import load_plot
from scripts.bench.client import Address
from scripts.bench.documents import read_chunks
from scripts.bench.figures import percentiles
from scripts.bench.load import Job, Load, LoadRunner, Outcome, load_figures, milliseconds, poisson_times
from tests.helpers.byte_tokenizer import ByteTokenizer
from tests.helpers.canned_server import canned_server
from tests.helpers.checkpoints import cached_checkpoint
from tests.helpers.server import REAL, Server, running_server
from vllm_lite.config import API_KEY_VARIABLE

CONTEXT = 1024


@pytest.fixture(scope="module")
def model() -> str:
    return str(cached_checkpoint(max_position_embeddings=CONTEXT))


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[Server]:
    with running_server("--model", model, "--dtype", "float32", "--max-num-seqs", "16", module=REAL) as server:
        yield server


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    folder = tmp_path / "documents"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("0123456789" * 20)
    (folder / "b.bin").write_bytes(b"\xff\xfe\x00\x01")
    (folder / "deep" / "c.md").write_text("é" * 100)
    return folder


# Chunks


def test_chunks_go_through_the_documents_in_order(documents: Path) -> None:
    whole = "0123456789" * 20 + "\n\n" + "é" * 100 + "\n\n"
    chunks = read_chunks(documents, num_chunks=7, chunk_tokens=10, tokenizer=None)
    assert chunks == [whole[start : start + 40] for start in range(0, 280, 40)]
    tokenizer = ByteTokenizer()
    chunks = read_chunks(documents, num_chunks=10, chunk_tokens=40, tokenizer=tokenizer)
    assert [len(tokenizer.encode(chunk)) for chunk in chunks] == [40] * 10
    assert "".join(chunks) == whole[:301]


@pytest.mark.parametrize(
    ("num_chunks", "folder", "message"),
    [
        (8, "", "make 7 chunks of 10 tokens, and 8 are wanted"),
        (1, "a.txt", "--documents must be a folder, got .*a.txt"),
        (1, "absent", "--documents must be a folder, got .*absent"),
    ],
)
def test_documents_that_do_not_suffice_are_named(documents: Path, num_chunks: int, folder: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_chunks(documents / folder, num_chunks=num_chunks, chunk_tokens=10, tokenizer=None)


# Figures


def test_figures_of_a_load() -> None:
    outcomes = [
        Outcome(3, begin_s=0.0, end_s=1.0, token_times=[0.5, 0.7, 1.0]),
        Outcome(1, begin_s=0.0, end_s=2.0, failure="TimeoutError: nothing"),
        Outcome(2, begin_s=1.0, end_s=3.0, token_times=[2.0, 3.0]),
    ]
    load = Load(seconds=4.0, outcomes=outcomes, num_not_sent=1)
    assert milliseconds(load) == {
        "first_token_ms": [500.0, 1000.0],
        "inter_token_ms": [pytest.approx(200.0), pytest.approx(300.0), 1000.0],
        "end_to_end_ms": [1000.0, 2000.0],
        "ms_per_token": [pytest.approx(333.333, abs=1e-3), 1000.0],
    }
    figures = load_figures(load)
    assert (figures["num_answered"], figures["num_failed"], figures["num_not_sent"]) == (2, 1, 1)
    assert figures["failures"] == {"TimeoutError: nothing": 1}
    assert (figures["num_tokens"], figures["tokens_per_s"], figures["requests_per_s"]) == (5, 1.25, 0.5)
    assert figures["end_to_end_ms"]["p50"] == 1500.0
    nothing = load_figures(Load(1.0, [outcomes[1]], 0))
    assert nothing["tokens_per_s"] == 0 and "end_to_end_ms" not in nothing
    assert "failed 1 times: TimeoutError: nothing" in load_test.report(nothing)


def test_percentiles_lie_between_neighbours() -> None:
    assert percentiles([float(value) for value in range(101)]) == {
        "mean": 50.0,
        "p50": 50.0,
        "p90": 90.0,
        "p99": 99.0,
        "max": 100.0,
    }
    assert percentiles([7.0])["p99"] == 7.0


def test_poisson_arrivals_have_the_wanted_rate() -> None:
    times = poisson_times(4.0, 4000, random.Random(1))
    assert times == sorted(times)
    assert 4000 / times[-1] == pytest.approx(4.0, rel=0.1)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert sum(gap > 0.25 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)


# Loads


def load_words(server: Server, documents: Path, *more: str) -> list[str]:
    return ["--port", str(server.port), "--documents", str(documents), *more]


def test_16_threads_over_chunks_of_512_tokens(
    server: Server, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No request fails, and every one gets the tokens that it asked for."""
    (tmp_path / "long.txt").write_text(" ".join(str(number) for number in range(5000)))
    file = tmp_path / "figures.json"
    what = ["--num-chunks", "24", "--chunk-tokens", "512", "--tokenizer", model, "--threads", "16"]
    words = load_words(server, tmp_path, *what, "--max-tokens", "12", "--json", str(file))
    assert load_test.main(words) == 0
    found = json.loads(file.read_text())
    assert (found["figures"]["num_answered"], found["figures"]["num_failed"]) == (24, 0)
    assert [len(request["token_times"]) for request in found["requests"]] == [12] * 24
    for name in ("first_token_ms", "inter_token_ms", "end_to_end_ms", "ms_per_token"):
        figures = found["figures"][name]
        assert 0 < figures["p50"] <= figures["p90"] <= figures["p99"] <= figures["max"]
    assert found["figures"]["first_token_ms"]["max"] <= found["figures"]["end_to_end_ms"]["max"]
    assert found["settings"]["chunk_tokens"] == 512
    captured = capsys.readouterr()
    assert "24 answered, 0 failed, 0 not sent" in captured.out and "new tokens/s" in captured.out
    assert "24/24" in captured.err and "tokens/s, 0 failed" in captured.err


def test_lengths_from_a_range_and_arrivals_at_random_repeat_with_their_seed(
    server: Server, documents: Path, tmp_path: Path
) -> None:
    what = ["--num-chunks", "7", "--chunk-tokens", "10", "--max-tokens-range", "2", "9", "--rate", "100"]
    found = []
    for seed in ("1", "1", "2"):
        file = tmp_path / "figures.json"
        assert load_test.main(load_words(server, documents, *what, "--seed", seed, "--json", str(file))) == 0
        requests = json.loads(file.read_text())["requests"]
        assert all(len(request["token_times"]) == request["max_tokens"] for request in requests)
        found.append([(request["begin_s"], request["max_tokens"]) for request in requests])
    assert found[0] == found[1] != found[2]
    lengths = [length for _, length in found[0]]
    assert len(set(lengths)) > 2 and min(lengths) >= 2 and max(lengths) <= 9


def test_failures_are_counted_with_their_reason(
    server: Server, documents: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (documents / "d.txt").write_text("x" * 10000)
    what = ["--num-chunks", "4", "--chunk-tokens", "500", "--max-tokens", "2"]
    assert load_test.main(load_words(server, documents, *what)) == 1
    output = capsys.readouterr().out
    assert "0 answered, 4 failed" in output
    assert "RuntimeError: the server answered 'HTTP/1.1 400 Bad Request'" in output
    assert server.text(prompt="a", max_tokens=1)


def test_the_key_of_the_environment_is_sent(
    documents: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    what = ["--num-chunks", "4", "--chunk-tokens", "10", "--max-tokens", "2"]
    with running_server(api_key="a-secret") as server:
        assert load_test.main(load_words(server, documents, *what)) == 1
        assert "401 Unauthorized" in capsys.readouterr().out
        monkeypatch.setenv(API_KEY_VARIABLE, "a-secret")
        assert load_test.main(load_words(server, documents, *what)) == 0


def test_times_count_from_when_a_request_was_due() -> None:
    """One thread and three requests that are due at once: the later ones have waited."""
    with running_server(script={"delay_s": 0.02}) as fake:
        runner = LoadRunner(Address("127.0.0.1", fake.port), {}, num_threads=1, timeout_s=10)
        load = runner.run([Job("x", 5, due_s=0.0)] * 3, time_limit_s=60, on_outcome=lambda outcome: None)
    first_s = [outcome.token_times[0] - outcome.begin_s for outcome in load.outcomes]
    assert first_s[1] > 0.1 and first_s[2] > 0.2


def test_a_load_ends_in_time() -> None:
    with running_server(script={"delay_s": 0.05}) as fake:
        runner = LoadRunner(Address("127.0.0.1", fake.port), {}, num_threads=2, timeout_s=10)
        jobs = [Job("x", 4)] * 100 + [Job("x", 4, due_s=1000.0)]
        start_s = time.monotonic()
        load = runner.run(jobs, time_limit_s=0.3, on_outcome=lambda outcome: None)
    assert time.monotonic() - start_s < 10
    assert 2 <= len(load.outcomes) < 20 and load.num_not_sent == 101 - len(load.outcomes)
    assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


def test_ctrl_c_ends_a_load_with_what_there_is() -> None:
    def interrupt(outcome: Outcome) -> None:
        raise KeyboardInterrupt

    with running_server(script={"delay_s": 0.01}) as fake:
        runner = LoadRunner(Address("127.0.0.1", fake.port), {}, num_threads=2, timeout_s=10)
        load = runner.run([Job("x", 4)] * 100, time_limit_s=60, on_outcome=interrupt)
    assert 1 <= len(load.outcomes) < 20 and load.num_not_sent == 100 - len(load.outcomes)
    assert all(outcome.failure is None for outcome in load.outcomes)


def test_a_silent_server_is_a_failure() -> None:
    with running_server(script={"delay_s": 5.0}) as fake:
        runner = LoadRunner(Address("127.0.0.1", fake.port), {}, num_threads=2, timeout_s=0.2)
        load = runner.run([Job("x", 1)] * 2, time_limit_s=60, on_outcome=lambda outcome: None)
    assert load_figures(load)["failures"] == {"TimeoutError: the server sent nothing for 0.2 s": 2}


# The plot and mistakes


def test_the_plot_is_a_picture(server: Server, documents: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib, of the extra `test`, is not installed")
    file = tmp_path / "load.png"
    what = ["--num-chunks", "6", "--chunk-tokens", "10", "--max-tokens", "8", "--plot", str(file)]
    assert load_test.main(load_words(server, documents, *what)) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


def test_one_token_each_can_be_plotted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib, of the extra `test`, is not installed")
    load_plot.write_plot(tmp_path / "one.png", "one", Load(0.05, [Outcome(1, 0.0, 0.05, [0.04])], 0))
    assert (tmp_path / "one.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="no request was answered"):
        load_plot.write_plot(tmp_path / "none.png", "none", Load(0.05, [], 0))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--documents"),
        (["--documents", "absent"], "--documents must be a folder, got absent"),
        (["--documents", ".", "--num-chunks", "0"], "--num-chunks: must be an integer of at least 1, got 0"),
        (["--documents", ".", "--num-chunks", "few"], "--num-chunks: must be an integer of at least 1, got few"),
        (["--documents", ".", "--port", "65536"], "--port: must be an integer from 1 to 65535, got 65536"),
        (["--documents", ".", "--timeout", "0"], "--timeout: must be a number above 0 and at most 1000000, got 0"),
        (["--documents", ".", "--time-limit", "1e9"], "--time-limit: must be a number above 0 and at most 1000000"),
        (
            ["--documents", ".", "--json", "absent/x.json"],
            "--json: absent/x.json cannot be written: there is no folder",
        ),
        (["--documents", ".", "--json", "tests"], "--json: tests cannot be written: it is a folder"),
        (["--documents", ".", "--plot", "absent/x.png"], "--plot: absent/x.png cannot be written: there is no folder"),
        (["--documents", ".", "--rate", "-1"], "must be a number of at least 0, got -1"),
        (["--documents", ".", "--rate", "nan"], "must be a number of at least 0, got nan"),
        (["--documents", ".", "--max-tokens", "3", "--max-tokens-range", "1", "2"], "not allowed with"),
        (["--documents", "tests", "--num-chunks", "1", "--max-tokens-range", "3", "2"], "must be LOW HIGH, got 3 2"),
        (["--documents", "tests", "--num-chunks", "1", "--tokenizer", "/absent/model"], "/absent/model"),
    ],
)
def test_mistakes_are_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_test.main(words)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"220 mail.example.org\r\n\r\n", "RuntimeError: the server does not speak HTTP, it answered '220 mail"),
        (b"hello\r\n\r\n", "RuntimeError: the server does not speak HTTP, it answered 'hello'"),
        (b"HTTP/1.1\r\n\r\n", "RuntimeError: the server answered 'HTTP/1.1'"),
        (b"hello", "RuntimeError: the server closed the connection after b'hello'"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n", "it began a chunk with b'-5'"),
        (b"HTTP/1.1 200 OK\r\n\r\n<html>\n", "this is no message of the native protocol: b'<html>'"),
        (b'HTTP/1.1 200 OK\r\n\r\n{"choices": []}\n', "this is no message of the native protocol: b'{"),
    ],
)
def test_what_is_no_answer_of_the_protocol_is_a_failure(answer: bytes, reason: str) -> None:
    with canned_server(answer) as port:
        runner = LoadRunner(Address("127.0.0.1", port), {}, num_threads=1, timeout_s=10)
        load = runner.run([Job("x", 1)], time_limit_s=60, on_outcome=lambda outcome: None)
    [failure] = load_figures(load)["failures"]
    assert reason in failure


def test_nobody_there_is_named_before_anything_is_sent(documents: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # and does not listen
        port = str(sock.getsockname()[1])
        words = ["--documents", str(documents), "--port", port, "--num-chunks", "2", "--chunk-tokens", "10"]
        assert load_test.main(words) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: no answer from 127.0.0.1:{port}: ") and captured.err.count("\n") == 1
    assert captured.out == ""


def test_arrivals_beyond_any_clock_wait_for_the_time_limit() -> None:
    runner = LoadRunner(Address("127.0.0.1", 1), {}, num_threads=1, timeout_s=10)
    jobs = [Job("x", 1, due_s=1e300), Job("x", 1, due_s=float("inf"))]
    load = runner.run(jobs, time_limit_s=0.1, on_outcome=lambda outcome: None)
    assert load.num_not_sent == 2


def test_a_missing_matplotlib_is_named_before_anything_is_sent(
    documents: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # how Python marks what cannot be imported
    with pytest.raises(SystemExit):
        load_test.main(["--documents", str(documents), "--plot", "load.png", "--port", "1"])
    error = capsys.readouterr().err
    assert f"--plot needs matplotlib, which is not installed: {sys.executable} -m pip install" in error
