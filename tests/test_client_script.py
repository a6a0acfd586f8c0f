"""scripts/client.py against a real server, on a terminal and into a pipe."""

from __future__ import annotations

import ast
import json
import os
import pty
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from scripts import client
from tests.helpers.canned_server import canned_server
from tests.helpers.checkpoints import cached_checkpoint
from tests.helpers.server import REAL, ROOT, Server, running_server
from vllm_lite.config import API_KEY_VARIABLE
from vllm_lite.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server("--model", str(cached_checkpoint()), "--dtype", "float32", module=REAL) as server:
        yield server


def expected(server: Server, **fields: Any) -> str:
    return server.text(**{"prompt": client.PROMPT, "temperature": 0, **fields})


@pytest.mark.parametrize("mode", [[], ["--stream"]], ids=["whole", "stream"])
def test_prompt_and_candidate_are_printed(server: Server, mode: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert client.main(["--port", str(server.port), "--max-tokens", "20", *mode]) == 0
    text = expected(server, max_tokens=20)
    assert capsys.readouterr().out.splitlines() == [f"Prompt: {client.PROMPT!r}", f"Candidate 0: {text!r}"]


@pytest.mark.parametrize("mode", [[], ["--stream"]], ids=["whole", "stream"])
def test_beams_are_printed_best_first(server: Server, mode: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--port", str(server.port), "--n", "3", "--use-beam-search", "--max-tokens", "12", *mode]
    assert client.main(words) == 0
    fields = {"prompt": client.PROMPT, "n": 3, "use_beam_search": True, "temperature": 0, "max_tokens": 12}
    texts = server.post(fields).json()["text"]
    assert len(set(texts)) == 3
    assert capsys.readouterr().out.splitlines()[1:] == client.candidate_lines(texts)


@pytest.mark.parametrize("mode", [[], ["--stream"]], ids=["whole", "stream"])
def test_sampled_candidates_are_printed(server: Server, mode: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert client.main(["--port", str(server.port), "--n", "3", "--max-tokens", "30", *mode]) == 0
    prompt, *candidates = capsys.readouterr().out.splitlines()
    assert prompt == f"Prompt: {client.PROMPT!r}"
    assert [line.partition(": ")[0] for line in candidates] == ["Candidate 0", "Candidate 1", "Candidate 2"]
    texts = {ast.literal_eval(line.partition(": ")[2]) for line in candidates}
    assert len(texts) == 3 and all(text.startswith(client.PROMPT) for text in texts)


def test_lines_are_whole_where_there_is_no_terminal(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    assert client.main(["--port", str(server.port), "--max-tokens", "20", "--n", "2", "--use-beam-search"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:13] for line in lines] == ["Prompt: 'San ", "Candidate 0: ", "Candidate 1: "]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--use-beam-search"], "--use-beam-search needs --n of 2 or more, got 1"),
        (["--use-beam-search", "--n", "2", "--temperature", "0.5"], "leave out --temperature 0.5"),
        (["--n", "2", "--temperature", "0"], "--temperature 0 has one candidate, got --n 2"),
        (["--port", "0"], "--port: must be an integer from 1 to 65535, got 0"),
        (["--max-tokens", "many"], "--max-tokens: must be an integer of at least 1, got many"),
        (["--temperature", "hot"], "--temperature: must be a number of at least 0, got hot"),
    ],
)
def test_mistakes_are_named_before_anything_is_sent(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(client, "answers", lambda *_: pytest.fail("a request was sent"))
    with pytest.raises(SystemExit):
        client.main(words)
    assert message in capsys.readouterr().err


def test_a_stream_rewrites_its_lines_on_a_terminal(server: Server) -> None:
    controller, terminal = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "scripts.client",
        "--stream",
        "--port",
        str(server.port),
        "--max-tokens",
        "30",
        "Hi",
    ]
    environment = {**os.environ, "COLUMNS": "40", "LINES": "24"}
    written = b""
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=terminal) as process:
        os.close(terminal)
        try:
            while data := os.read(controller, 65536):
                written += data
        except OSError:  # how Linux tells that the other end is closed
            pass
        assert process.wait(60) == 0
    os.close(controller)
    text = expected(server, prompt="Hi", max_tokens=30)
    line = f"Candidate 0: {text!r}"
    rows = [line[start : start + 40] for start in range(0, len(line), 40)]
    screen, frames = on_screen(written.decode())
    assert screen == ["Prompt: 'Hi'", *rows]
    assert len(frames) > 20
    assert len(rows) > 1, "the text must be longer than a row"


def on_screen(written: str) -> tuple[list[str], list[list[str]]]:
    """The rows of a terminal in the end, and before each rewriting."""
    rows: list[str] = []
    frames: list[list[str]] = []
    for piece in written.replace("\r\n", "\n").split("\n"):
        if client.LINE_UP_AND_CLEAR in piece:
            frames.append(list(rows))
        while piece.startswith(client.LINE_UP_AND_CLEAR):
            rows.pop()
            piece = piece.removeprefix(client.LINE_UP_AND_CLEAR)
        rows.append(piece)
    assert rows.pop() == ""
    return rows, frames


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ([], {"n": 1, "use_beam_search": False, "temperature": 0.0, "stream": False, "max_tokens": 64}),
        (["--n", "3"], {"n": 3, "temperature": 1.0}),
        (["--n", "3", "--use-beam-search", "--stream"], {"n": 3, "temperature": 0.0, "use_beam_search": True}),
        (["--temperature", "0.5", "--max-tokens", "7"], {"temperature": 0.5, "max_tokens": 7}),
    ],
)
def test_options_become_fields_that_servers_take(words: list[str], fields: dict[str, Any]) -> None:
    sent = client.request_fields(client.make_parser().parse_args(words))
    assert fields.items() <= sent.items()
    SamplingParams.from_request({name: value for name, value in sent.items() if name not in ("prompt", "stream")})


def test_every_candidate_has_its_lines() -> None:
    assert client.candidate_lines(["a\nb", "c\x1b[1A"]) == ["Candidate 0: 'a\\nb'", "Candidate 1: 'c\\x1b[1A'"]
    assert client.wrapped("abcdef", 4) == ["abcd", "ef"]
    assert client.wrapped("你好吗", 4) == ["你好", "吗"]
    assert client.wrapped("cafe\u0301s", 4) == ["cafe\u0301", "s"]
    assert client.wrapped("", 4) == [""]


def test_a_screen_shows_what_fits_and_in_the_end_everything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    monkeypatch.setenv("LINES", "4")
    screen = client.Screen(sys.stdout)
    screen.show(["1", "2"])
    screen.show(["a" * 25, "b" * 12])
    screen.show(["a" * 25, "b" * 12], is_last=True)
    up = client.LINE_UP_AND_CLEAR
    first, second, last = "1\n2\n", "aaaaa\nbbbbbbbbbb\nbb\n", "aaaaaaaaaa\naaaaaaaaaa\naaaaa\nbbbbbbbbbb\nbb\n"
    assert capsys.readouterr().out == first + 2 * up + second + 3 * up + last


def test_the_key_of_the_environment_is_sent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_server(api_key="a-secret") as server:
        words = ["--port", str(server.port), "--max-tokens", "3"]
        assert client.main(words) == 1
        assert "401" in capsys.readouterr().err
        monkeypatch.setenv(API_KEY_VARIABLE, "a-secret")
        assert client.main(words) == 0


def test_a_refusal_is_shown(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert client.main(["--port", str(server.port), "x" * 500]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: the server answered 400: ") and "context holds 128" in error


def test_nobody_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # and does not listen
        port = sock.getsockname()[1]
        assert client.main(["--port", str(port)]) == 1
    assert f"error: no answer from 127.0.0.1:{port}: " in capsys.readouterr().err


MESSAGE = json.dumps({"text": ["ab"]}).encode() + b"\0"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n", "error: the answer breaks off"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n", "error: the answer breaks off"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nno\0\0", "does not speak the native protocol"),
        (b"220 mail.example.org\r\n\r\n", "does not speak the native protocol"),
    ],
    ids=["no last chunk", "half a chunk", "no JSON", "no HTTP"],
)
def test_a_broken_answer_is_named(answer: bytes, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with canned_server(answer % (len(MESSAGE), MESSAGE) if b"%" in answer else answer) as port:
        assert client.main(["--stream", "--port", str(port)]) == 1
    assert message in capsys.readouterr().err
