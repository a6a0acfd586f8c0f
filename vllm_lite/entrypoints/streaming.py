"""The bytes of a stream: cumulative messages built from deltas. Knows neither HTTP nor the engine."""

from __future__ import annotations

import json

from vllm_lite.outputs import RequestDelta

DELIMITERS = {"null": b"\0", "newline": b"\n"}


class StreamMessages:
    """Builds the messages of one stream.

    A message is `json.dumps({"text": [prompt + output, ...]})` and the delimiter. JSON escapes character by
    character, so the prompt is escaped once and every delta once, and a message is a join of what is there.
    """

    def __init__(self, prompt: str, num_outputs: int, delimiter: bytes) -> None:
        self._outputs = [bytearray(_escape(prompt)) for _ in range(num_outputs)]
        self._end = b'"]}' + delimiter

    def add(self, delta: RequestDelta) -> bytes:
        """The message that follows this delta."""
        for output in delta.outputs:
            self._outputs[output.index] += _escape(output.text)
        return b'{"text": ["' + b'", "'.join(self._outputs) + self._end


def is_message(delta: RequestDelta) -> bool:
    """Whether a delta is worth a message: one that only tells the end of a request would repeat the last message."""
    return any(output.token_ids or output.text for output in delta.outputs)


def _escape(text: str) -> bytes:
    """The text as `json.dumps` writes it, without the quotes."""
    return json.dumps(text)[1:-1].encode("ascii")
