"""The choice of continuations: its order, and that it costs no more than what comes of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from vllm_lite.engine.beam_search import (
    BeamRules,
    BeamSearch,
    Candidates,
    Continuation,
    num_continuations_of_beam,
)


def make_search(width: int, num_end_ids: int, max_output_len: int = 100) -> BeamSearch[Continuation]:
    return BeamSearch(
        BeamRules(
            width=width,
            num_end_ids=num_end_ids,
            length_penalty=1.0,
            early_stopping=False,
            max_output_len=max_output_len,
        )
    )


def tables(num_beams: int, vocab_size: int, seed: int) -> tuple[list[float], npt.NDArray[np.float32]]:
    """Sums of beams, and logprobs [num_beams, vocab_size] with ties and tokens that may not be picked."""
    random = np.random.default_rng(seed)
    logprobs = -random.integers(1, 40, (num_beams, vocab_size)).astype(np.float32)
    logprobs[random.random(logprobs.shape) < 0.1] = -np.inf
    return (-random.integers(1, 30, num_beams)).astype(float).tolist(), logprobs


def best_of_each(table: npt.NDArray[np.float32], count: int) -> list[Candidates]:
    ids = np.argsort(-table, axis=1, kind="stable")[:, :count].astype(np.int32)
    return [Candidates(ids[beam], table[beam][ids[beam]]) for beam in range(len(table))]


@pytest.mark.parametrize("seed", range(20))
def test_they_come_best_first_and_earlier_beams_first_in_a_tie(seed: int) -> None:
    sums, table = tables(3, 50, seed)
    found = list(make_search(3, 4).best_continuations(sums, best_of_each(table, 50)))
    expected = [
        Continuation(beam, token_id, float(table[beam, token_id]), sums[beam] + float(table[beam, token_id]))
        for beam, token_id in itertools.product(range(3), range(50))
        if np.isfinite(table[beam, token_id])
    ]
    expected.sort(key=lambda c: (-c.cumulative_logprob, c.beam, c.token_id))
    assert found == expected[:15], "five times three, so that four end ids can be among them"


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("width", "num_ends"), [(2, 0), (2, 1), (3, 7), (8, 30)])
def test_what_a_beam_may_lack_changes_nothing(width: int, num_ends: int, seed: int) -> None:
    """Where end ids alone end beams, no more of a beam's tokens than asked for are ever needed."""
    sums, table = tables(width, 100, seed)
    ends = set(np.random.default_rng(seed + 1).permutation(100)[:num_ends].tolist())
    outcomes = []
    for count in (num_continuations_of_beam(width, num_ends), 100):
        search = make_search(width, num_ends)
        continuations = search.best_continuations(sums, best_of_each(table, count))
        running = search.advance(continuations, lambda c: c if c.token_id in ends else None, 5)
        outcomes.append((running, search.pool))
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0][0]) == width


def test_no_more_are_looked_at_than_can_become_something() -> None:
    looked_at: list[Continuation] = []

    def watched(continuations: Iterator[Continuation]) -> Iterator[Continuation]:
        for continuation in continuations:
            looked_at.append(continuation)
            yield continuation

    def ended(ids: Sequence[int], output_len: int) -> int:
        looked_at.clear()
        sums, table = tables(16, 2000, seed=0)
        search = make_search(16, 1000, max_output_len=9)
        continuations = search.best_continuations(sums, best_of_each(table, 1032))
        search.advance(
            watched(continuations), lambda c: c if c.token_id in ids or output_len == 9 else None, output_len
        )
        return len(looked_at)

    assert ended([], 5) <= 17
    assert ended([], 9) <= 17, "at the last token all of them end"
    assert ended(range(0, 2000, 2), 5) < 100
