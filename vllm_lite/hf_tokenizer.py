"""Tokenizers from Hugging Face files, through transformers. Prompts get exactly the ids of its `tokenizer(prompt)`."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from transformers import AutoTokenizer

from vllm_lite.base_tokenizer import BaseTokenizer
from vllm_lite.errors import StartupError
from vllm_lite.tokenizer_bound import token_byte_bound


class HuggingFaceTokenizer(BaseTokenizer):
    """A tokenizer of transformers. One written in Python encodes one text at a time; the others let threads run."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is what `AutoTokenizer.from_pretrained` returns; it is not to be used elsewhere."""
        special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
        vocab: dict[str, int] = tokenizer.get_vocab()
        super().__init__(
            vocab_size=max(vocab.values(), default=-1) + 1,
            eos_token_id=tokenizer.eos_token_id,
            special_ids=frozenset(special | set(tokenizer.all_special_ids)),
            bound=token_byte_bound(tokenizer.backend_tokenizer) if tokenizer.is_fast else None,
        )
        self._tokenizer = tokenizer
        self._known_ids = frozenset(vocab.values())
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
        text: str = self._tokenizer.decode(
            [token_id for token_id in token_ids if token_id in self._known_ids],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
            spaces_between_special_tokens=False,
        )
        return text


def load_hugging_face(
    source: str, *, is_local: bool, slow: bool, trust_remote_code: bool, revision: str | None
) -> HuggingFaceTokenizer:
    """The tokenizer of a folder or of a name on the hub. With `is_local` the network is not touched.

    Raises StartupError where there is none, where it needs code that is not trusted, and for `slow` where transformers
    has no Python tokenizer for it.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source,
            use_fast=not slow,
            trust_remote_code=trust_remote_code,
            revision=revision,
            local_files_only=is_local,
        )
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError) as error:
        raise StartupError(f"No tokenizer can be loaded from {source} ({error}); pass --tokenizer.") from error
    if slow and tokenizer.is_fast:
        raise StartupError(
            f"--tokenizer-mode slow: transformers has no Python tokenizer for {source}, and there is no"
            " tokenizer.model for sentencepiece either; leave --tokenizer-mode out."
        )
    return HuggingFaceTokenizer(tokenizer)
