"""Prompts of exactly so many tokens. Knows tokenizers, no engine and no server."""

from __future__ import annotations

import random
from collections.abc import Callable

from scripts.bench.workloads import Prompt, Workload
from vllm_lite.config import EngineConfig
from vllm_lite.engine.tokenizer_protocol import Tokenizer
from vllm_lite.tokenizer import load_tokenizer
from vllm_lite.worker.checkpoint import open_checkpoint, tokenizer_path

NUM_CANDIDATES = 200
"""Texts of single tokens that prompts are made of."""
MAX_DRAWS = 100_000


def open_tokenizer(model: str | None) -> Tokenizer:
    """The tokenizer of a model, as the server loads it."""
    config = EngineConfig(model=model)
    checkpoint = open_checkpoint(config)
    return load_tokenizer(
        tokenizer_path(config, checkpoint), mode="auto", gguf_metadata=checkpoint.gguf_metadata, trust_remote_code=False
    )


class PromptMaker:
    """Random words, from a fixed seed: what a prompt says does not change how long a forward takes.

    A prompt is made of text, since a server of the native protocol takes no ids; its words are tokens of their own, so
    that ids are easy to count.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int = 0) -> None:
        self._tokenizer = tokenizer
        self._random = random.Random(seed)
        words = self._draw(lambda text: len(text) > 2 and text[0] == " " and _is_plain(text[1:]))
        # A tokenizer of single bytes has no words.
        self._pieces = words if len(words) > 20 else self._draw(_is_plain)

    def make(self, workload: Workload) -> list[Prompt]:
        """The prompts of a run. Other ones at every call, so that a server that remembers prompts gains nothing."""
        return [self._make(workload.prompt_len) for _ in range(workload.num_prompts)]

    def _make(self, length: int) -> Prompt:
        pieces = [self._random.choice(self._pieces) for _ in range(length)]
        while pieces:
            text = "".join(pieces)
            token_ids = self._tokenizer.encode(text)
            if len(token_ids) == length:
                return Prompt(text, token_ids)
            if len(token_ids) < length:
                break
            del pieces[: len(token_ids) - length]  # the tokenizer adds tokens of its own, such as BOS
        raise ValueError(f"no prompt of exactly {length} tokens was found for this tokenizer")

    def _draw(self, is_wanted: Callable[[str], bool]) -> list[str]:
        """Distinct texts of single tokens, in the order drawn."""
        num_draws = min(MAX_DRAWS, self._tokenizer.vocab_size)
        found: dict[str, None] = {}
        for token_id in self._random.sample(range(self._tokenizer.vocab_size), num_draws):
            text = self._tokenizer.decode([token_id])
            if token_id not in self._tokenizer.special_ids and is_wanted(text):
                found[text] = None
            if len(found) == NUM_CANDIDATES:
                break
        return list(found)


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isalpha()
