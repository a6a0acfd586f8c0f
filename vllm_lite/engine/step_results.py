"""What came of a step, handed to the sequences and prompts that it belongs to: the way back from `step.pack`."""

from __future__ import annotations

from typing import NamedTuple

from vllm_lite.engine.beam_search import Candidates
from vllm_lite.engine.sequence import Request, Sequence
from vllm_lite.engine.step import NO_TOKEN, Logprobs, StepOutput, StepPlan


class RowResult(NamedTuple):
    """A sampled row."""

    request: Request
    sequence: Sequence
    token_id: int
    """NO_TOKEN where the model gave nothing to choose from."""
    logprob: float | None
    """None where it is not asked for, and in beam search, whose candidates have their own."""
    top_logprobs: dict[int, float] | None
    candidates: Candidates | None
    """In beam search."""


class ScoredToken(NamedTuple):
    """A token of a prompt."""

    request: Request
    logprobs: dict[int, float]
    """Its own and those of the best tokens in its place."""


def sampled_rows(plan: StepPlan, output: StepOutput) -> list[RowResult]:
    """All of them, in the order of the plan."""
    rows = [(scheduled.request, sequence) for scheduled in plan.scheduled for sequence in scheduled.sampled]
    assert len(rows) == len(output.token_ids), "one token for each sampled row"
    results: list[RowResult] = []
    num_logprobs = num_beams = 0
    for (request, sequence), token_id in zip(rows, output.token_ids.tolist()):
        logprob, top, candidates = None, None, None
        rules = sequence.rules
        if rules.num_logprobs is not None and token_id != NO_TOKEN:
            logprob = float(output.logprobs.of_tokens[num_logprobs])
            top = _top(output.logprobs, num_logprobs, rules.num_logprobs)
        num_logprobs += rules.num_logprobs is not None
        if rules.num_continuations:
            ids, logprobs = output.continuations.token_ids[num_beams], output.continuations.logprobs[num_beams]
            count = rules.num_continuations
            candidates = Candidates(ids[:count], logprobs[:count], top)
            logprob = None
            num_beams += 1
        results.append(RowResult(request, sequence, token_id, logprob, top, candidates))
    return results


def scored_tokens(plan: StepPlan, output: StepOutput) -> list[ScoredToken]:
    """All of them, in the order of the plan."""
    tokens = [
        (scheduled.request, scheduled.sequence.token_ids[position])
        for scheduled in plan.scheduled
        for position in scheduled.scored
    ]
    assert len(tokens) == len(output.scores.of_tokens), "a logprob for each scored token"
    results: list[ScoredToken] = []
    for index, (request, token_id) in enumerate(tokens):
        top = _top(output.scores, index, request.params.prompt_logprobs or 0)
        results.append(ScoredToken(request, {token_id: float(output.scores.of_tokens[index]), **top}))
    return results


def _top(logprobs: Logprobs, row: int, count: int) -> dict[int, float]:
    return dict(zip(logprobs.top_ids[row, :count].tolist(), logprobs.top_logprobs[row, :count].tolist()))
