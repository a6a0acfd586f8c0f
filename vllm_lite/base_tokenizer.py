"""What every tokenizer adapter shares: which special tokens show, and how few tokens a text has. Knows no library."""

from __future__ import annotations

import codecs
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from vllm_lite.tokenizer_files import TemplateText


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


NO_TEMPLATE = TemplateText()

codecs.register_error("vllm_lite.replace_each_byte", _replace_each_byte)


def text_of_bytes(data: bytes) -> str:
    """UTF-8 with a U+FFFD for each byte that makes no character, as sentencepiece has it."""
    return data.decode(errors="vllm_lite.replace_each_byte")


@dataclass(frozen=True)
class TokenByteBound:
    """No token stands for more than `max_token_bytes` UTF-8 bytes of a text, not counting `dropped_bytes`.

    Those are bytes that the vocabulary lacks: a text loses them when it is encoded.
    """

    max_token_bytes: int
    dropped_bytes: frozenset[int] = frozenset()


class BaseTokenizer(ABC):
    """A tokenizer as the engine wants it (`engine.tokenizer_protocol.Tokenizer`) over some library's own."""

    apply_chat_template: Callable[..., str] | None = None
    """transformers' method of that name, where the tokenizer is one of its own."""

    def __init__(
        self,
        *,
        vocab_size: int,
        eos_token_id: int | None,
        special_ids: frozenset[int],
        bound: TokenByteBound | None,
        chat_template: TemplateText = NO_TEMPLATE,
        special_tokens: Mapping[str, Any] = MappingProxyType({}),
        is_quick: bool = True,
    ) -> None:
        """`bound` is None unless it is certain.

        `special_tokens` are what a chat template may name, such as `bos_token`, beside what `apply_chat_template` has.
        """
        self.vocab_size = vocab_size
        self.eos_token_id = eos_token_id
        self.special_ids = special_ids
        self.chat_template = chat_template
        self.special_tokens = special_tokens
        self.is_quick = is_quick
        self._bound = bound

    def min_num_tokens(self, text: str) -> int:
        """A lower bound of the number of ids of a prompt, from the number of its bytes alone."""
        if self._bound is None:
            return 0
        data = text.encode()
        num_dropped = sum(data.count(byte) for byte in self._bound.dropped_bytes)
        return math.ceil((len(data) - num_dropped) / self._bound.max_token_bytes)

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, with the special tokens that the tokenizer adds by itself."""
        return self._encode(text, add_special_tokens=True)

    def encode_plain(self, text: str) -> list[int]:
        """The ids of a text, with nothing added. Special tokens that are written out in the text count as such."""
        return self._encode(text, add_special_tokens=False)

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """The text of some ids. Shown special tokens stand between spaces if `spaces_between_special_tokens`."""
        known = [token_id for token_id in token_ids if token_id < self.vocab_size]
        if skip_special_tokens:
            return self._decode([token_id for token_id in known if token_id not in self.special_ids])
        if spaces_between_special_tokens and not self.special_ids.isdisjoint(known):
            return " ".join(filter(None, (self._decode(part) for part in self._parts(known))))
        return self._decode(known)

    @abstractmethod
    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    @abstractmethod
    def _decode(self, token_ids: list[int]) -> str:
        """The text of ids below `vocab_size`, special tokens shown as they are written."""

    def _parts(self, token_ids: Sequence[int]) -> list[list[int]]:
        """Cut before and after each special token."""
        parts: list[list[int]] = [[]]
        for token_id in token_ids:
            if token_id in self.special_ids:
                parts += [[token_id], []]
            else:
                parts[-1].append(token_id)
        return parts
