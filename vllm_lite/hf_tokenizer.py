"""Tokenizers from Hugging Face files, through transformers. Prompts get exactly the ids of its `tokenizer(prompt)`."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from vllm_lite.base_tokenizer import NO_TEMPLATE, BaseTokenizer, text_of_bytes
from vllm_lite.errors import StartupError
from vllm_lite.tokenizer_bound import token_byte_bound
from vllm_lite.tokenizer_files import TemplateText, default_template, read_chat_template


class HuggingFaceTokenizer(BaseTokenizer):
    """A tokenizer of transformers. One written in Python encodes one text at a time; the others let threads run."""

    def __init__(self, tokenizer: Any, chat_template: TemplateText = NO_TEMPLATE) -> None:
        """`tokenizer` is what `AutoTokenizer.from_pretrained` returns; it is not to be used elsewhere."""
        special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
        vocab: dict[str, int] = tokenizer.get_vocab()
        super().__init__(
            vocab_size=max(vocab.values(), default=-1) + 1,
            eos_token_id=tokenizer.eos_token_id,
            special_ids=frozenset(special | set(tokenizer.all_special_ids)),
            bound=token_byte_bound(tokenizer.backend_tokenizer) if tokenizer.is_fast else None,
            chat_template=chat_template,
            is_quick=tokenizer.is_fast,
        )
        self.apply_chat_template = tokenizer.apply_chat_template
        self._tokenizer = tokenizer
        self._known_ids = frozenset(vocab.values())
        plain, kind = PreTrainedTokenizerFast, type(tokenizer)
        self._has_plain_decode = tokenizer.is_fast and kind.decode is plain.decode and kind._decode is plain._decode
        has_fallback = self._has_plain_decode and "ByteFallback" in repr(tokenizer.backend_tokenizer.decoder)
        self._bytes = _byte_tokens(vocab) if has_fallback else {}
        self._lock: contextlib.AbstractContextManager[object] = (
            contextlib.nullcontext() if tokenizer.is_fast else threading.Lock()
        )
        # The first call takes off a truncation or padding that the file asks for. From then on calls change nothing.
        self._encode("", add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        with self._lock:
            encoded = self._tokenizer(
                text,
                add_special_tokens=add_special_tokens,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )
        return list(encoded.input_ids)

    def _decode(self, token_ids: list[int]) -> str:
        if not self._has_plain_decode:
            text: str = self._tokenizer.decode(
                [token_id for token_id in token_ids if token_id in self._known_ids],
                skip_special_tokens=False,
                clean_up_tokenization_spaces=False,
                spaces_between_special_tokens=False,
            )
            return text
        if not self._bytes.keys().isdisjoint(token_ids):
            return self._decode_with_bytes(token_ids)
        # What transformers calls as well, without its own way there, which takes five times as long.
        text = self._tokenizer.backend_tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    def _decode_with_bytes(self, token_ids: list[int]) -> str:
        """As the decoder does it, but that a bad byte does not turn the good characters around it into U+FFFD.

        The library's byte fallback judges a run of bytes as a whole, so characters would come and go while they stream.
        """
        core = self._tokenizer.backend_tokenizer
        pieces: list[str] = []
        for is_byte, group in itertools.groupby(token_ids, self._bytes.__contains__):
            if is_byte:
                pieces.append(text_of_bytes(bytes(self._bytes[token_id] for token_id in group)))
            else:
                pieces += filter(None, map(core.id_to_token, group))
        text: str = core.decoder.decode(pieces)
        return text


def load_hugging_face(folder: Path, *, is_slow: bool, trust_remote_code: bool) -> HuggingFaceTokenizer:
    """The tokenizer of a folder; the network is not touched.

    Raises StartupError where there is none that transformers can read, and for `is_slow` where it has no Python
    tokenizer for it (its version 5 has very few).
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, use_fast=not is_slow, trust_remote_code=trust_remote_code, local_files_only=True
        )
        found = default_template(tokenizer.chat_template)
        adapter = HuggingFaceTokenizer(tokenizer, read_chat_template(folder) if found == NO_TEMPLATE else found)
    except Exception as error:  # for a tokenizer.json that is none, the tokenizers library raises just that class
        raise StartupError(f"No tokenizer can be loaded from {folder} ({error}); pass --tokenizer.") from error
    if is_slow and tokenizer.is_fast:
        raise StartupError(
            f"--tokenizer-mode slow: transformers has no Python tokenizer for {folder}, and there is no"
            " tokenizer.model for sentencepiece either; leave --tokenizer-mode out."
        )
    return adapter


def apply_without_tokenizer() -> Callable[..., str]:
    """transformers' `apply_chat_template` for a tokenizer that is none of its own: it has no special token."""
    apply: Callable[..., str] = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())).apply_chat_template
    return apply


def _byte_tokens(vocab: dict[str, int]) -> dict[int, int]:
    """The bytes that the tokens <0x00> to <0xFF> stand for."""
    names = {f"<0x{byte:02X}>": byte for byte in range(256)}
    return {vocab[name]: byte for name, byte in names.items() if name in vocab}
