"""scripts/bench_http.py runs and reports, and HTTP does not cost most of the engine's speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import bench_http
from tests.helpers.checkpoints import cached_checkpoint
from tests.helpers.server import REAL, generate_bytes, read_response, running_server

NUM_REQUESTS = 64
DISASTER = 0.1
"""Of the speed without HTTP; on quiet cores it is 0.6 and more. Cores that others use make any closer bound fail."""


def test_http_costs_a_part_of_the_speed_without_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    words = ["--pairs", "2", "--waves", "1", "--idle-seconds", "1", "--idle-wait", "0.5", "--max-tries", "1"]
    assert bench_http.main([*words, "--json", str(path)]) == 0
    figures = json.loads(path.read_text())
    ratios = {name: ratio["tokens_per_s"] for name, ratio in figures["ratios"].items()}
    assert all(ratio["max"] > DISASTER for ratio in ratios.values()), ratios
    assert set(figures["idle_cores"]) == {"0", "256"}
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
