"""The text of single tokens, which logprobs name them by. Knows the tokenizer and no request."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache

from vllm_lite.engine.detokenizer import REPLACEMENT
from vllm_lite.engine.llm_engine import UNDECODABLE
from vllm_lite.engine.tokenizer_protocol import Tokenizer
from vllm_lite.errors import RequestFailedError

logger = logging.getLogger(__name__)

MAX_CACHED = 2**16


class TokenTexts:
    """Any number of threads may ask."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.text = lru_cache(MAX_CACHED)(self._text)
        """By id: what the token says where others stand before it, a special token as it is written.

        A token that is a part of a character is U+FFFD, for each byte or once."""

    def bytes_of(self, token_id: int) -> list[int] | None:
        """Of the text in UTF-8; None for a part of a character, whose bytes the text does not tell."""
        text = self.text(token_id)
        return None if REPLACEMENT in text else list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ids in a row. Raises RequestFailedError for whatever the tokenizer's library raises."""
        try:
            return self._tokenizer.decode(
                token_ids, skip_special_tokens=skip_special_tokens, spaces_between_special_tokens=False
            )
        except Exception as error:
            logger.error("The tokenizer cannot decode %s.", list(token_ids), exc_info=error)
            raise RequestFailedError(f"{UNDECODABLE}.") from error

    def _text(self, token_id: int) -> str:
        """A first token may lose its space, so it is what a second one adds."""
        alone, twice = self.decode([token_id]), self.decode([token_id, token_id])
        return twice[len(alone) :] if twice.startswith(alone) else alone
