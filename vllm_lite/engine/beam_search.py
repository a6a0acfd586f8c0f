"""Beam search over scores alone: which continuations go on, which have finished, and when the search is over.

The rules, and with them ids and scores, are those of transformers 5, whose `_beam_search` they were read from. Knows
token ids and scores; what ends a continuation is asked of whoever knows its text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

Finished = TypeVar("Finished")
MOST_EXTREME = 1e150
"""Of what sums are divided by, either way: scores stay finite and in order."""


class Candidates(NamedTuple):
    """The best next tokens of one beam, best first."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    """-inf for a token that may not be picked."""
    top_logprobs: Mapping[int, float] | None = None
    """The model's best tokens, whatever may be picked, where the caller wants them."""


class Continuation(NamedTuple):
    """A beam and a token that it may go on with."""

    beam: int
    token_id: int
    logprob: float
    """Of the token."""
    cumulative_logprob: float
    """Of all generated tokens."""


@dataclass(frozen=True)
class Hypothesis(Generic[Finished]):
    """A finished beam in the pool."""

    score: float
    value: Finished


@dataclass(frozen=True)
class BeamRules:
    """What the caller asked for."""

    width: int
    """Beams that go on, and hypotheses that are kept."""
    num_end_ids: int
    """How many tokens end a beam that takes them."""
    length_penalty: float
    early_stopping: bool | Literal["never"]
    max_output_len: int
    """Most tokens that can be generated."""

    def score(self, cumulative_logprob: float, output_len: int) -> float:
        """What hypotheses of different lengths are compared by."""
        return penalised(cumulative_logprob, output_len, self.length_penalty)

    @property
    def num_continuations(self) -> int:
        """How many are looked at in a step, over all beams: enough that `width` of them can go on, whichever end."""
        return max(2, 1 + self.num_end_ids) * self.width


def num_continuations_of_beam(width: int, num_end_ids: int) -> int:
    """How many next tokens of one beam are looked at.

    `width` of them can go on, whichever end; as many again are for those that stop strings end.
    """
    return 2 * width + num_end_ids


def penalised(cumulative_logprob: float, output_len: int, length_penalty: float) -> float:
    """cumulative_logprob / output_len ** length_penalty, finite for every penalty and length."""
    try:
        divisor = float(max(output_len, 1)) ** length_penalty
    except OverflowError:
        divisor = MOST_EXTREME
    return cumulative_logprob / float(min(max(divisor, 1 / MOST_EXTREME), MOST_EXTREME))


class BeamSearch(Generic[Finished]):
    """The pool of hypotheses and the decisions of each step. `Finished` is what the caller keeps of one."""

    def __init__(self, rules: BeamRules) -> None:
        self.rules = rules
        self.pool: list[Hypothesis[Finished]] = []
        """The best finished so far, best first."""

    def best_continuations(
        self, cumulative_logprobs: Sequence[float], candidates: Sequence[Candidates]
    ) -> Iterator[Continuation]:
        """Over all beams, best first; of equally good ones the earlier beam's and, within it, the better token's.

        There can be a hundred times as many as go on, so they are made one by one.
        """
        counts = [len(best.token_ids) for best in candidates]
        beams = np.repeat(np.arange(len(candidates)), counts)
        token_ids = np.concatenate([best.token_ids for best in candidates])
        logprobs = np.concatenate([best.logprobs for best in candidates]).astype(np.float64)
        totals = np.repeat(np.array(cumulative_logprobs, np.float64), counts) + logprobs
        order = np.argsort(-totals, kind="stable")[: self.rules.num_continuations]
        for index in order[np.isfinite(totals[order])].tolist():
            yield Continuation(int(beams[index]), int(token_ids[index]), float(logprobs[index]), float(totals[index]))

    def advance(
        self,
        continuations: Iterable[Continuation],
        finish: Callable[[Continuation], Finished | None],
        output_len: int,
    ) -> list[Continuation]:
        """Takes a step's best continuations, all of `output_len` tokens; returns those that go on.

        `finish` says what has become of one that is finished, and None of one that is not. Only the best `width`
        continuations can become hypotheses; the others are there to go on in their place, if any can.
        """
        running: list[Continuation] = []
        finished: list[Hypothesis[Finished]] = []
        for rank, continuation in enumerate(continuations):
            is_beyond_pool = rank >= self.rules.width
            if len(running) == self.rules.width or (is_beyond_pool and output_len >= self.rules.max_output_len):
                break
            value = finish(continuation)
            if value is None:
                running.append(continuation)
            elif not is_beyond_pool:
                finished.append(Hypothesis(self.rules.score(continuation.cumulative_logprob, output_len), value))
        if not (self.rules.early_stopping is True and self._is_full):
            merged = sorted([*self.pool, *finished], key=lambda hypothesis: -hypothesis.score)
            self.pool = merged[: self.rules.width]
        return [] if self._is_over(running, output_len) else running

    @property
    def _is_full(self) -> bool:
        return len(self.pool) == self.rules.width

    def _is_over(self, running: Sequence[Continuation], output_len: int) -> bool:
        """Whether no running beam is expected to become better than the worst hypothesis."""
        if not running:
            return True
        if not self._is_full:
            return False
        if self.rules.early_stopping is True:
            return True
        is_patient = self.rules.early_stopping == "never" and self.rules.length_penalty > 0
        longest = self.rules.max_output_len if is_patient else output_len
        return self.rules.score(running[0].cumulative_logprob, longest) <= self.pool[-1].score
