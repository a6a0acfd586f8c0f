"""Tokenizers of the sentencepiece kind, as Llama 2 and Mistral have them: from a tokenizer.model, or piece by piece.

Ids are those of the sentencepiece library itself. Special tokens written out in a prompt are recognised as Hugging
Face does, and the text between them is encoded piece by piece, each with its own leading space.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor

from vllm_lite.base_tokenizer import NO_TEMPLATE, BaseTokenizer, TokenByteBound, text_of_bytes
from vllm_lite.errors import StartupError
from vllm_lite.tokenizer_files import TemplateText, read_chat_template, read_json

BYTE = 6
"""The type of a piece that stands for a byte, in sentencepiece's file format as in GGUF's."""
SPACE = "\u2581"
BLANKS = re.compile(r"\s+")
BPE_MODEL = 2
NORMALIZER_FIELD = 3
"""Of a model; the next three are fields of a normaliser: character rules, a space before the text, extra blanks."""
RULES_FIELD, ADD_SPACE_FIELD, REMOVE_BLANKS_FIELD = 2, 3, 4


class SentencePieceTokenizer(BaseTokenizer):
    """Encodes with the sentencepiece library and decodes by adding up the bytes of the pieces."""

    def __init__(
        self,
        processor: SentencePieceProcessor,
        *,
        added_tokens: Mapping[str, int],
        special_ids: frozenset[int],
        bos_ids: Sequence[int],
        eos_ids: Sequence[int],
        eos_token_id: int | None,
        chat_template: TemplateText = NO_TEMPLATE,
        special_tokens: Mapping[str, str],
        left_strip_ids: frozenset[int] = frozenset(),
        right_strip_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`added_tokens` have ids beyond the model's; `bos_ids` and `eos_ids` are put around every prompt.

        The blanks before `left_strip_ids` and after `right_strip_ids` that are written out in a text belong to them.
        """
        self._left_strip_ids, self._right_strip_ids = left_strip_ids, right_strip_ids
        self._processor = processor
        self._bos_ids, self._eos_ids = list(bos_ids), list(eos_ids)
        num_pieces = processor.get_piece_size()
        ids = list(range(num_pieces))
        pieces = processor.id_to_piece(ids)
        self._bytes = {token_id: piece.replace(SPACE, " ").encode() for token_id, piece in zip(ids, pieces)}
        self._bytes.update(
            {i: bytes([int(pieces[i][3:5], 16)]) for i, is_byte in zip(ids, processor.is_byte(ids)) if is_byte}
        )
        self._bytes.update({token_id: text.encode() for text, token_id in added_tokens.items()})
        # Whether a leading space belongs to the tokenizer and not to the text.
        word = next((i for i, piece in enumerate(pieces) if piece.startswith(SPACE) and len(piece) > 1), None)
        self._strips_space = word is not None and not processor.decode([word]).startswith(" ")
        self._written = {pieces[i]: i for i in special_ids if i < num_pieces} | dict(added_tokens)
        written = sorted(map(re.escape, self._written), key=len, reverse=True)
        self._pattern = re.compile("|".join(written)) if written else None
        super().__init__(
            vocab_size=max(self._bytes) + 1,
            eos_token_id=eos_token_id,
            special_ids=special_ids,
            # A space may be written out as "\u2581", which has more bytes than a space.
            bound=TokenByteBound(max(len(text.encode()) for text in (*pieces, *added_tokens)))
            if _keeps_text(processor) and not left_strip_ids | right_strip_ids
            else None,
            chat_template=chat_template,
            special_tokens=special_tokens,
        )

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = []
        begin = 0
        for match in self._pattern.finditer(text) if self._pattern else ():
            token_id = self._written[match.group()]
            before = text[begin : match.start()]
            ids += self._processor.encode(before.rstrip() if token_id in self._left_strip_ids else before)
            ids.append(token_id)
            begin = _skip_blanks(text, match.end()) if token_id in self._right_strip_ids else match.end()
        ids += self._processor.encode(text[begin:])
        return [*self._bos_ids, *ids, *self._eos_ids] if add_special_tokens else ids

    def _decode(self, token_ids: list[int]) -> str:
        text = text_of_bytes(b"".join([self._bytes.get(token_id, b"") for token_id in token_ids]))
        return text[1:] if self._strips_space and text.startswith(" ") else text


def load_sentencepiece(path: Path) -> SentencePieceTokenizer:
    """A tokenizer.model, with what the tokenizer_config.json and added_tokens.json beside it say, if they are there.

    BOS is put before every prompt unless the config says `"add_bos_token": false`, as for Llama. Raises StartupError.
    """
    try:
        processor = SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError, ValueError) as error:
        raise StartupError(f"{path} is not a sentencepiece model; pass --tokenizer another one.") from error
    config = read_json(path.with_name("tokenizer_config.json"))
    added = read_json(path.with_name("added_tokens.json"))
    try:
        return _configured(processor, config, added, read_chat_template(path.parent))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise StartupError(
            f"{path}, or the tokenizer_config.json or added_tokens.json beside it, is broken ({error!r}); pass"
            " --tokenizer another one."
        ) from error


def _configured(
    processor: SentencePieceProcessor, config: Mapping[str, Any], added: dict[str, int], chat_template: TemplateText
) -> SentencePieceTokenizer:
    """Raises whatever comes of files that say something else than they should."""
    special_ids = set()
    strip_ids: dict[str, set[int]] = {"lstrip": set(), "rstrip": set()}
    for token_id, token in (config.get("added_tokens_decoder") or {}).items():
        if int(token_id) >= processor.get_piece_size():
            added[token["content"]] = int(token_id)
        if token.get("special"):
            special_ids.add(int(token_id))
        for side, stripping in strip_ids.items():
            if token.get(side):
                stripping.add(int(token_id))
    ids = list(range(processor.get_piece_size()))
    special_ids |= {i for i in ids if processor.is_control(i) or processor.is_unknown(i)}

    special_tokens: dict[str, str] = {}
    for name in ("bos", "eos", "unk", "pad"):
        token, own_id = config.get(f"{name}_token"), getattr(processor, f"{name}_id")()
        if token is not None:
            special_tokens[f"{name}_token"] = token["content"] if isinstance(token, dict) else token
        elif own_id >= 0:
            special_tokens[f"{name}_token"] = processor.id_to_piece(own_id)

    def id_of(name: str) -> list[int]:
        text = special_tokens.get(name)
        return [] if text is None else [added.get(text, processor.piece_to_id(text))]

    bos, eos = id_of("bos_token"), id_of("eos_token")
    return SentencePieceTokenizer(
        processor,
        added_tokens=added,
        special_ids=frozenset(special_ids),
        bos_ids=bos if config.get("add_bos_token", True) else [],
        eos_ids=eos if config.get("add_eos_token", False) else [],
        eos_token_id=eos[0] if eos else None,
        chat_template=chat_template,
        special_tokens=special_tokens,
        left_strip_ids=frozenset(strip_ids["lstrip"]),
        right_strip_ids=frozenset(strip_ids["rstrip"]),
    )


def processor_from_pieces(
    pieces: Sequence[str], scores: Sequence[float], types: Sequence[int], *, adds_space: bool
) -> SentencePieceProcessor:
    """A BPE model of the sentencepiece library from its parts: the pieces with ids 0, 1, ...

    `types` are numbered as in sentencepiece's file format (1 normal, 2 unknown, 3 control, 4 user defined, 5 unused,
    6 byte); `adds_space` puts a space before every text. Raises StartupError where the library refuses them.
    """
    entries = (
        _field(1, _field(1, piece.encode()) + _float_field(2, score) + _number_field(3, kind))
        for piece, score, kind in zip(pieces, scores, types)
    )
    trainer = _number_field(3, BPE_MODEL) + _number_field(35, int(BYTE in types))
    normalizer = _field(1, b"identity") + _number_field(3, int(adds_space)) + _number_field(4, 0) + _number_field(5, 1)
    model = b"".join(entries) + _field(2, trainer) + _field(3, normalizer)
    processor = SentencePieceProcessor()
    try:
        processor.load_from_serialized_proto(model)
    except RuntimeError as error:
        raise StartupError(f"sentencepiece refuses the tokenizer's pieces ({error}); pass --tokenizer.") from error
    return processor


def _skip_blanks(text: str, begin: int) -> int:
    match = BLANKS.match(text, begin)
    return begin if match is None else match.end()


def _keeps_text(processor: SentencePieceProcessor) -> bool:
    """Whether each byte of a text ends up in a token: nothing is normalised away, and unknown text becomes bytes."""
    num_bytes = sum(processor.is_byte(list(range(processor.get_piece_size()))))
    parts = dict(_fields(processor.serialized_model_proto()))
    normalizer = parts.get(NORMALIZER_FIELD, b"")
    fields = dict(_fields(normalizer)) if isinstance(normalizer, bytes) else {}
    has_no_rules = not fields.get(RULES_FIELD)
    keeps_blanks = fields.get(REMOVE_BLANKS_FIELD, 1) == 0
    return num_bytes == 256 and has_no_rules and keeps_blanks


# sentencepiece's file format is a protocol buffer: fields of a number, a wire type and a value.


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message; a nested message and a float are left as bytes."""
    position = 0
    while position < len(message):
        key, position = _read_varint(message, position)
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, position = _read_varint(message, position)
            yield number, value
            continue
        if wire_type == 2:
            length, position = _read_varint(message, position)
        else:
            length = {1: 8, 5: 4}[wire_type]
        yield number, message[position : position + length]
        position += length


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    """A number and the position behind it."""
    value = shift = 0
    while message[position] > 0x7F:
        value |= (message[position] & 0x7F) << shift
        position, shift = position + 1, shift + 7
    return value | message[position] << shift, position + 1


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _number_field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _float_field(number: int, value: float) -> bytes:
    return _varint(number << 3 | 5) + struct.pack("<f", value)
