"""What a request gives back: deltas as the engine makes them, and the cumulative outputs that users see.

A delta costs what is new in one step, so a reader that stalls holds no copies of the text; whoever reads adds deltas
up in an `OutputAccumulator`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

FinishReason = Literal["stop", "length", "abort"]
Outcome = Literal["stop", "length", "abort", "failed"]


@dataclass(frozen=True)
class CompletionOutput:
    """One candidate of a request, as far as it has been generated; `index` is its place among them, best first.

    `finish_reason` is None while it is being generated. `stop_reason` is the stop string or stop id that ended it, and
    None for an end of sequence, a length limit or an abort.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, float]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A request with all its candidates; field for field what vLLM 0.2.7 returned."""

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    prompt_logprobs: list[dict[int, float] | None] | None
    outputs: list[CompletionOutput]
    finished: bool


@dataclass(frozen=True)
class CompletionDelta:
    """What one step added to one candidate. `text` is empty for a token whose text is still held back."""

    index: int
    """Names the candidate among those of its request."""
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    """Of all tokens so far; None where logprobs are neither asked for nor needed."""
    logprobs: tuple[dict[int, float], ...] | None = None
    """For each of `token_ids`, its own logprob and those of the best tokens in its place; None if not asked for."""
    score: float = 0.0
    """What candidates are ordered by."""
    parent: int | None = None
    """The candidate that it continues. Where it is given, in beam search, the delta of the request has all candidates
    there are from now on, each with what it continues."""


@dataclass(frozen=True)
class RequestDelta:
    """What one step added to a request: one message of a stream."""

    request_id: str
    outputs: tuple[CompletionDelta, ...]
    finished: bool
    prompt_logprobs: list[dict[int, float] | None] | None = None
    """In the first delta, where they are asked for."""

    @property
    def has_parents(self) -> bool:
        """Whether its outputs are all the candidates that there are from now on."""
        return any([output.parent is not None for output in self.outputs])  # a list: faster for one, as most have


@dataclass(frozen=True)
class RequestTally:
    """What the engine's counters have taken of one request that was queued, once it has ended."""

    outcome: Outcome
    """Under which it was counted: "length" where one candidate of a finished request was cut off, else "stop"."""
    num_prompt_tokens: int
    """0 where the prompt was not computed to its end."""
    num_generated_tokens: int
    """Of all candidates and beams, whether or not anybody has read them."""
    admission_time_s: float | None
    """When it first left the queue, in monotonic seconds; None where it never did."""
    first_token_time_s: float | None
    """When the step ended that brought its first token; None where none did."""


State = TypeVar("State")


class CandidateTable(Generic[State]):
    """What is known of each candidate of a request, and their order."""

    def __init__(self, new: Callable[[], State], copy: Callable[[State], State]) -> None:
        """`new` makes what is known of one that begins, `copy` that of one that continues another."""
        self._new = new
        self._copy = copy
        self._states: dict[int, State] = {}
        self._scores: dict[int, float] = {}

    def advance(self, delta: RequestDelta) -> Iterator[tuple[State, CompletionDelta]]:
        """What is known of each candidate that the delta has something for, to be changed accordingly."""
        states = self._states
        if delta.has_parents:  # it has all there are
            self._states = {
                output.index: self._copy(states[output.parent]) if output.parent in states else self._new()
                for output in delta.outputs
            }
            self._scores = {}
        for output in delta.outputs:
            if output.index not in self._states:
                self._states[output.index] = self._new()
            self._scores[output.index] = output.score
            yield self._states[output.index], output

    def best(self, count: int) -> list[State]:
        """Of the best candidates, the best first; of equal ones, that with the lower index."""
        if len(self._states) == 1:  # for every message of most streams
            return list(self._states.values())[:count]
        order = sorted(self._states, key=lambda index: (-self._scores[index], index))
        return [self._states[index] for index in order[:count]]


@dataclass
class _Candidate:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    last: CompletionDelta | None = None

    def copy(self) -> _Candidate:
        return _Candidate(self.text, self.token_ids[:], self.logprobs[:], self.last)

    def add(self, delta: CompletionDelta) -> None:
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs or ())
        self.last = delta

    def output(self, index: int) -> CompletionOutput:
        last = self.last
        assert last is not None, "a candidate begins with a delta"
        return CompletionOutput(
            index=index,
            text=self.text,
            token_ids=tuple(self.token_ids),
            cumulative_logprob=last.cumulative_logprob,
            logprobs=None if last.logprobs is None else self.logprobs[:],
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
        )


@dataclass
class OutputAccumulator:
    """Adds up the deltas of one request. Of its candidates, the best `num_outputs` are shown, the best first."""

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    num_outputs: int = 1
    finished: bool = False
    prompt_logprobs: list[dict[int, float] | None] | None = None
    _candidates: CandidateTable[_Candidate] = field(default_factory=lambda: CandidateTable(_Candidate, _Candidate.copy))

    def add(self, delta: RequestDelta) -> None:
        """Takes the next delta of the request."""
        for candidate, output in self._candidates.advance(delta):
            candidate.add(output)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.finished = delta.finished

    def texts(self) -> list[str]:
        """The text of each candidate so far, without the prompt."""
        return [candidate.text for candidate in self._candidates.best(self.num_outputs)]

    def output(self) -> RequestOutput:
        """Everything so far, as a value of its own."""
        best = self._candidates.best(self.num_outputs)
        outputs = [candidate.output(rank) for rank, candidate in enumerate(best)]
        return RequestOutput(
            self.request_id, self.prompt, self.prompt_token_ids, self.prompt_logprobs, outputs, self.finished
        )
