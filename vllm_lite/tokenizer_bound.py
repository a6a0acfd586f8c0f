"""How many bytes of a text one token can stand for at most, read off a tokenizer of the tokenizers library."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer

from vllm_lite.base_tokenizer import TokenByteBound

SPACE = "\u2581"
UTF8_BYTES = frozenset({*range(0xC0), *range(0xC2, 0xF5)})
HARMLESS_STEPS = {"ByteLevel", "Digits", "Split", "Metaspace", "Sequence", "Prepend", "Replace"}


def token_byte_bound(core: Tokenizer) -> TokenByteBound | None:
    """The bound, None unless it is certain.

    It is certain for a BPE over single bytes, be it byte-level or with byte fallback, where nothing shortens a text
    before it is cut into tokens.
    """
    if type(core.model).__name__ != "BPE" or not _keeps_text(core):
        return None
    added = core.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip or token.normalized for token in added):
        return None  # such a token swallows the blanks around it
    vocab = core.get_vocab()
    is_byte_level = '"ByteLevel"' in _json_of(core.pre_tokenizer)
    byte_tokens = _byte_level_tokens() if is_byte_level else {byte: f"<0x{byte:02X}>" for byte in UTF8_BYTES}
    missing = frozenset(byte for byte in UTF8_BYTES if byte_tokens[byte] not in vocab)
    if missing and not (is_byte_level and core.model.unk_token is None):
        return None
    if not is_byte_level and not core.model.byte_fallback:
        return None
    written = {token.content for token in added}
    # A space may be written out as "\u2581" in the text, so that counts with its own bytes.
    longest = max(len(token) if is_byte_level and token not in written else len(token.encode()) for token in vocab)
    return TokenByteBound(longest, missing)


def _byte_level_tokens() -> dict[int, str]:
    """The character that byte-level BPE writes each byte as: itself where it prints, one above 255 otherwise."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}


def _keeps_text(core: Tokenizer) -> bool:
    """Whether normalising and cutting leave every byte of a text in place, but for what they add."""
    for step in (core.normalizer, core.pre_tokenizer):
        for part in _steps(json.loads(_json_of(step))):
            replaces = part["type"] == "Replace" and (part["pattern"], part["content"]) != ({"String": " "}, SPACE)
            if part["type"] not in HARMLESS_STEPS or replaces or part.get("behavior") == "Removed":
                return False
    return True


def _steps(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A normaliser or pre-tokenizer and the steps inside it."""
    if step is None:
        return []
    inner = step.get("normalizers") or step.get("pretokenizers") or []
    return [step, *(deeper for part in inner for deeper in _steps(part))]


def _json_of(step: Any) -> str:
    return "null" if step is None else step.__getstate__().decode()
