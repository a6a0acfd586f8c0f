"""A tokenizer in plain Python with one token a UTF-8 byte: for tests of the engine, which know no tokenizer library.

Its ids are those of `tests.helpers.tokenizers.make_tokenizer()`, so scripts of ids can be shared.
"""

from __future__ import annotations

from collections.abc import Sequence


def _byte_order() -> list[int]:
    """The bytes in the order of the characters that byte-level BPE writes them as: those that print, then the rest."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return printable + [byte for byte in range(256) if byte not in printable]


class ByteTokenizer:
    """0 is `<|endoftext|>`, 1 is `<stop>`, both special; 2 to 257 are the bytes; `extra` tokens come after.

    An extra token is only ever decoded: encoding text gives single bytes.
    """

    is_quick = True

    def __init__(self, extra: Sequence[str] = ()) -> None:
        order = _byte_order()
        self.eos_token_id: int | None = 0
        self.special_ids = frozenset({0, 1})
        self._id_of_byte = {byte: 2 + index for index, byte in enumerate(order)}
        self._pieces = [b"<|endoftext|>", b"<stop>", *(bytes([byte]) for byte in order), *(t.encode() for t in extra)]
        self.vocab_size = len(self._pieces)

    def min_num_tokens(self, text: str) -> int:
        return len(text)

    def encode(self, text: str) -> list[int]:
        return self.encode_plain(text)

    def encode_plain(self, text: str) -> list[int]:
        return [self._id_of_byte[byte] for byte in text.encode()]

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        kept = (i for i in token_ids if i < self.vocab_size and not (skip_special_tokens and i in self.special_ids))
        return b"".join(self._pieces[i] for i in kept).decode(errors="replace")
