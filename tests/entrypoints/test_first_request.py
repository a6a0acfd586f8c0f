"""Case F2: whatever is made once is made before the port opens, and kept for the next start."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.helpers.cpu_kernels import missing_requirement
from tests.helpers.server import REAL, Server, running_server

FLAGS = ["--device", "cpu", "--max-model-len", "1024", "--num-kv-blocks", "200"]
COMPILING = "compiling the CPU kernels"
NOISE_S = 0.5
"""What a machine that is full of tests may add to a request; compiling takes ten times as long."""


@pytest.mark.skipif(missing_requirement() is not None, reason=str(missing_requirement()))
def test_case_f2_the_first_request_waits_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seconds_to_ready = []
    for is_first in (True, False):
        started = time.monotonic()
        with running_server(*FLAGS, module=REAL) as server:
            seconds_to_ready.append(time.monotonic() - started)
            assert (COMPILING in server.log) is is_first
            for num_words in (5, 500):
                first, second, third = (seconds_to_first_token(server, number, num_words) for number in range(3))
                assert first <= 2 * max(second, third) + NOISE_S, (first, second, third)
            assert server.log.count(COMPILING) == is_first
    assert seconds_to_ready[1] < seconds_to_ready[0]


def seconds_to_first_token(server: Server, number: int, num_words: int) -> float:
    """Of a prompt of its own, so that no cached prefix helps."""
    prompt = " ".join(["one", "two", "three"][number] for _ in range(num_words))
    begin = time.monotonic()
    server.text(prompt=prompt, max_tokens=1, temperature=0)
    return time.monotonic() - begin
