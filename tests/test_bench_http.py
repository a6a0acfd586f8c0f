"""scripts/bench_http.py runs, and HTTP costs no more than a part of the engine's speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import bench_http
from tests.helpers.checkpoints import cached_checkpoint
from tests.helpers.server import REAL, generate_bytes, read_response, running_server

NUM_REQUESTS = 64
WHOLE, STREAMED = 0.4, 0.3
"""Of the speed without HTTP, at least, on cores that other tests use: half of what it is on quiet ones."""


def test_http_costs_a_part_of_the_speed_without_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    words = ["--pairs", "5", "--waves", "2", "--idle-seconds", "1", "--idle-wait", "0.5", "--max-tries", "1"]
    assert bench_http.main([*words, "--json", str(path)]) == 0
    figures = json.loads(path.read_text())
    ratios = {name: ratio["tokens_per_s"] for name, ratio in figures["ratios"].items()}
    assert ratios["http / offline"]["median"] > WHOLE, ratios
    assert ratios["http-stream / offline"]["median"] > STREAMED, ratios
    assert ratios["http beside idle / http"]["max"] > 0.7, ratios
    assert figures["idle_cores"]["256"] < figures["idle_cores"]["0"] + 0.05, figures["idle_cores"]
    assert "http-stream / offline" in capsys.readouterr().out


def test_a_request_takes_one_short_line_of_the_log_and_no_prompt() -> None:
    with running_server("--model", str(cached_checkpoint(max_position_embeddings=1024)), module=REAL) as server:
        before = server.log
        with server.connect() as connection:
            for number in range(NUM_REQUESTS):
                fields = {"prompt": "secret " * 100, "max_tokens": 4, "stream": number % 2 == 0}
                connection.sendall(generate_bytes(fields, "Connection: keep-alive"))
                assert read_response(connection).status == 200
        written = server.log.removeprefix(before)
    assert written.count("request ") == NUM_REQUESTS
    assert len(written) / NUM_REQUESTS < 500
    assert "secret" not in written
