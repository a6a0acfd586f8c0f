"""The bytes of a stream: messages built from deltas. Knows neither HTTP nor the engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol

from vllm_lite.entrypoints.details import all_details, candidate_details, prompt_details
from vllm_lite.outputs import CompletionOutput, OutputAccumulator, RequestDelta, best_first, continued
from vllm_lite.sampling_params import SamplingParams

DELIMITERS = {"null": b"\0", "newline": b"\n"}


class StreamMessages(Protocol):
    """Builds the messages of one stream."""

    def add(self, delta: RequestDelta) -> bytes:
        """The message that follows this delta, with its delimiter."""


class CumulativeTexts:
    """Messages with everything so far: `{"text": [prompt + output, ...]}`, the best candidate first.

    JSON escapes character by character, so the prompt is escaped once and every delta once, and a message is a join of
    what is there.
    """

    def __init__(self, prompt: str, num_outputs: int, delimiter: bytes) -> None:
        self._prompt = _escape(prompt)
        self._num_outputs = num_outputs
        self._outputs: dict[int, bytearray] = {}
        self._scores: dict[int, float] = {}
        self._end = b'"]}' + delimiter

    def add(self, delta: RequestDelta) -> bytes:
        """As `StreamMessages`."""
        self._outputs = continued(self._outputs, delta, lambda: bytearray(self._prompt), bytearray)
        for output in delta.outputs:
            self._outputs[output.index] += _escape(output.text)
            self._scores[output.index] = output.score
        self._scores = {index: self._scores[index] for index in self._outputs}
        texts = [self._outputs[index] for index in best_first(self._scores, self._num_outputs)]
        return b'{"text": ["' + b'", "'.join(texts) + self._end


class CumulativeDetails:
    """Messages with everything so far, and everything that is known of it."""

    def __init__(self, prompt: str, prompt_token_ids: Sequence[int], num_outputs: int, delimiter: bytes) -> None:
        self._prompt = prompt
        self._outputs = OutputAccumulator("", prompt, prompt_token_ids, num_outputs)
        self._delimiter = delimiter

    def add(self, delta: RequestDelta) -> bytes:
        """As `StreamMessages`."""
        self._outputs.add(delta)
        output = self._outputs.output()
        texts = [self._prompt + candidate.text for candidate in output.outputs]
        return json.dumps({"text": texts, **all_details(output)}).encode("ascii") + self._delimiter


class Deltas:
    """Messages with what is new alone: the prompt is not repeated, and candidates keep their places.

    With details, token ids and logprobs are those of the new tokens, and what is known of the prompt comes first.
    """

    def __init__(
        self, prompt_token_ids: Sequence[int], num_outputs: int, delimiter: bytes, *, has_details: bool
    ) -> None:
        self._prompt_token_ids = prompt_token_ids
        self._outputs = [CompletionOutput(index, "", ()) for index in range(num_outputs)]
        self._delimiter = delimiter
        self._has_details = has_details
        self._is_first = True

    def add(self, delta: RequestDelta) -> bytes:
        """As `StreamMessages`."""
        new = [
            CompletionOutput(
                index=last.index,
                text="",
                token_ids=(),
                cumulative_logprob=last.cumulative_logprob,
                logprobs=None if last.logprobs is None else [],
                finish_reason=last.finish_reason,
                stop_reason=last.stop_reason,
            )
            for last in self._outputs
        ]
        for output in delta.outputs:
            new[output.index] = CompletionOutput(
                index=output.index,
                text=output.text,
                token_ids=output.token_ids,
                cumulative_logprob=output.cumulative_logprob,
                logprobs=None if output.logprobs is None else list(output.logprobs),
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
            )
        self._outputs = new
        message: dict[str, object] = {"text": [output.text for output in new]}
        if self._has_details:
            message |= candidate_details(new)
            if self._is_first:
                whole = OutputAccumulator("", None, self._prompt_token_ids, prompt_logprobs=delta.prompt_logprobs)
                message |= prompt_details(whole.output())
        self._is_first = False
        return json.dumps(message).encode("ascii") + self._delimiter


def stream_messages(
    prompt: str,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    delimiter: bytes,
    *,
    has_details: bool,
    is_deltas: bool,
) -> StreamMessages:
    """What a client has asked for."""
    if is_deltas:
        return Deltas(prompt_token_ids, params.n, delimiter, has_details=has_details)
    if has_details:
        return CumulativeDetails(prompt, prompt_token_ids, params.n, delimiter)
    return CumulativeTexts(prompt, params.n, delimiter)


def is_message(delta: RequestDelta) -> bool:
    """Whether a delta is worth a message: one that only tells the end of a request would repeat the last message.

    Beams may change places without a new token.
    """
    return any(output.token_ids or output.text or output.parent is not None for output in delta.outputs)


def _escape(text: str) -> bytes:
    """The text as `json.dumps` writes it, without the quotes."""
    return json.dumps(text)[1:-1].encode("ascii")
