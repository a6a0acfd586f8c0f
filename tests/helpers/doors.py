"""The two protocols as a test sees them: how a server of one is started, asked and read."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

FAILURE_KEYS = {"message", "type", "param", "code"}


@dataclass(frozen=True)
class Door:
    """Both take `prompt`, `max_tokens`, `stream` and all fields of `SamplingParams`."""

    name: str
    module: str
    test_flags: tuple[str, ...]
    """What makes a server of the tests speak it."""
    path: str
    deltas: Mapping[str, bool]
    """Fields that make the messages of a stream hold new text alone."""
    text: Callable[[Any], str]
    """Of the first candidate of a whole answer."""
    texts: Callable[[bytes], list[str]]
    """Of the first candidate of a stream, as far as it has come after each message. The stream may be cut off."""
    failure: Callable[[Any], str]
    """What a failure says, whose keys are as they must be."""


def _native_texts(body: bytes) -> list[str]:
    return [json.loads(message)["text"][0] for message in body.split(b"\0")[:-1]]


def _openai_texts(body: bytes) -> list[str]:
    """Of completions."""
    chunks = [json.loads(data) for data in events(body) if data != b"[DONE]"]
    choices = [choice for chunk in chunks if "choices" in chunk for choice in chunk["choices"]]
    return list(itertools.accumulate(choice["text"] for choice in choices if choice["index"] == 0))


def events(body: bytes) -> list[bytes]:
    """The data of server-sent events, each of which must be one line."""
    *complete, _ = body.split(b"\n\n")
    assert all(one.startswith(b"data: ") and b"\n" not in one for one in complete), body[:1000]
    return [one.removeprefix(b"data: ") for one in complete]


def _native_failure(body: Any) -> str:
    assert list(body) == ["detail"]
    return str(body["detail"])


def _openai_failure(body: Any) -> str:
    assert list(body) == ["error"] and set(body["error"]) == FAILURE_KEYS
    return str(body["error"]["message"])


NATIVE = Door(
    name="native",
    module="vllm_lite.entrypoints.api_server",
    test_flags=(),
    path="/generate",
    deltas={"stream_deltas": True},
    text=lambda answer: str(answer["text"][0]),
    texts=_native_texts,
    failure=_native_failure,
)
OPENAI = Door(
    name="openai",
    module="vllm_lite.entrypoints.openai.api_server",
    test_flags=("--openai",),
    path="/v1/completions",
    deltas={},
    text=lambda answer: str(answer["choices"][0]["text"]),
    texts=_openai_texts,
    failure=_openai_failure,
)
