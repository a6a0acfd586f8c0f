"""What a request gives back: deltas as the engine makes them, and the cumulative outputs that users see.

A delta costs what is new in one step, so a reader that stalls holds no copies of the text; whoever reads adds deltas
up in an `OutputAccumulator`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class CompletionOutput:
    """One candidate of a request, as far as it has been generated.

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
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True)
class RequestDelta:
    """What one step added to a request: one message of a stream."""

    request_id: str
    outputs: tuple[CompletionDelta, ...]
    finished: bool


@dataclass
class OutputAccumulator:
    """Adds up the deltas of one request."""

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    num_outputs: int = 1
    finished: bool = False
    _texts: list[str] = field(default_factory=list)
    _token_ids: list[list[int]] = field(default_factory=list)
    _last: list[CompletionDelta | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._texts = [""] * self.num_outputs
        self._token_ids = [[] for _ in range(self.num_outputs)]
        self._last = [None] * self.num_outputs

    def add(self, delta: RequestDelta) -> None:
        """Takes the next delta of the request."""
        for output in delta.outputs:
            self._texts[output.index] += output.text
            self._token_ids[output.index].extend(output.token_ids)
            self._last[output.index] = output
        self.finished = delta.finished

    def texts(self) -> list[str]:
        """The text of each candidate so far, without the prompt."""
        return self._texts

    def output(self) -> RequestOutput:
        """Everything so far, as a value of its own."""
        outputs = [
            CompletionOutput(
                index=index,
                text=text,
                token_ids=tuple(ids),
                finish_reason=last.finish_reason if last else None,
                stop_reason=last.stop_reason if last else None,
            )
            for index, (text, ids, last) in enumerate(zip(self._texts, self._token_ids, self._last))
        ]
        return RequestOutput(self.request_id, self.prompt, self.prompt_token_ids, None, outputs, self.finished)
