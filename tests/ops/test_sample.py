"""The CPU kernel that picks tokens, against the reference: the same token for every row."""

from __future__ import annotations

import random as random_module
from dataclasses import replace

import pytest
import torch

from tests.helpers.cpu_kernels import PATHS, cpu_space
from tests.helpers.sampling import Row, sampling_input
from tests.ops.tensors import random, tokens_shape, workspace
from vllm_lite.engine.step import NO_TOKEN
from vllm_lite.ops import sample as op
from vllm_lite.ops.workspace import Workspace
from vllm_lite.worker.sampler import _parameters

NEAR_ONE, NEAR_ZERO = 1 - 2**-24, 1e-30


@pytest.fixture(params=PATHS)
def space(request: pytest.FixtureRequest) -> Workspace:
    return cpu_space(request.param)


def pick(space: Workspace, logits: torch.Tensor, rows: list[Row]) -> list[int]:
    """The logits lie in a wider tensor, as the rows of a smaller batch do in a larger one."""
    wide = torch.full((len(rows) + 1, logits.shape[1] + 3), torch.nan)
    wide[: len(rows), :-3] = logits
    out = torch.full((len(rows) + 1,), 77, dtype=torch.int32)
    parameters = _parameters(sampling_input(rows), logits.shape[1])
    op.sample(space, tokens_shape(len(rows), len(rows)), wide[:, :-3], parameters, out)
    assert out[-1] == 77
    return out[:-1].tolist()


def assert_same(space: Workspace, logits: torch.Tensor, rows: list[Row]) -> list[int]:
    picked = pick(space, logits, rows)
    assert picked == pick(workspace(), logits, rows)
    return picked


def random_row(source: random_module.Random, vocab_size: int) -> Row:
    return Row(
        temperature=source.choice([0.0, 1e-5, 0.1, 0.7, 1.0, 1.0, 3.0, 1e6]),
        top_k=source.choice([0, 0, 0, 1, 2, 50, 300, vocab_size - 1, vocab_size]),
        top_p=source.choice([1.0, 1.0, NEAR_ZERO, 0.1, 0.5, 0.9, 0.999, NEAR_ONE]),
        min_p=source.choice([0.0, 0.0, 0.0, 1e-4, 0.05, 0.5, 1.0]),
        seed=source.getrandbits(64),
        position=source.randrange(1000),
    )


def logits_of(kind: str, num_rows: int, vocab_size: int) -> torch.Tensor:
    values = random(num_rows, vocab_size, seed=vocab_size)
    kinds = {
        "flat": values * 0.01,
        "normal": values * 3,
        "peaked": values * 30,
        "tied": (values * 2).round(),
        "equal": torch.full_like(values, 2.5),
        "two values": (values > 1).float() * 4,
        "mostly -inf": values.masked_fill(values < 1.5, -torch.inf),
        "zeros of both signs": torch.where(values > 0, 0.0, -0.0),
        "large": values * 1e37,
    }
    return kinds[kind]


@pytest.mark.parametrize("vocab_size", [1, 2, 31, 500, 3001])
@pytest.mark.parametrize(
    "kind",
    ["flat", "normal", "peaked", "tied", "equal", "two values", "mostly -inf", "zeros of both signs", "large"],
)
def test_random_rows(space: Workspace, kind: str, vocab_size: int) -> None:
    source = random_module.Random(f"{kind} {vocab_size}")
    rows = [random_row(source, vocab_size) for _ in range(60)]
    assert_same(space, logits_of(kind, 60, vocab_size), rows)


@pytest.mark.parametrize("kind", ["flat", "normal", "tied"])
def test_a_large_vocabulary(kind: str) -> None:
    source = random_module.Random(kind)
    rows = [random_row(source, 49152) for _ in range(40)]
    assert_same(cpu_space(), logits_of(kind, 40, 49152), rows)


@pytest.mark.parametrize("row", [Row(), Row(min_p=0.01), Row(top_p=0.9), Row(top_p=0.5, min_p=0.01), Row(top_k=40)])
def test_uniform_numbers_at_the_ends(space: Workspace, row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least and the greatest number pick the first and the last token that is kept."""
    logits = logits_of("normal", 2, 700)
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    monkeypatch.setattr("vllm_lite.worker.sampler.uniforms", lambda seeds, positions: ends.numpy())
    first, last = assert_same(space, logits[:1].expand(2, -1), [row, row])
    order = sorted(range(700), key=lambda token: (-logits[0, token].item(), token))
    if row.top_k or row.top_p < 1:
        assert first == order[0]
        assert last == order[39] if row.top_k else last in order
    elif not row.min_p:
        assert (first, last) == (0, 699)


def test_rows_that_are_not_finite(space: Workspace) -> None:
    for row in (Row(), Row(temperature=0), Row(top_k=5), Row(top_p=0.9)):
        for place in (0, 300, 511, 699):  # in a vector, and among the last tokens
            logits = logits_of("normal", 5, 700)
            logits[0, place], logits[1, place] = torch.nan, torch.inf
            logits[2], logits[3, place] = -torch.inf, -torch.inf
            picked = assert_same(space, logits, [replace(row, seed=r) for r in range(5)])
            assert [token == NO_TOKEN for token in picked] == [True, True, True, False, False]


def test_a_row_does_not_depend_on_its_neighbours_or_the_threads() -> None:
    source = random_module.Random(1)
    rows = [random_row(source, 3001) for _ in range(40)]
    logits = logits_of("flat", 40, 3001)
    alone = [pick(cpu_space(num_threads=1), logits[r : r + 1], [row])[0] for r, row in enumerate(rows)]
    for num_threads in (1, 2, 3):
        order = source.sample(range(40), 30)
        together = pick(cpu_space(num_threads=num_threads), logits[order], [rows[r] for r in order])
        assert together == [alone[r] for r in order]


def test_a_vocabulary_too_large_for_the_kernel_goes_to_the_reference() -> None:
    space = cpu_space()
    logits = random(1, 500_000)
    assert_same(space, logits, [Row(top_k=3)])
