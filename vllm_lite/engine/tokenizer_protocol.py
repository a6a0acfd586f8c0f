"""What the engine wants of a tokenizer. Knows no library: the tokenizer itself arrives as an argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """Text to ids and back. Every method may be called from several threads at once."""

    @property
    def vocab_size(self) -> int:
        """Ids from here on decode to nothing (a model's embedding is often padded beyond its tokenizer)."""

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end of sequence; the checkpoint may name more."""

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids that `skip_special_tokens` hides."""

    @property
    def is_quick(self) -> bool:
        """Whether a short text is encoded in microseconds, whatever else is being encoded."""

    def min_num_tokens(self, text: str) -> int:
        """A prompt has at least this many tokens: cheap, and 0 where nothing is known. Never more than `encode` gives.

        With it a prompt of megabytes that cannot fit is refused before the time to encode it is spent.
        """

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, with the special tokens that the tokenizer adds by itself (such as BOS)."""

    def encode_plain(self, text: str) -> list[int]:
        """The ids of a piece of text, with no special token added."""

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """The text of some ids, with U+FFFD where bytes make no character.

        Special tokens that are shown stand between spaces if `spaces_between_special_tokens`. That flag has no effect
        while they are skipped.
        """
