"""The choices of an answer, from the engine's deltas: whole, or as chunks of a stream. Knows neither HTTP nor endpoint.

Of what is to be sent whole, every token is encoded once; of a stream, nothing is kept that has been sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vllm_lite.outputs import CandidateTable, CompletionDelta, FinishReason, RequestDelta

Entry = tuple[bytes, ...]
"""What is said of one token, as JSON."""


@dataclass(frozen=True)
class Step:
    """What a step of the engine brought for one of the prompts of a request."""

    prompt_index: int
    prompt_token_ids: Sequence[int]
    delta: RequestDelta


class Logprobs(Protocol):
    """Makes entries of the logprobs of one candidate, token by token."""

    def entries(self, output: CompletionDelta) -> list[Entry]:
        """Of the new tokens."""

    def fork(self) -> Logprobs:
        """Another one that has come as far."""


@dataclass(frozen=True)
class Opening:
    """What every choice of a prompt begins with, before anything has been generated."""

    text: str = ""
    entries: Sequence[Entry] = ()
    logprobs: Logprobs | None = None
    """To be forked for each candidate; None where no logprobs are wanted."""


class ChoiceFormat(Protocol):
    """How an endpoint writes its choices."""

    def opening(self, first: Step) -> Opening:
        """Of a prompt, when its first step is there."""

    def choice(self, index: int, text: str, entries: Sequence[Entry] | None, reason: FinishReason | None) -> bytes:
        """A whole one. `entries` are None where no logprobs are wanted."""

    def opening_chunk(self, index: int, opening: Opening) -> bytes | None:
        """What a choice of a stream says first, if anything."""

    def chunks(
        self, index: int, text: str, entries: Sequence[Entry] | None, reason: FinishReason | None
    ) -> list[bytes]:
        """What a choice of a stream says with new text and, at its end, with the reason."""


@dataclass
class _Candidate:
    texts: list[str]
    entries: list[Entry]
    logprobs: Logprobs | None
    finish_reason: FinishReason | None = None

    @classmethod
    def begin(cls, opening: Opening) -> _Candidate:
        logprobs = None if opening.logprobs is None else opening.logprobs.fork()
        return cls([opening.text], list(opening.entries), logprobs)

    def copy(self) -> _Candidate:
        logprobs = None if self.logprobs is None else self.logprobs.fork()
        return _Candidate(self.texts[:], self.entries[:], logprobs, self.finish_reason)

    def add(self, output: CompletionDelta) -> None:
        self.texts.append(output.text)
        if self.logprobs is not None:
            self.entries += self.logprobs.entries(output)
        self.finish_reason = output.finish_reason

    def json(self, index: int, choice_format: ChoiceFormat) -> bytes:
        entries = None if self.logprobs is None else self.entries
        return choice_format.choice(index, "".join(self.texts), entries, self.finish_reason)


class WholeChoices:
    """All choices of an answer. Those of a prompt stand together, the best first."""

    def __init__(self, choice_format: ChoiceFormat, num_prompts: int, num_outputs: int) -> None:
        self._format = choice_format
        self._num_outputs = num_outputs
        self._tables: list[CandidateTable[_Candidate] | None] = [None] * num_prompts

    def add(self, step: Step, opening: Opening) -> None:
        """Takes the next step of a prompt; `opening` is the prompt's."""
        table = self._tables[step.prompt_index]
        if table is None:
            table = CandidateTable(lambda: _Candidate.begin(opening), _Candidate.copy)
            self._tables[step.prompt_index] = table
        for candidate, output in table.advance(step.delta):
            candidate.add(output)

    def json(self) -> list[bytes]:
        """Each choice."""
        best = [[] if table is None else table.best(self._num_outputs) for table in self._tables]
        return [
            candidate.json(prompt_index * self._num_outputs + rank, self._format)
            for prompt_index, candidates in enumerate(best)
            for rank, candidate in enumerate(candidates)
        ]


@dataclass
class ChunkedChoices:
    """What the chunks of a stream say of the choices."""

    choice_format: ChoiceFormat
    num_outputs: int
    _logprobs: dict[int, Logprobs | None] = field(default_factory=dict)
    """Of each choice that has begun."""

    def add(self, step: Step, opening: Opening) -> list[bytes]:
        """The choices of the chunks that follow on a step, one for each chunk."""
        chunks: list[bytes] = []
        for output in step.delta.outputs:
            index = step.prompt_index * self.num_outputs + output.index
            if index not in self._logprobs:
                self._logprobs[index] = None if opening.logprobs is None else opening.logprobs.fork()
                first = self.choice_format.opening_chunk(index, opening)
                chunks += [] if first is None else [first]
            logprobs = self._logprobs[index]
            entries = None if logprobs is None else logprobs.entries(output)
            if output.text or entries or output.finish_reason is not None:
                chunks += self.choice_format.chunks(index, output.text, entries, output.finish_reason)
        return chunks


@dataclass
class Usage:
    """Counts tokens: those of each prompt once, and all that were generated, shown or not."""

    _num_prompt_tokens: dict[int, int] = field(default_factory=dict)
    _num_completion_tokens: int = 0

    def add(self, step: Step) -> None:
        """Takes the next step."""
        self._num_prompt_tokens[step.prompt_index] = len(step.prompt_token_ids)
        self._num_completion_tokens += sum(len(output.token_ids) for output in step.delta.outputs)

    def counts(self) -> dict[str, int]:
        """As the protocol has them."""
        num_prompt_tokens = sum(self._num_prompt_tokens.values())
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": self._num_completion_tokens,
            "total_tokens": num_prompt_tokens + self._num_completion_tokens,
        }
