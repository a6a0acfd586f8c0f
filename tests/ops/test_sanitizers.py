"""The CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer, on the tests of every op.

torch's memory is watched too, so that an access one element beyond a tensor ends the process with a message.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.cpu_kernels import SANITIZED, SANITIZED_PATHS, compiled
from vllm_lite.kernels.cpu_library import find_compiler

ROOT = Path(__file__).parents[2]
TESTS = ("tests/ops/test_cpu_kernels.py", "tests/ops/test_sample.py")
SELECTION = "(native or (avx512_bf16 and not dtype0)) and not bits and not largest"
"""Both lengths of vectors, both kinds of products. What compares bits only repeats what the others execute."""


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """Of a process that runs sanitised kernels, which are compiled by then."""
    for flags in SANITIZED_PATHS.values():
        compiled(flags)
    compiler = find_compiler()
    assert compiler is not None
    command = [compiler, "-print-file-name=libasan.so"]
    runtime = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(runtime).is_absolute():
        pytest.skip(f"{compiler} has no libasan.so, which must be loaded before Python")
    options = {"LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0", SANITIZED: "1"}
    return {**os.environ, **options, "UBSAN_OPTIONS": "print_stacktrace=1"}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


def test_every_op_is_clean(environment: dict[str, str]) -> None:
    result = run(environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0", "-k", SELECTION, *TESTS)
    assert result.returncode == 0, (result.stdout + result.stderr)[-5000:]
    assert " passed" in result.stdout and "skipped" not in result.stdout
    assert "runtime error" not in result.stdout + result.stderr


PLANTED = """
import torch
from tests.helpers.cpu_kernels import cpu_kernels
from tests.ops.tensors import tokens_shape
kernels = cpu_kernels("native", 1)
{}
print("unseen")
"""
BEYOND = """
ids, weight, out = torch.tensor([15], dtype=torch.int32), torch.zeros(16, 8), torch.zeros(1, 8)
kernels.call("embedding_float32", tokens_shape(1), ids, weight, out, 8)
ids[0] = 16
kernels.call("embedding_float32", tokens_shape(1), ids, weight, out, 8)
"""
MISALIGNED = """
ids = torch.frombuffer(bytearray(9), dtype=torch.int32, offset=1, count=2)
kernels.call("embedding_float32", tokens_shape(1), ids, torch.zeros(16, 8), torch.zeros(1, 8), 8)
"""


@pytest.mark.parametrize(
    ("code", "message"),
    [(BEYOND, "AddressSanitizer: heap-buffer-overflow"), (MISALIGNED, "runtime error: load of misaligned address")],
    ids=["beyond a tensor", "misaligned"],
)
def test_a_planted_error_is_seen(code: str, message: str, environment: dict[str, str]) -> None:
    result = run(environment, "-c", PLANTED.format(code))
    assert result.returncode != 0
    assert message in result.stderr and "embedding.cpp" in result.stderr, result.stderr[-3000:]
    assert "unseen" not in result.stdout
