"""The messages of a stream, built from deltas. Knows neither HTTP nor the engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from vllm_lite.entrypoints.json_style import SPACED
from vllm_lite.entrypoints.native.answer import Answer
from vllm_lite.entrypoints.native.details import candidate_details, prompt_details
from vllm_lite.outputs import CompletionDelta, RequestDelta
from vllm_lite.sampling_params import SamplingParams

DELIMITERS = {"null": b"\0", "newline": b"\n"}


class StreamMessages(Protocol):
    """Builds the messages of one stream."""

    def add(self, delta: RequestDelta) -> bytes:
        """The message that follows this delta, without its delimiter."""


class Cumulative:
    """Messages with everything so far. What is known of the prompt comes in the first one alone."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._is_first = True

    def add(self, delta: RequestDelta) -> bytes:
        """As `StreamMessages`."""
        self._answer.add(delta)
        message = self._answer.json(has_prompt_details=self._is_first)
        self._is_first = False
        return message


class Deltas:
    """Messages with what is new alone: the prompt is not repeated, and candidates keep their places.

    With details, token ids and logprobs are those of the new tokens, and what is known of the prompt comes first.
    """

    def __init__(self, prompt_token_ids: Sequence[int], num_outputs: int, *, has_details: bool) -> None:
        self._prompt_token_ids = prompt_token_ids
        self._last = [CompletionDelta(index, "", ()) for index in range(num_outputs)]
        self._has_details = has_details
        self._is_first = True
        self._num_tokens = 0

    def add(self, delta: RequestDelta) -> bytes:
        """As `StreamMessages`."""
        # Of a candidate that this step brought nothing, all but what was new is still true.
        new = [
            replace(last, text="", token_ids=(), logprobs=None if last.logprobs is None else ()) for last in self._last
        ]
        for output in delta.outputs:
            new[output.index] = output
        self._last = new
        self._num_tokens += sum(len(output.token_ids) for output in new)
        message: dict[str, Any] = {"text": [output.text for output in new]}
        if self._has_details:
            message |= candidate_details(new)
            if self._is_first:
                message |= prompt_details(self._prompt_token_ids, delta)
            message["num_generated_tokens"] = self._num_tokens
        self._is_first = False
        return json.dumps(message).encode("ascii")


def stream_messages(
    prompt: str, prompt_token_ids: Sequence[int], params: SamplingParams, *, has_details: bool, is_deltas: bool
) -> StreamMessages:
    """What a client has asked for."""
    if is_deltas:
        return Deltas(prompt_token_ids, params.n, has_details=has_details)
    return Cumulative(Answer(prompt, prompt_token_ids, params.n, SPACED, has_details=has_details))


def is_message(delta: RequestDelta, *, has_details: bool = False) -> bool:
    """Whether a delta is worth a message: one that only tells the end of a request would repeat the last text.

    Beams may change places without a new token.
    """
    for output in delta.outputs:  # a loop, for every token: `any` takes twice the time
        if output.token_ids or output.text or output.parent is not None:
            return True
        if has_details and output.finish_reason is not None:
            return True
    return False
