from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer

from tests.helpers.tokenizers import llama_fast_tokenizer, train_sentencepiece, write_tokenizer_config
from vllm_lite.errors import StartupError
from vllm_lite.sentencepiece_tokenizer import SentencePieceTokenizer, load_sentencepiece

TEXTS = [
    "hello world",
    " hello",
    "  two  spaces ",
    "tab\tnew\n",
    "é e\u0301 你好 😀 \u200b",
    "12 345",
    "▁x",
    "a" * 30,
    "",
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_sentencepiece(tmp_path_factory.mktemp("sentencepiece"), user_defined=["<ud>"])


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> SentencePieceTokenizer:
    return load_sentencepiece(path)


@pytest.fixture(scope="module")
def fast(path: Path) -> Tokenizer:
    """The same model as transformers has Llama's, written out as a tokenizer.json."""
    core: Tokenizer = llama_fast_tokenizer(path).backend_tokenizer
    return core


@pytest.mark.parametrize("text", [text for text in TEXTS if text])
def test_ids_are_those_of_llamas_fast_tokenizer(text: str, tokenizer: SentencePieceTokenizer, fast: Tokenizer) -> None:
    ids = tokenizer.encode_plain(text)
    assert ids == fast.encode(text).ids
    assert tokenizer.encode(text) == [1, *ids]
    assert tokenizer.decode([1, *ids]) == fast.decode(ids) == text.replace("▁", " ")


@pytest.mark.parametrize("text", ["<s>hi", "hi</s> there", "a <s> b", "<s> b", "<s></s><unk>", "x<unk>"])
def test_special_tokens_in_a_prompt_are_recognised(
    text: str, tokenizer: SentencePieceTokenizer, fast: Tokenizer
) -> None:
    ids = tokenizer.encode_plain(text)
    assert ids == fast.encode(text).ids
    assert tokenizer.decode(ids) == fast.decode(ids, skip_special_tokens=True)
    shown = tokenizer.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert shown == fast.decode(ids, skip_special_tokens=False)


@given(text=st.text())
def test_ids_are_the_librarys(text: str, tokenizer: SentencePieceTokenizer, path: Path) -> None:
    processor = SentencePieceProcessor(model_file=str(path))
    ids = tokenizer.encode_plain(text)
    assert ids == processor.encode(text)
    assert tokenizer.decode(ids) == processor.decode(ids)
    assert tokenizer.min_num_tokens(text) <= len(ids)


def test_special_tokens(tokenizer: SentencePieceTokenizer) -> None:
    assert tokenizer.special_ids == {0, 1, 2}
    assert (tokenizer.eos_token_id, tokenizer.vocab_size) == (2, 400)
    assert tokenizer.decode(tokenizer.encode("a<ud> b")) == "a<ud> b"
    ids = [1, *tokenizer.encode_plain("hi"), 2]
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s> hi </s>"
    assert tokenizer.decode([*ids, 9999]) == "hi"


def test_configuration_files_beside_the_model(path: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(path.read_bytes())
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_start|>": 401}))
    write_tokenizer_config(
        tmp_path,
        add_bos_token=False,
        add_eos_token=True,
        eos_token={"content": "<|im_end|>"},
        added_tokens_decoder={
            "1": {"content": "<s>", "special": True},
            "401": {"content": "<|im_start|>", "special": False},
            "402": {"content": "<|im_end|>", "special": True},
        },
    )
    tokenizer = load_sentencepiece(tmp_path / "tokenizer.model")
    hi = tokenizer.encode_plain("hi")
    assert tokenizer.encode("<|im_start|>hi<|im_end|>") == [401, *hi, 402, 402]
    assert tokenizer.decode([401, *hi, 402]) == "<|im_start|> hi"
    assert (tokenizer.eos_token_id, tokenizer.vocab_size) == (402, 403)
    assert tokenizer.special_ids == {0, 1, 2, 402}


def test_without_a_space_before_the_text(tmp_path: Path) -> None:
    tokenizer = load_sentencepiece(train_sentencepiece(tmp_path, adds_space=False))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text.replace("▁", " ")


@pytest.mark.parametrize(
    "options", [{"normalization_rule_name": "nmt_nfkc"}, {"remove_extra_whitespaces": True}, {"byte_fallback": False}]
)
def test_nothing_is_known_of_the_length_where_text_may_be_lost(tmp_path: Path, options: dict[str, Any]) -> None:
    tokenizer = load_sentencepiece(train_sentencepiece(tmp_path, **options))
    assert tokenizer.min_num_tokens("a" * 10000) == 0


def test_what_is_no_sentencepiece_model(tmp_path: Path) -> None:
    broken = tmp_path / "tokenizer.model"
    broken.write_bytes(b"IQ== 0\nIg== 1\n")
    with pytest.raises(StartupError, match=r"not a sentencepiece model.*--tokenizer"):
        load_sentencepiece(broken)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"a": {"content": "x"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"900": None}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"900": {"content": 5}}}),
        ("tokenizer_config.json", {"bos_token": {}}),
        ("tokenizer_config.json", {"eos_token": [1]}),
        ("added_tokens.json", {"<new>": None}),
        ("added_tokens.json", {"<new>": "900"}),
    ],
    ids=str,
)
def test_a_configuration_file_that_says_something_else(path: Path, tmp_path: Path, name: str, content: object) -> None:
    (tmp_path / "tokenizer.model").write_bytes(path.read_bytes())
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(StartupError, match=r"tokenizer.model, or .*is broken.*--tokenizer"):
        load_sentencepiece(tmp_path / "tokenizer.model")


def test_a_model_with_damaged_pieces(path: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "tokenizer.model"
    damaged.write_bytes(path.read_bytes().replace("▁w".encode(), b"\xff\xff\xffw"))
    with pytest.raises(StartupError, match=r"tokenizer.model.*--tokenizer"):
        load_sentencepiece(damaged)


def test_spaces_written_out_in_a_text_are_no_reason_to_refuse_it(tmp_path: Path) -> None:
    tokenizer = load_sentencepiece(train_sentencepiece(tmp_path, user_defined=["▁" * 16]))
    for text in ("▁" * 1600, " " * 1600):
        assert 0 < tokenizer.min_num_tokens(text) <= len(tokenizer.encode_plain(text))


def test_a_broken_configuration_file(path: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(path.read_bytes())
    for content, message in (("{", "is not JSON"), ("[1]", "holds no JSON object"), ("[" * 100_000, "is not JSON")):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(StartupError, match=message):
            load_sentencepiece(tmp_path / "tokenizer.model")
