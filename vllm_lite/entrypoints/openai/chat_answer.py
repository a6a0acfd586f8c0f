"""How `/v1/chat/completions` writes its choices and their logprobs. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_lite.entrypoints.json_style import JsonStyle
from vllm_lite.entrypoints.openai.choices import Entry, Logprobs, Opening, Step
from vllm_lite.entrypoints.openai.token_texts import TokenTexts
from vllm_lite.outputs import CompletionDelta, FinishReason

ROLE = "assistant"


class ChatFormat:
    """The choices of one request."""

    def __init__(self, num_top_logprobs: int | None, texts: TokenTexts, style: JsonStyle) -> None:
        """`num_top_logprobs` is None where no logprobs are wanted."""
        self._style = style
        self._opening = Opening(
            logprobs=None if num_top_logprobs is None else ChatLogprobs(texts, style, num_top_logprobs)
        )

    def opening(self, first: Step) -> Opening:
        """Nothing: an answer has no part of its prompt."""
        return self._opening

    def choice(self, index: int, text: str, entries: Sequence[Entry] | None, reason: FinishReason | None) -> bytes:
        """A whole one."""
        message = {"role": ROLE, "content": text, "refusal": None}
        return self._choice(index, "message", message, entries, reason)

    def opening_chunk(self, index: int, opening: Opening) -> bytes | None:
        """Whose message it is."""
        return self._choice(index, "delta", {"role": ROLE, "content": ""}, None, None)

    def chunks(
        self, index: int, text: str, entries: Sequence[Entry] | None, reason: FinishReason | None
    ) -> list[bytes]:
        """New text, and the reason in a chunk of its own."""
        chunks: list[bytes] = []
        if text or entries:
            chunks.append(self._choice(index, "delta", {"content": text}, entries, None))
        if reason is not None:
            chunks.append(self._choice(index, "delta", {}, None, reason))
        return chunks

    def _choice(
        self,
        index: int,
        key: str,
        message: Mapping[str, Any],
        entries: Sequence[Entry] | None,
        reason: FinishReason | None,
    ) -> bytes:
        style = self._style
        logprobs = b"null"
        if entries is not None:
            content = style.array(entry for (entry,) in entries)
            logprobs = style.object({"content": content, "refusal": b"null"})
        return style.object(
            {
                "index": style.value(index),
                key: style.value(message),
                "logprobs": logprobs,
                "finish_reason": style.value(reason),
            }
        )


@dataclass(frozen=True)
class ChatLogprobs:
    """The same for all candidates: nothing depends on what came before."""

    texts: TokenTexts
    style: JsonStyle
    num_top: int

    def entries(self, output: CompletionDelta) -> list[Entry]:
        """Of the new tokens."""
        return [(self._entry(token_id, top),) for token_id, top in zip(output.token_ids, output.logprobs or ())]

    def fork(self) -> Logprobs:
        """Itself."""
        return self

    def _entry(self, token_id: int, logprobs: Mapping[int, float]) -> bytes:
        best_first = sorted(logprobs.items(), key=lambda item: -item[1])[: self.num_top]
        top = [self._token(one, logprob) for one, logprob in best_first]
        return self.style.value({**self._token(token_id, logprobs[token_id]), "top_logprobs": top})

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": self.texts.text(token_id), "logprob": logprob, "bytes": self.texts.bytes_of(token_id)}
