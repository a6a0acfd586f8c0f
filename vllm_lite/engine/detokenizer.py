"""Turns the ids of one sequence into text as they come, and ends it at a stop string. Knows no model and no request.

What a token says can depend on its neighbours: bytes that make a character together, a space that only the first word
loses. So each token is decoded behind a few tokens that came before it, and what they say alone is cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import NamedTuple

from vllm_lite.engine.stop_strings import StopStringFilter
from vllm_lite.engine.tokenizer_protocol import Tokenizer
from vllm_lite.sampling_params import SamplingParams

REPLACEMENT = "\ufffd"
MAX_OPEN_BYTES = 3
"""A character of UTF-8 has at most 4 bytes, so at most 3 wait for the rest; each can show as a U+FFFD of its own."""
MAX_CONTEXT_TOKENS = 16
"""Enough to hold a visible character in any text but one of blanks, where the context does not matter much."""


class UndecodableError(RuntimeError):
    """The tokenizer raised where it should have turned ids into text: this one sequence cannot go on."""


class DetokenizerStep(NamedTuple):
    """What one token brought: text that may be shown now, and the stop string that it completed."""

    text: str
    stop: str | None


class IncrementalDecoder:
    """Decodes one id after the other in constant time. Text once returned is never changed by what comes later.

    `_open` are the ids whose text is not final: they end in an incomplete character. `_num_given` characters of their
    text have been returned all the same. `_context` are the ids before them, and their text has been returned.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_token_ids: Sequence[int]) -> None:
        """`decode` turns ids into text; `prompt_token_ids` is what the output follows on."""
        self._decode = decode
        self._context = _clean_context(decode, prompt_token_ids)
        self._open: list[int] = []
        self._num_given = 0

    def fork(self) -> IncrementalDecoder:
        """Another one that has come as far."""
        other = copy(self)
        other._context, other._open = self._context[:], self._open[:]
        return other

    def append(self, token_id: int) -> str:
        """Takes the next id; returns the text that has become final."""
        self._open.append(token_id)
        text = self._text_of(self._context, self._open)
        complete = text.rstrip(REPLACEMENT)
        if len(complete) == len(text):
            return self._close(len(self._open), text)
        num_final = max(len(complete), len(text) - MAX_OPEN_BYTES)
        if len(self._open) > MAX_OPEN_BYTES:
            # The first open id has seen the 3 bytes that could have completed its character: these bytes make none, or
            # the model really says U+FFFD.
            num_ids = self._num_settled(text)
            settled = self._text_of(self._context, self._open[:num_ids])
            return self._close(num_ids, settled)
        new = text[self._num_given : num_final]
        self._num_given = max(self._num_given, num_final)
        return new

    def finish(self) -> str:
        """The text of an incomplete end, as the tokenizer decodes it. Nothing may be appended afterwards."""
        return self._close(len(self._open), self._text_of(self._context, self._open)) if self._open else ""

    def _close(self, num_ids: int, text: str) -> str:
        """The first `num_ids` open ids, whose text is `text`, are final: they become the context."""
        new = text[self._num_given :]
        self._num_given = max(0, self._num_given - len(text))
        closed, self._open = self._open[:num_ids], self._open[num_ids:]
        if text.strip():
            self._context = closed
        else:  # Blanks are no context: a tokenizer that strips a space at the start would strip the next one too.
            self._context = _clean_context(self._decode, (self._context + closed)[-MAX_CONTEXT_TOKENS:])
        return new

    def _text_of(self, context: list[int], ids: list[int]) -> str:
        """What `ids` say after `context`."""
        before = self._decode(context)
        text = self._decode(context + ids)
        while not text.startswith(before) and before.endswith(REPLACEMENT):
            before = before[:-1]  # the context ended in an incomplete character, which is complete now
        return text[len(before) :] if text.startswith(before) else self._decode(ids)

    def _num_settled(self, text: str) -> int:
        """How many of the open ids, at least 1, end where a character ends: there the text falls into two parts."""
        for num_ids in range(1, len(self._open)):
            first, rest = self._open[:num_ids], self._open[num_ids:]
            if text == self._text_of(self._context, first) + self._decode(rest):
                return num_ids
        return len(self._open)


class Detokenizer:
    """The text of one sequence: characters are complete, special tokens hidden or shown, stop strings held back."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._stop_strings = frozenset(params.stop_strings)
        self._filter = StopStringFilter(params.stop_strings, params.include_stop_str_in_output)
        self._decoder = IncrementalDecoder(self._decode, self._last_visible(prompt_token_ids))
        self._is_stopped = False

    def fork(self) -> Detokenizer:
        """Another one that has come as far."""
        other = copy(self)
        # The decoder goes on to decode as this one does: tokenizer and parameters are the same for all.
        other._filter, other._decoder = copy(self._filter), self._decoder.fork()
        return other

    def append(self, token_id: int, *, check_stop: bool) -> DetokenizerStep:
        """Takes the next id. With `check_stop` False its text is shown without being searched."""
        if not self._is_visible(token_id):
            return self._append_hidden(token_id, check_stop)
        text = self._decoder.append(token_id)
        if not check_stop:
            return DetokenizerStep(self._filter.flush() + text, None)
        step = self._search(text)
        if token_id in self._tokenizer.special_ids and text == f" {step.stop}":
            return self._without_separator(step)
        return step

    def finish(self) -> str:
        """The text still held back, now that nothing follows. Nothing after a stop string."""
        if self._is_stopped:
            return ""
        step = self._search(self._decoder.finish())
        return step.text if self._is_stopped else step.text + self._filter.flush()

    def finish_at(self, stop_token_id: int) -> str:
        """`finish` where an id ended the sequence: its text comes out too if what stops a sequence is to be shown."""
        shown = ""
        if self._params.include_stop_str_in_output:
            shown = self.append(stop_token_id, check_stop=True).text
        return shown + self.finish()

    def _append_hidden(self, token_id: int, check_stop: bool) -> DetokenizerStep:
        """A special token that is not shown can still be a stop string."""
        if not (check_stop and self._stop_strings and token_id in self._tokenizer.special_ids):
            return DetokenizerStep("", None)
        stop = self._text_of([token_id], skip_special_tokens=False, spaces_between_special_tokens=False)
        if stop not in self._stop_strings:
            return DetokenizerStep("", None)
        step = self._search(self._decoder.finish())
        if step.stop is not None:
            return step
        self._is_stopped = True
        shown = stop if self._params.include_stop_str_in_output else ""
        return DetokenizerStep(step.text + self._filter.flush() + shown, stop)

    def _without_separator(self, step: DetokenizerStep) -> DetokenizerStep:
        """The space before a special token is there for the token alone: where that is cut off, so is the space."""
        if self._params.include_stop_str_in_output:
            return step
        return DetokenizerStep(step.text.removesuffix(" "), step.stop)

    def _search(self, text: str) -> DetokenizerStep:
        step = DetokenizerStep(*self._filter.push(text))
        self._is_stopped = step.stop is not None
        return step

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._text_of(
            token_ids,
            skip_special_tokens=self._params.skip_special_tokens,
            spaces_between_special_tokens=self._params.spaces_between_special_tokens,
        )

    def _text_of(self, token_ids: Sequence[int], **flags: bool) -> str:
        """Raises UndecodableError for whatever the tokenizer's library, or code that came with it, raises."""
        try:
            return self._tokenizer.decode(token_ids, **flags)
        except BaseException as error:  # a library in Rust that panics raises what is no Exception
            raise UndecodableError(f"the tokenizer cannot decode {list(token_ids)}: {error!r}") from error

    def _is_visible(self, token_id: int) -> bool:
        if token_id >= self._tokenizer.vocab_size:
            return False
        return not (self._params.skip_special_tokens and token_id in self._tokenizer.special_ids)

    def _last_visible(self, token_ids: Sequence[int]) -> list[int]:
        """The last few ids that have text; looks no further back than a few times as many."""
        recent = token_ids[-4 * MAX_CONTEXT_TOKENS :]
        return [token_id for token_id in recent if self._is_visible(token_id)][-MAX_CONTEXT_TOKENS:]


def _clean_context(decode: Callable[[Sequence[int]], str], token_ids: Sequence[int]) -> list[int]:
    """`token_ids` without a broken character at their start, if that can be had by dropping up to 3 of them."""
    for num_dropped in range(min(MAX_OPEN_BYTES + 1, len(token_ids))):
        candidate = list(token_ids[num_dropped:])
        if not decode(candidate).startswith(REPLACEMENT):
            return candidate
    return list(token_ids)
