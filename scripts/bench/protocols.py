"""What servers are asked and how their answers are read: the native protocol, and OpenAI's completions."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass, field
from typing import Any, Protocol

from scripts.bench.client import Address, TimedBytes, post_bytes, split_messages
from scripts.bench.workloads import Prompt


@dataclass(frozen=True)
class Answer:
    """Of one request."""

    num_tokens: int
    token_times: list[float]
    """When each message with text came, in seconds since the start; empty where the answer came whole."""


class WireProtocol(Protocol):
    """One way to ask a server for a completion: greedy, end of sequence ignored."""

    def request(self, address: Address, prompt: Prompt, output_len: int, *, is_stream: bool) -> bytes:
        """The bytes to send."""

    def read(self, body: TimedBytes, output_len: int, *, is_stream: bool) -> Answer:
        """What came back. Raises RuntimeError where it is not what was asked for."""


class NativeProtocol:
    """`POST /generate`, prompts as text. Servers that end messages with a null byte or, later, with a newline."""

    def request(self, address: Address, prompt: Prompt, output_len: int, *, is_stream: bool) -> bytes:
        """As `WireProtocol`."""
        fields = {"prompt": prompt.text, "max_tokens": output_len, "temperature": 0, "ignore_eos": True}
        return post_bytes(address, "/generate", {**fields, "stream": is_stream})

    def read(self, body: TimedBytes, output_len: int, *, is_stream: bool) -> Answer:
        """A stream has a message for each token; a whole answer does not say how many tokens it has."""
        if not is_stream:
            if not _text(b"".join(data for _, data in body)):
                raise RuntimeError("the answer has no text")
            return Answer(output_len, [])
        both_ends = [(time_s, data.replace(b"\n", b"\0")) for time_s, data in body]  # JSON itself has neither
        messages = split_messages(both_ends, b"\0")
        for _, last in messages[-1:]:
            _text(last)
        return Answer(len(messages), [time_s for time_s, _ in messages])


def _text(message: bytes) -> str:
    """The first candidate's. Raises RuntimeError where this is no message of the native protocol."""
    try:
        return str(json.loads(message)["text"][0])
    except (ValueError, LookupError, TypeError) as error:
        raise RuntimeError(f"this is no message of the native protocol: {message[:200]!r}") from error


@dataclass(frozen=True)
class OpenAIProtocol:
    """`POST /v1/completions`. Fields that only some servers know are ignored by the others."""

    model: str
    takes_text: bool = False
    """Whether prompts are sent as text, for servers that take no lists of ids."""
    extra: dict[str, Any] = field(default_factory=dict)
    """More fields, such as those that turn off a server's prefix reuse."""

    def request(self, address: Address, prompt: Prompt, output_len: int, *, is_stream: bool) -> bytes:
        """As `WireProtocol`."""
        fields: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt.text if self.takes_text else prompt.token_ids,
            "max_tokens": output_len,
            "min_tokens": output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": is_stream,
        }
        if is_stream:
            fields["stream_options"] = {"include_usage": True}
        return post_bytes(address, "/v1/completions", {**fields, **self.extra})

    def read(self, body: TimedBytes, output_len: int, *, is_stream: bool) -> Answer:
        """The server's own count of tokens where it sends one, else the number of messages with text."""
        if not is_stream:
            usage = json.loads(b"".join(data for _, data in body))["usage"]
            return Answer(usage["completion_tokens"], [])
        unified = [(time_s, data.replace(b"\r\n", b"\n")) for time_s, data in body]
        times: list[float] = []
        num_tokens: int | None = None
        for time_s, event in split_messages(unified, b"\n\n"):
            data = event.strip().removeprefix(b"data:").strip()
            if data == b"[DONE]" or not event.strip().startswith(b"data:"):
                continue
            fields = json.loads(data)
            if any(choice.get("text") for choice in fields.get("choices", ())):
                times.append(time_s)
            if fields.get("usage"):
                num_tokens = fields["usage"]["completion_tokens"]
        return Answer(len(times) if num_tokens is None else num_tokens, times)


def first_model(address: Address) -> str:
    """The name of the first model that a server of OpenAI's protocol lists."""
    connection = http.client.HTTPConnection(address.host, address.port, timeout=30)
    try:
        connection.request("GET", f"{address.prefix}/v1/models")
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"GET /v1/models was answered {response.status}: name the model with --compare-model")
        return str(json.loads(response.read())["data"][0]["id"])
    finally:
        connection.close()
