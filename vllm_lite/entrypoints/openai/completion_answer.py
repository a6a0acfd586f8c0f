"""How `/v1/completions` writes its choices and their logprobs. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy

from vllm_lite.engine.detokenizer import IncrementalDecoder
from vllm_lite.entrypoints.json_style import JsonStyle
from vllm_lite.entrypoints.openai.choices import Entry, Logprobs, Opening, Step
from vllm_lite.entrypoints.openai.completion_request import CompletionRequest
from vllm_lite.entrypoints.openai.token_texts import TokenTexts
from vllm_lite.outputs import CompletionDelta, FinishReason

LOGPROB_KEYS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
"""Lists with one entry for each token: what is in the entries here, in this order."""


class CompletionFormat:
    """The choices of one request."""

    def __init__(self, asked: CompletionRequest, texts: TokenTexts, style: JsonStyle) -> None:
        self._asked = asked
        self._texts = texts
        self._style = style

    def opening(self, first: Step) -> Opening:
        """With echo, the prompt."""
        if not self._asked.has_echo:
            return Opening(logprobs=self._logprobs(first.prompt_token_ids))
        text = self._prompt_text(first)
        logprobs = self._logprobs(())
        if logprobs is None:
            return Opening(text)
        entries = logprobs.prompt_entries(first.prompt_token_ids, first.delta.prompt_logprobs or ())
        logprobs.offset = len(text)
        return Opening(text, entries, logprobs)

    def choice(self, index: int, text: str, entries: Sequence[Entry] | None, reason: FinishReason | None) -> bytes:
        """A choice, whole or in a chunk."""
        style = self._style
        logprobs = b"null"
        if entries is not None:
            columns = zip(*entries) if entries else [()] * len(LOGPROB_KEYS)
            logprobs = style.object(dict(zip(LOGPROB_KEYS, map(style.array, columns))))
        return style.object(
            {
                "index": style.value(index),
                "text": style.value(text),
                "logprobs": logprobs,
                "finish_reason": style.value(reason),
            }
        )

    def opening_chunk(self, index: int, opening: Opening) -> bytes | None:
        """The prompt, where it is wanted."""
        entries = None if opening.logprobs is None else opening.entries
        return self.choice(index, opening.text, entries, None) if self._asked.has_echo else None

    def chunks(
        self, index: int, text: str, entries: Sequence[Entry] | None, reason: FinishReason | None
    ) -> list[bytes]:
        """One: the last text comes with the reason."""
        return [self.choice(index, text, entries, reason)]

    def _prompt_text(self, first: Step) -> str:
        text, params = self._asked.prompts[first.prompt_index].text, self._asked.params
        if text is not None and params.truncate_prompt_tokens is None:
            return text
        return self._texts.decode(first.prompt_token_ids, skip_special_tokens=params.skip_special_tokens)

    def _logprobs(self, prompt_token_ids: Sequence[int]) -> CompletionLogprobs | None:
        if self._asked.params.logprobs is None:
            return None
        skips_special = self._asked.params.skip_special_tokens
        return CompletionLogprobs(self._texts, self._style, prompt_token_ids, skips_special=skips_special)


class CompletionLogprobs:
    """Those of one candidate. An offset is where the text of a token begins in the text of its choice."""

    def __init__(
        self, texts: TokenTexts, style: JsonStyle, prompt_token_ids: Sequence[int], *, skips_special: bool
    ) -> None:
        self.offset = 0
        """Of the next token."""
        self._texts = texts
        self._style = style

        def decode(token_ids: Sequence[int]) -> str:
            return texts.decode(token_ids, skip_special_tokens=skips_special)

        self._decoder = IncrementalDecoder(decode, prompt_token_ids)

    def entries(self, output: CompletionDelta) -> list[Entry]:
        """Of the new tokens."""
        return [self._entry(token_id, top) for token_id, top in zip(output.token_ids, output.logprobs or ())]

    def prompt_entries(self, token_ids: Sequence[int], logprobs: Sequence[Mapping[int, float] | None]) -> list[Entry]:
        """Of the prompt's tokens; the first has no logprob."""
        return [self._entry(token_id, top) for token_id, top in zip(token_ids, logprobs)]

    def fork(self) -> Logprobs:
        """Another one that has come as far."""
        other = copy(self)
        other._decoder = self._decoder.fork()
        return other

    def _entry(self, token_id: int, logprobs: Mapping[int, float] | None) -> Entry:
        value, name = self._style.value, self._texts.text(token_id)
        new = self._decoder.append(token_id)
        self.offset += len(new)
        # What was held back before, as a part of a character that did not come, stands before the token.
        begin = self.offset - len(name if new.endswith(name) else new)
        if logprobs is None:
            return value(name), b"null", b"null", value(begin)
        # Tokens that are parts of characters may have the same text: the likeliest one has its place.
        top: dict[str, float] = {}
        for one, logprob in sorted(logprobs.items(), key=lambda item: -item[1]):
            top.setdefault(self._texts.text(one), logprob)
        return value(name), value(logprobs[token_id]), value(top), value(begin)
