"""An answer as JSON, as far as it has come: whole answers and cumulative messages. Knows neither HTTP nor the engine.

JSON is written token by token, so every delta is encoded once, and what is there is only joined when it is wanted:
however long an answer is, no message of it holds up the event loop.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_lite.entrypoints.details import prompt_details
from vllm_lite.outputs import CandidateTable, CompletionDelta, RequestDelta


@dataclass(frozen=True)
class JsonStyle:
    """How vLLM 0.2.7 wrote JSON: whole answers compactly in raw UTF-8, messages of a stream as `json.dumps` does."""

    encode: Callable[[Any], str]
    comma: bytes
    colon: bytes


COMPACT = JsonStyle(json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode, b",", b":")
SPACED = JsonStyle(json.dumps, b", ", b": ")


@dataclass
class _Candidate:
    """Encoded, without the brackets and quotes around all of it."""

    text: bytearray = field(default_factory=bytearray)
    token_ids: list[bytes] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)
    last: CompletionDelta | None = None

    def copy(self) -> _Candidate:
        return _Candidate(self.text[:], self.token_ids[:], self.logprobs[:], self.last)


class Answer:
    """`{"text": [prompt + output, ...]}`, the best candidate first, with details where they are wanted."""

    def __init__(
        self, prompt: str, prompt_token_ids: Sequence[int], num_outputs: int, style: JsonStyle, *, has_details: bool
    ) -> None:
        self._style = style
        self._prompt = self._text(prompt)
        self._prompt_token_ids = prompt_token_ids
        self._num_outputs = num_outputs
        self._has_details = has_details
        self._candidates: CandidateTable[_Candidate] = CandidateTable(_Candidate, _Candidate.copy)
        self._first: RequestDelta | None = None

    def add(self, delta: RequestDelta) -> None:
        """Takes the next delta of the request."""
        if self._first is None:
            self._first = delta
        for candidate, output in self._candidates.advance(delta):
            candidate.text += self._text(output.text)
            if self._has_details:
                candidate.token_ids += [b"%d" % token_id for token_id in output.token_ids]
                candidate.logprobs += [self._json(entry) for entry in output.logprobs or ()]
                # Its text and ids have been taken; what is kept for long should not hold them.
                candidate.last = replace(
                    output, text="", token_ids=(), logprobs=None if output.logprobs is None else ()
                )

    def json(self, *, has_prompt_details: bool) -> bytes:
        """Everything so far. With details, those of the prompt only if they are to be there."""
        best = self._candidates.best(self._num_outputs)
        fields = [self._field("text", self._list([b"".join((b'"', self._prompt, one.text, b'"')) for one in best]))]
        if self._has_details:
            fields += self._details(best)
            if has_prompt_details and self._first is not None:
                known = prompt_details(self._prompt_token_ids, self._first)
                fields += [self._field(key, self._json(value)) for key, value in known.items()]
            num_tokens = sum(len(one.token_ids) for one in best)
            fields.append(self._field("num_generated_tokens", b"%d" % num_tokens))
        return b"{" + self._style.comma.join(fields) + b"}"

    def _details(self, best: Sequence[_Candidate]) -> list[bytes]:
        last = [one.last for one in best if one.last is not None]
        logprobs = [b"null" if delta.logprobs is None else self._list(one.logprobs) for one, delta in zip(best, last)]
        return [
            self._field("finish_reason", self._json([delta.finish_reason for delta in last])),
            self._field("stop_reason", self._json([delta.stop_reason for delta in last])),
            self._field("token_ids", self._list([self._list(one.token_ids) for one in best])),
            self._field("logprobs", self._list(logprobs)),
            self._field("cumulative_logprob", self._json([delta.cumulative_logprob for delta in last])),
        ]

    def _field(self, key: str, value: bytes) -> bytes:
        return b'"%b"' % key.encode() + self._style.colon + value

    def _list(self, values: Sequence[bytes]) -> bytes:
        return b"[" + self._style.comma.join(values) + b"]"

    def _json(self, value: Any) -> bytes:
        return self._style.encode(value).encode()

    def _text(self, text: str) -> bytes:
        """Without the quotes."""
        return self._style.encode(text)[1:-1].encode()
