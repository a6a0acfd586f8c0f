"""An answer as JSON, as far as it has come: whole answers and cumulative messages. Knows neither HTTP nor the engine.

JSON is written token by token, so every delta is encoded once, and what is there is only joined when it is wanted:
however long an answer is, no message of it holds up the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from vllm_lite.entrypoints.json_style import JsonStyle
from vllm_lite.entrypoints.native.details import prompt_details
from vllm_lite.outputs import CandidateTable, CompletionDelta, RequestDelta


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
        self._prompt = style.text(prompt)
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
            candidate.text += self._style.text(output.text)
            if self._has_details:
                candidate.token_ids += [b"%d" % token_id for token_id in output.token_ids]
                candidate.logprobs += [self._style.value(entry) for entry in output.logprobs or ()]
                # Its text and ids have been taken; what is kept for long should not hold them.
                candidate.last = replace(
                    output, text="", token_ids=(), logprobs=None if output.logprobs is None else ()
                )

    def json(self, *, has_prompt_details: bool) -> bytes:
        """Everything so far. With details, those of the prompt only if they are to be there."""
        style, best = self._style, self._candidates.best(self._num_outputs)
        fields = {"text": style.array([b"".join((b'"', self._prompt, one.text, b'"')) for one in best])}
        if self._has_details:
            fields |= self._details(best)
            if has_prompt_details and self._first is not None:
                known = prompt_details(self._prompt_token_ids, self._first)
                fields |= {key: style.value(value) for key, value in known.items()}
            num_tokens = sum(len(one.token_ids) for one in best)
            fields["num_generated_tokens"] = b"%d" % num_tokens
        return style.object(fields)

    def _details(self, best: Sequence[_Candidate]) -> dict[str, bytes]:
        style = self._style
        last = [one.last for one in best if one.last is not None]
        logprobs = [b"null" if delta.logprobs is None else style.array(one.logprobs) for one, delta in zip(best, last)]
        return {
            "finish_reason": style.value([delta.finish_reason for delta in last]),
            "stop_reason": style.value([delta.stop_reason for delta in last]),
            "token_ids": style.array(style.array(one.token_ids) for one in best),
            "logprobs": style.array(logprobs),
            "cumulative_logprob": style.value([delta.cumulative_logprob for delta in last]),
        }
