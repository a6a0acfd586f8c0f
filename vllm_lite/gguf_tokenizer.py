"""Builds the tokenizer that a GGUF file's metadata describes. Knows neither the file format nor transformers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from vllm_lite.base_tokenizer import BaseTokenizer, TokenByteBound
from vllm_lite.errors import StartupError
from vllm_lite.sentencepiece_tokenizer import SentencePieceTokenizer, processor_from_pieces
from vllm_lite.tokenizer_bound import token_byte_bound
from vllm_lite.tokenizer_files import TemplateText, default_template

logger = logging.getLogger(__name__)

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
"""Values of `tokenizer.ggml.token_type`."""

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SYMBOLS_AND_BLANKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_WORDS = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{SYMBOLS_AND_BLANKS}"
QWEN2_WORDS = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{SYMBOLS_AND_BLANKS}"
TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """How a text is cut before its bytes are merged: each pattern cuts what the one before has left.

    `ignore_merges` takes a word that is a token as it is, whatever the merges say; `adds_bos` holds where the file
    does not say; `composes` puts the text into Unicode's composed form (NFC) first.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False
    composes: bool = False


_GPT2 = PreTokenizer((GPT2_WORDS,))
_SINGLE_DIGITS = PreTokenizer((r"\p{N}", GPT2_WORDS))
_LLAMA3 = PreTokenizer((LLAMA3_WORDS,), ignore_merges=True, adds_bos=True)
_QWEN2 = PreTokenizer((QWEN2_WORDS,), composes=True)
_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS.removesuffix(r"|\s+"), r"\p{N}+", r"[0-9][0-9][0-9]"))

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": _DEFAULT,
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "mpt": _GPT2,
    "olmo": _GPT2,
    "phi-2": _GPT2,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "command-r": _SINGLE_DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": PreTokenizer((QWEN2_WORDS,)),
    "tekken": PreTokenizer((TEKKEN_WORDS,), ignore_merges=True, adds_bos=True),
}
"""What `tokenizer.ggml.pre` can name, as llama.cpp defines it."""


class ByteLevelTokenizer(BaseTokenizer):
    """A byte-level BPE of the tokenizers library. Encoding lets other threads run."""

    def __init__(
        self,
        core: Tokenizer,
        *,
        vocab_size: int,
        bos_ids: list[int],
        eos_ids: list[int],
        eos_token_id: int | None,
        special_ids: frozenset[int],
        bound: TokenByteBound | None,
        chat_template: TemplateText,
        special_tokens: Mapping[str, str],
    ) -> None:
        """`bos_ids` and `eos_ids` are put around every prompt."""
        super().__init__(
            vocab_size=vocab_size,
            eos_token_id=eos_token_id,
            special_ids=special_ids,
            bound=bound,
            chat_template=chat_template,
            special_tokens=special_tokens,
        )
        self._core, self._bos_ids, self._eos_ids = core, bos_ids, eos_ids

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # Of the library's ways to encode, only those for batches release the interpreter's lock.
        ids: list[int] = self._core.encode_batch_fast([text])[0].ids
        return [*self._bos_ids, *ids, *self._eos_ids] if add_special_tokens else ids

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._core.decode(token_ids, skip_special_tokens=False)
        return text


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> BaseTokenizer:
    """The tokenizer of a GGUF file, from the values of its `tokenizer.ggml.*` keys. Raises StartupError."""
    model = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece}
    if not isinstance(model, str) or model not in builders:
        what = "no tokenizer" if model is None else f"a tokenizer of kind {model!r} (can be read: gpt2, llama)"
        raise StartupError(f"The GGUF file holds {what}; pass --tokenizer with a folder that has one.")
    try:
        return builders[model](metadata)
    except KeyError as error:
        raise StartupError(f"The GGUF file lacks {error.args[0]}; pass --tokenizer with a folder.") from error
    except StartupError:
        raise
    except Exception as error:  # for merges that do not fit, the tokenizers library raises just that class
        reason = str(error).partition("\n")[0]
        raise StartupError(
            f"The GGUF file's tokenizer is broken ({reason}); pass --tokenizer with a folder."
        ) from error


def _byte_level_bpe(metadata: Mapping[str, Any]) -> BaseTokenizer:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types = _token_types(metadata)
    pre = _pre_tokenizer(metadata)
    core = Tokenizer(
        models.BPE(
            vocab={token: token_id for token_id, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]],
            ignore_merges=pre.ignore_merges,
        )
    )
    if pre.composes:
        core.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    core.decoder = decoders.ByteLevel()
    special = [token_id for token_id, kind in enumerate(types) if kind in (UNKNOWN, CONTROL)]
    core.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in special])
    defined = [token_id for token_id, kind in enumerate(types) if kind == USER_DEFINED]
    core.add_tokens([AddedToken(tokens[i], special=False, normalized=False) for i in defined])
    return ByteLevelTokenizer(
        core,
        vocab_size=len(tokens),
        special_ids=frozenset(special),
        bound=token_byte_bound(core),
        **_chat(metadata),
        **_ends(metadata, adds_bos=pre.adds_bos),
    )


def _sentencepiece(metadata: Mapping[str, Any]) -> BaseTokenizer:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types = _token_types(metadata)
    if UNKNOWN not in types:
        types[metadata.get("tokenizer.ggml.unknown_token_id", 0)] = UNKNOWN
    scores = metadata["tokenizer.ggml.scores"]
    if not len(tokens) == len(scores) == len(types):
        raise ValueError(f"{len(tokens)} tokens, {len(scores)} scores, {len(types)} types")
    return SentencePieceTokenizer(
        processor_from_pieces(
            tokens,
            scores,
            types,
            adds_space=metadata.get("tokenizer.ggml.add_space_prefix", True),
        ),
        added_tokens={},
        special_ids=frozenset(token_id for token_id, kind in enumerate(types) if kind in (UNKNOWN, CONTROL)),
        **_chat(metadata),
        **_ends(metadata, adds_bos=True),
    )


def _token_types(metadata: Mapping[str, Any]) -> list[int]:
    num_tokens = len(metadata["tokenizer.ggml.tokens"])
    return [int(kind) for kind in metadata.get("tokenizer.ggml.token_type", [1] * num_tokens)]


def _pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre")
    if name is None:
        logger.warning("The GGUF file does not name its pre-tokenizer (an old file): llama.cpp's default is used.")
        return _DEFAULT
    if name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise StartupError(
            f"The GGUF file's pre-tokenizer {name!r} is unknown (known: {known}); pass --tokenizer with a folder."
        )
    return PRE_TOKENIZERS[name]


def _chat(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The template, and the special tokens under the names that templates have for them."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    ids = {
        name: metadata.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    return {
        "chat_template": default_template(metadata.get("tokenizer.chat_template")),
        "special_tokens": {
            f"{name}_token": tokens[int(token_id)]
            for name, token_id in ids.items()
            if token_id is not None and 0 <= int(token_id) < len(tokens)
        },
    }


def _ends(metadata: Mapping[str, Any], *, adds_bos: bool) -> dict[str, Any]:
    """What is put around a prompt, and the end of sequence."""
    bos, eos = (
        None if (token_id := metadata.get(f"tokenizer.ggml.{name}_token_id")) is None else int(token_id)
        for name in ("bos", "eos")
    )
    has_bos = bos is not None and metadata.get("tokenizer.ggml.add_bos_token", adds_bos)
    has_eos = eos is not None and metadata.get("tokenizer.ggml.add_eos_token", False)
    return {"bos_ids": [bos] if has_bos else [], "eos_ids": [eos] if has_eos else [], "eos_token_id": eos}
