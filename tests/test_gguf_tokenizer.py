from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from tests.helpers.gguf_metadata import byte_level_metadata, default_model_file, sentencepiece_metadata
from tests.helpers.timing import best_time
from tests.helpers.tokenizers import train_byte_level_bpe, train_sentencepiece
from vllm_lite.base_tokenizer import BaseTokenizer
from vllm_lite.errors import StartupError
from vllm_lite.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_from_gguf
from vllm_lite.sentencepiece_tokenizer import load_sentencepiece
from vllm_lite.tokenizer import load_tokenizer
from vllm_lite.worker.gguf_header import open_gguf

TEXTS = [
    "Hello  world\n\nIt is 2024;   12345 apples",
    "x =  42\n    7",
    "a1b22c333",
    "def f(n):\n    return n  # 10 items\n",
    "café 日本語 🙂\tdone.  ",
    "١٢٣ ½  ²",
    "year 1999, 3.14",
    "  5\n\n  6",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|endoftext|>hi <|im_start|>",
    "I'LL don't we've",
    " two  spaces ",
    "e\u0301 and \u00e9",
    "\x04 a byte that the vocabulary lacks",
    "\U000c0000",
    "",
]


@pytest.fixture(scope="module")
def smollm_metadata() -> dict[str, Any]:
    return open_gguf(default_model_file()).metadata


@pytest.fixture(scope="module")
def smollm(smollm_metadata: dict[str, Any]) -> BaseTokenizer:
    return tokenizer_from_gguf(smollm_metadata)


@pytest.fixture(scope="module")
def smollm_of_transformers() -> Any:
    """transformers' conversion, with the splitting of digits that it forgets."""
    path = default_model_file()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    return tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_default_model_has_the_ids_of_transformers(
    text: str, smollm: BaseTokenizer, smollm_of_transformers: Any
) -> None:
    ids = smollm.encode(text)
    assert ids == smollm_of_transformers(text).input_ids
    shown = smollm.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert shown == smollm_of_transformers.decode(ids)
    assert smollm.decode(ids) == smollm_of_transformers.decode(ids, skip_special_tokens=True)


def test_default_model_has_the_special_tokens_of_transformers(
    smollm: BaseTokenizer, smollm_of_transformers: Any
) -> None:
    assert smollm.eos_token_id == smollm_of_transformers.eos_token_id == 2
    assert smollm.vocab_size == len(smollm_of_transformers)
    added = smollm_of_transformers.added_tokens_decoder.items()
    assert smollm.special_ids == {token_id for token_id, token in added if token.special}


@given(st.text())
def test_default_model_has_at_least_min_num_tokens(smollm: BaseTokenizer, text: str) -> None:
    assert smollm.min_num_tokens(text) <= len(smollm.encode(text))


def test_a_prompt_of_megabytes_is_known_to_be_long(smollm: BaseTokenizer) -> None:
    for text in ("a" * 2**23, "你" * (2**23 // 3), " " * 2**23):
        assert smollm.min_num_tokens(text) > 100_000
    assert smollm.min_num_tokens("\x04" * 2**23) == 0
    assert smollm.encode("\x04" * 100) == []


@pytest.mark.parametrize("unit", ["a", "你", " ", "hello 12, "])
def test_encoding_takes_linear_time(smollm: BaseTokenizer, unit: str) -> None:
    short, long = unit * (2**15 // len(unit.encode())), unit * (2**18 // len(unit.encode()))
    assert best_time(lambda: smollm.encode(long), 3) < 40 * best_time(lambda: smollm.encode(short), 3)


def test_default_model_is_built_quickly_and_without_transformers(smollm_metadata: dict[str, Any]) -> None:
    assert best_time(lambda: tokenizer_from_gguf(smollm_metadata), 2) < 0.5
    code = (
        "import sys, vllm_lite.tokenizer\n"
        "print([name for name in ('torch', 'transformers', 'gguf') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# Byte-level BPE


@functools.cache
def _core(pre: str) -> Any:
    tokenizer: Any = tokenizer_from_gguf(byte_level_metadata(train_byte_level_bpe(), pre))
    return tokenizer._core


def _words(pre: str, text: str) -> list[str]:
    """How the pre-tokenizer cuts a text, in the characters of byte-level BPE."""
    normalizer, cutter = _core(pre).normalizer, _core(pre).pre_tokenizer
    return [word for word, _ in cutter.pre_tokenize_str(normalizer.normalize_str(text) if normalizer else text)]


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "it's 1234 I'LL a\n\n b", ["it", "'s", "Ġ1234", "ĠI", "'", "LL", "Ġa", "ĊĊ", "Ġb"]),
        ("smollm", "a 1234b", ["a", "Ġ", "1", "2", "3", "4", "b"]),
        ("starcoder", "x=42", ["x", "=", "4", "2"]),
        ("llama-bpe", "it's 12345 I'LL (a)\n\n b", ["it", "'s", "Ġ", "123", "45", "ĠI", "'LL", "Ġ(", "a", ")ĊĊ", "Ġb"]),
        ("qwen2", "it's 123 e\u0301.", ["it", "'s", "Ġ", "1", "2", "3", "ĠÃ©", "."]),
        ("deepseek-r1-qwen", "123 .a", ["1", "2", "3", "Ġ.", "a"]),
        ("tekken", "fooBar 12 a/b", ["foo", "Bar", "Ġ", "1", "2", "Ġa", "/b"]),
        ("default", "a+b 1234 it's", ["a", "+", "b", "Ġ", "123", "4", "Ġit", "'", "s"]),
    ],
)
def test_pre_tokenizers_cut_as_llama_cpp_defines(pre: str, text: str, words: list[str]) -> None:
    assert _words(pre, text) == words


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
@given(text=st.text(max_size=30))
def test_no_pre_tokenizer_loses_text(name: str, text: str) -> None:
    decoded = decoders.ByteLevel().decode(_words(name, text))
    assert decoded == (normalizers.NFC().normalize_str(text) if PRE_TOKENIZERS[name].composes else text)


def test_gpt2_equals_the_librarys_own_pre_tokenizer() -> None:
    core = train_byte_level_bpe()
    tokenizer = tokenizer_from_gguf(byte_level_metadata(core, "gpt-2"))
    for text in TEXTS:
        assert tokenizer.encode(text) == core.encode(text).ids


def test_llama3_takes_whole_tokens_whatever_the_merges_say() -> None:
    core = train_byte_level_bpe()
    metadata = byte_level_metadata(core, "llama-bpe")
    metadata["tokenizer.ggml.tokens"].append("zqzq")
    metadata["tokenizer.ggml.token_type"].append(1)
    reference = Tokenizer(models.BPE(vocab=core.get_vocab() | {"zqzq": 400}, merges=[], ignore_merges=True))
    reference.pre_tokenizer = pre_tokenizers.Split(Regex(r"\S+"), "isolated")
    assert tokenizer_from_gguf(metadata).encode_plain("zqzq") == reference.encode("zqzq").ids == [400]
    assert len(tokenizer_from_gguf(metadata | {"tokenizer.ggml.pre": "gpt-2"}).encode_plain("zqzq")) == 4


@pytest.mark.parametrize(
    ("pre", "keys", "before", "after"),
    [
        ("gpt-2", {}, [], []),
        ("gpt-2", {"add_bos_token": True}, [0], []),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True, "eos_token_id": 5}, [0], [5]),
        ("llama-bpe", {}, [0], []),
        ("llama-bpe", {"add_bos_token": False}, [], []),
    ],
)
def test_what_is_put_around_a_prompt(pre: str, keys: dict[str, object], before: list[int], after: list[int]) -> None:
    tokenizer = tokenizer_from_gguf(byte_level_metadata(train_byte_level_bpe(), pre, **keys))
    plain = tokenizer.encode_plain("hi")
    assert tokenizer.encode("hi") == before + plain + after
    assert tokenizer.encode("<|endoftext|>hi") == [*before, 0, *plain, *after]


def test_user_defined_tokens_are_found_in_text_and_shown() -> None:
    metadata = byte_level_metadata(train_byte_level_bpe(), "gpt-2")
    metadata["tokenizer.ggml.tokens"].append("<tool call>")
    metadata["tokenizer.ggml.token_type"].append(4)
    tokenizer = tokenizer_from_gguf(metadata)
    ids = tokenizer.encode("hi<tool call>hi")
    assert 400 in ids and 400 not in tokenizer.special_ids
    assert tokenizer.decode(ids) == "hi<tool call>hi"


def test_a_file_that_does_not_name_its_pre_tokenizer_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = tokenizer_from_gguf(byte_level_metadata(train_byte_level_bpe(), None))
    assert "pre-tokenizer" in caplog.text
    named = tokenizer_from_gguf(byte_level_metadata(train_byte_level_bpe(), "default"))
    assert tokenizer.encode("it's 1234, hi") == named.encode("it's 1234, hi")


# Sentencepiece


@pytest.mark.parametrize("adds_space", [True, False])
def test_llama_pieces_give_the_ids_of_sentencepiece(tmp_path: Path, adds_space: bool) -> None:
    path = train_sentencepiece(tmp_path, adds_space=adds_space)
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata(path, add_space_prefix=adds_space))
    reference = load_sentencepiece(path)
    for text in [*TEXTS, "hello world" * 20, "aaaaaaaaaaaaa", "<s>hello</s> world", "a " * 50]:
        ids = reference.encode(text)
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == reference.decode(ids)
        assert 0 < tokenizer.min_num_tokens(text) <= len(ids) or not text
    assert tokenizer.special_ids == reference.special_ids == {0, 1, 2}
    assert (tokenizer.eos_token_id, tokenizer.vocab_size) == (reference.eos_token_id, reference.vocab_size)


def test_llama_ends_are_honoured(tmp_path: Path) -> None:
    path = train_sentencepiece(tmp_path)
    plain = tokenizer_from_gguf(sentencepiece_metadata(path)).encode_plain("hello")
    for keys, expected in (
        ({}, [1, *plain]),
        ({"add_bos_token": False}, plain),
        ({"add_eos_token": True}, [1, *plain, 2]),
    ):
        assert tokenizer_from_gguf(sentencepiece_metadata(path, **keys)).encode("hello") == expected


def test_llama_file_without_a_piece_marked_as_unknown(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata(train_sentencepiece(tmp_path))
    metadata["tokenizer.ggml.token_type"][0] = 1
    assert tokenizer_from_gguf(metadata).encode("hello 你") == load_sentencepiece(tmp_path / "tokenizer.model").encode(
        "hello 你"
    )


# Refusals


def _metadata(**keys: object) -> dict[str, Any]:
    """Of a tokenizer that can be read, but for `keys`; None leaves one out."""
    values = byte_level_metadata(train_byte_level_bpe(), "gpt-2")
    values |= {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return {key: value for key, value in values.items() if value is not None}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pre": "banana"}, "pre-tokenizer 'banana' is unknown.*--tokenizer"),
        ({"model": "t5"}, "kind 't5'.*--tokenizer"),
        ({"model": None}, "no tokenizer.*--tokenizer"),
        ({"merges": None}, "lacks tokenizer.ggml.merges.*--tokenizer"),
        ({"model": "llama"}, "lacks tokenizer.ggml.scores.*--tokenizer"),
        ({"model": ["gpt2"]}, "kind .'gpt2'.*--tokenizer"),
        ({"pre": ["gpt2"]}, "tokenizer is broken.*--tokenizer"),
        ({"tokens": 5}, "tokenizer is broken.*--tokenizer"),
        ({"merges": ["a b c"]}, "tokenizer is broken.*--tokenizer"),
        ({"merges": ["a \x00banana"]}, "tokenizer is broken.*--tokenizer"),
        ({"bos_token_id": "first"}, "tokenizer is broken.*--tokenizer"),
        ({"model": "llama", "scores": [0.0] * 7}, "tokenizer is broken .400 tokens, 7 scores.*--tokenizer"),
    ],
)
def test_what_cannot_be_read_is_named(keys: dict[str, object], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        tokenizer_from_gguf(_metadata(**keys))


def test_pieces_that_sentencepiece_refuses(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata(train_sentencepiece(tmp_path))
    metadata["tokenizer.ggml.tokens"][300] = metadata["tokenizer.ggml.tokens"][301]
    with pytest.raises(StartupError, match="sentencepiece refuses"):
        tokenizer_from_gguf(metadata)


def test_slow_mode() -> None:
    with pytest.raises(StartupError, match="--tokenizer-mode slow"):
        load_tokenizer(Path("x.gguf"), mode="slow", gguf_metadata=_metadata(), trust_remote_code=False)
