"""The beams of one request: which sequences come out of a step, and what the caller gets to see. Knows no blocks."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from dataclasses import replace
from typing import NamedTuple

from vllm_lite.engine.beam_search import BeamRules, BeamSearch, Candidates, Continuation, Hypothesis
from vllm_lite.engine.sequence import Sequence
from vllm_lite.outputs import CompletionDelta

NEW = -1
"""Index of a candidate that has none yet."""


class BeamStep(NamedTuple):
    """What a step made of the beams."""

    sequences: list[Sequence]
    """Those that go on, best first; none once the search is over."""
    parents: list[Sequence]
    """What each of them continues."""
    outputs: tuple[CompletionDelta, ...]
    """All candidates there are now: those that go on, then the best of the finished ones."""


class Beams:
    """Owns the search. Beam i has index i among the candidates; finished ones come after the most beams there are."""

    def __init__(self, rules: BeamRules) -> None:
        self._rules = rules
        self._search: BeamSearch[CompletionDelta] = BeamSearch(rules)

    def advance(self, sequences: AbstractSequence[Sequence], candidates: AbstractSequence[Candidates]) -> BeamStep:
        """Takes the best next tokens of each sequence."""
        output_len = sequences[0].num_output_tokens + 1
        forks: dict[Continuation, tuple[Sequence, CompletionDelta]] = {}

        def finish(continuation: Continuation) -> CompletionDelta | None:
            sequence = sequences[continuation.beam].fork(NEW)
            top = candidates[continuation.beam].top_logprobs
            delta = replace(sequence.append(continuation.token_id, continuation.logprob, top), parent=continuation.beam)
            forks[continuation] = (sequence, delta)
            return None if sequence.finish_reason is None else delta

        continuations = self._search.best_continuations(
            [sequence.cumulative_logprob for sequence in sequences], candidates
        )
        running = self._search.advance(continuations, finish, output_len)
        outputs: list[CompletionDelta] = []
        for index, continuation in enumerate(running):
            sequence, delta = forks[continuation]
            sequence.index = index
            outputs.append(replace(delta, index=index, score=self.score(sequence)))
        self._search.pool = [
            Hypothesis(hypothesis.score, _moved(hypothesis, self._rules.width + rank))
            for rank, hypothesis in enumerate(self._search.pool)
        ]
        outputs += [hypothesis.value for hypothesis in self._search.pool]
        return BeamStep(
            sequences=[forks[continuation][0] for continuation in running],
            parents=[sequences[continuation.beam] for continuation in running],
            outputs=tuple(outputs),
        )

    def score(self, sequence: Sequence) -> float:
        """What it is compared with others by."""
        return self._rules.score(sequence.cumulative_logprob, sequence.num_output_tokens)


def _moved(hypothesis: Hypothesis[CompletionDelta], index: int) -> CompletionDelta:
    """Its delta of this step: all that is new of it if it has just finished, else only its place."""
    delta = hypothesis.value
    if delta.index == NEW:
        return replace(delta, index=index, score=hypothesis.score)
    return replace(
        delta,
        index=index,
        parent=delta.index,
        text="",
        token_ids=(),
        logprobs=None if delta.logprobs is None else (),
    )
