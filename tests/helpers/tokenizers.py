"""Tokenizers made on the spot: byte-level BPE as in GPT-2, and sentencepiece with byte fallback as in Llama."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = (
    "hello world, the quick brown fox jumps over the lazy dog. Then it sleeps, and the world says hello again.",
    "A sequence of tokens is a sequence of numbers: one, two, three, four, five, six, seven, eight, nine, ten.",
    'Some words come with spaces   between them, some with "quotes" and some (very few) with brackets.',
    "naïve café, über-cool façade, déjà vu; mañana será otro día.",
)


def make_tokenizer(extra: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """One token a UTF-8 byte: 0 is `<|endoftext|>`, 1 is `<stop>` (both special), 2 to 257 are the bytes.

    `extra` are ordinary tokens of several characters with the ids 258 and up. A is 34, B is 35, and so on.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=258,
        special_tokens=["<|endoftext|>", "<stop>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(["a"], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|endoftext|>",
        bos_token="<|endoftext|>",
        additional_special_tokens=["<stop>"],
    )
    if extra:
        tokenizer.add_tokens(list(extra))
    return tokenizer


def train_byte_level_bpe(vocab_size: int = 400) -> Tokenizer:
    """A byte-level BPE with real merges; 0 is `<|endoftext|>`, special."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(CORPUS, trainer)
    return core


def train_sentencepiece(
    folder: Path,
    *,
    vocab_size: int = 400,
    user_defined: Sequence[str] = (),
    adds_space: bool = True,
    **options: Any,
) -> Path:
    """Trains Llama's kind of sentencepiece BPE (byte fallback, dummy prefix) and writes `folder/tokenizer.model`.

    0 is `<unk>`, 1 is `<s>`, 2 is `</s>`, 3 to 258 are the bytes, but for the user defined symbols, which come between.
    `options` are those of sentencepiece's trainer. Takes well under a second.
    """
    buffer = io.BytesIO()
    settings: dict[str, Any] = {
        "model_type": "bpe",
        "vocab_size": vocab_size,
        "byte_fallback": True,
        "add_dummy_prefix": adds_space,
        "character_coverage": 1.0,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "split_digits": True,
        "user_defined_symbols": list(user_defined),
        "hard_vocab_limit": False,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=buffer, **(settings | options)
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer.model"
    path.write_bytes(buffer.getvalue())
    return path


def llama_fast_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """A tokenizer.model as transformers has Llama's: BPE with byte fallback. BOS is not added."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    pieces = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
    ids = {piece: i for i, piece in enumerate(pieces)}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in pieces
        if not piece.startswith("<")
        for cut in range(1, len(piece))
        if piece[:cut] in ids and piece[cut:] in ids
    ]
    core = Tokenizer(models.BPE(vocab=ids, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
    )


def write_tokenizer_config(folder: Path, **fields: object) -> None:
    """Writes `folder/tokenizer_config.json`."""
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
