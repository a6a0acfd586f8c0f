"""Server-sent events: the messages of OpenAI's streams. Knows nothing of what is in them."""

from __future__ import annotations

from vllm_lite.entrypoints.failures import failure_of
from vllm_lite.entrypoints.json_style import ESCAPED
from vllm_lite.entrypoints.openai.errors import openai_failure
from vllm_lite.entrypoints.stream_writer import UNBUFFERED

EVENT_TYPE = "text/event-stream"
EVENT_HEADERS = {"Content-Type": f"{EVENT_TYPE}; charset=utf-8", **UNBUFFERED}
DONE = b"data: [DONE]\n\n"
"""The last event of a stream that is complete."""


def event(data: bytes) -> bytes:
    """An event with this data, which must be one line."""
    return b"data: " + data + b"\n\n"


def failure_event(error: Exception) -> bytes:
    """What a stream says last that fails: its client raises an exception with the message."""
    return event(ESCAPED.value(openai_failure(failure_of(error))))
