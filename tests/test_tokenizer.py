from __future__ import annotations

import io
import json
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoTokenizer,
    ByT5Tokenizer,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from tests.helpers.loading import forbid_connections
from tests.helpers.tokenizers import make_tokenizer, train_byte_level_bpe, train_sentencepiece, write_tokenizer_config
from vllm_lite.base_tokenizer import BaseTokenizer
from vllm_lite.errors import StartupError
from vllm_lite.sentencepiece_tokenizer import SentencePieceTokenizer
from vllm_lite.tokenizer import load_tokenizer

PROMPTS = ["hi", "<|endoftext|>hi", "  two  spaces ", "tab\tnew\n", "é e\u0301 你好 😀", "hi<stop>", ""]


def _load(path: Path, *, mode: Any = "auto", trust: bool = False) -> BaseTokenizer:
    return load_tokenizer(path, mode=mode, gguf_metadata=None, trust_remote_code=trust)


def _with_bos() -> PreTrainedTokenizerFast:
    """Adds BOS to every prompt, as Llama 3 does."""
    core = train_byte_level_bpe()
    core.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<|endoftext|>", eos_token="<|endoftext|>")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a byte-level tokenizer and a configuration; the network is forbidden, standard input closed."""
    forbid_connections(monkeypatch)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    folder = tmp_path / "a model"
    make_tokenizer(["END. Then"]).save_pretrained(folder)
    LlamaConfig().save_pretrained(folder)
    return folder


# Hugging Face files


@pytest.mark.parametrize("make", [make_tokenizer, _with_bos])
def test_prompts_have_the_ids_of_transformers(folder: Path, make: Any) -> None:
    make().save_pretrained(folder)
    reference, tokenizer = AutoTokenizer.from_pretrained(folder), _load(folder)
    for prompt in PROMPTS:
        ids = reference(prompt).input_ids
        assert tokenizer.encode(prompt) == ids
        assert tokenizer.encode_plain(prompt) == reference(prompt, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert tokenizer.vocab_size == len(reference)
    assert tokenizer.eos_token_id == 0


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_file_in_the_folder_will_do(folder: Path, name: str) -> None:
    assert _load(folder / name).encode("AB") == [34, 35]


@pytest.mark.parametrize("config", [MistralConfig, Qwen2Config, Qwen3Config])
def test_no_model_type_makes_transformers_touch_the_network(folder: Path, config: Any) -> None:
    config(architectures=[config.__name__.replace("Config", "ForCausalLM")]).save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"transformers_version": "4.40.0"}))
    assert _load(folder).encode("AB<stop>") == [34, 35, 1]


def test_a_folder_with_nothing_but_tokenizer_json(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "lone").mkdir()
    (tmp_path / "lone" / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    assert _load(tmp_path / "lone").encode("AB<stop>") == [34, 35, 1]


def test_special_tokens_are_skipped_or_shown_between_spaces(folder: Path) -> None:
    tokenizer = _load(folder)
    ids = [*tokenizer.encode("hi"), 1, 1, *tokenizer.encode("yo"), 258]
    assert tokenizer.special_ids == {0, 1}
    assert tokenizer.decode(ids) == "hiyoEND. Then"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hi <stop> <stop> yoEND. Then"
    shown = tokenizer.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert shown == "hi<stop><stop>yoEND. Then"
    assert tokenizer.decode([300, 34, 259]) == "A"


def test_text_is_not_tidied_up(folder: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.save_pretrained(folder)
    assert _load(folder).decode(_load(folder).encode("a , b .")) == "a , b ."


def test_truncation_and_padding_of_the_file_do_not_touch_prompts(folder: Path) -> None:
    core = Tokenizer.from_file(str(folder / "tokenizer.json"))
    core.enable_truncation(4)
    core.enable_padding(length=8)
    core.save(str(folder / "tokenizer.json"))
    assert len(_load(folder).encode("abcdefghij")) == 10


def test_many_threads_encode_at_once(folder: Path) -> None:
    tokenizer = _load(folder)
    texts = [f"text {index} " * 500 for index in range(32)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == [tokenizer.encode(text) for text in texts]


# A lower bound of the number of tokens


def _bound(folder: Path, core: Tokenizer) -> int:
    PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(folder)
    return _load(folder).min_num_tokens("a" * 1000)


def test_min_num_tokens_where_it_is_certain(folder: Path) -> None:
    longest = max(len(token) for token in train_byte_level_bpe().get_vocab() if token != "<|endoftext|>")
    assert _bound(folder, train_byte_level_bpe()) == math.ceil(1000 / max(longest, len("<|endoftext|>")))
    bytes_and_space = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256}
    core = Tokenizer(models.BPE(vocab=bytes_and_space, merges=[], byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.ByteFallback()
    assert _bound(folder, core) == math.ceil(1000 / len("<0x00>"))
    core = Tokenizer(models.BPE(vocab=bytes_and_space, merges=[], byte_fallback=False))
    assert _bound(folder, core) == 0


def test_min_num_tokens_holds_for_spaces_that_are_written_out(folder: Path) -> None:
    pieces = ["▁" * (1 << power) for power in range(5)]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {piece: 256 + i for i, piece in enumerate(pieces)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[(p, p) for p in pieces[:-1]], byte_fallback=True))
    core.normalizer = normalizers.Replace(" ", "▁")
    core.decoder = decoders.ByteFallback()
    PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(folder)
    for text in ("▁" * 1600, " " * 1600):
        assert 0 < _load(folder).min_num_tokens(text) <= len(_load(folder).encode(text)) == 100


@pytest.mark.parametrize(
    "change",
    [
        lambda core: setattr(core, "normalizer", normalizers.NFC()),
        lambda core: setattr(core, "normalizer", normalizers.Replace("a", "")),
        lambda core: setattr(
            core,
            "pre_tokenizer",
            pre_tokenizers.Sequence([pre_tokenizers.Split("a", "removed"), pre_tokenizers.ByteLevel()]),
        ),
        lambda core: core.add_tokens([AddedToken("b", lstrip=True, normalized=False)]),
        lambda core: core.add_tokens([AddedToken("b", normalized=True)]),
        lambda core: setattr(core, "model", models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")),
        lambda core: setattr(core, "model", models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>")),
    ],
)
def test_min_num_tokens_where_it_is_not(folder: Path, change: Any) -> None:
    core = train_byte_level_bpe()
    change(core)
    assert _bound(folder, core) == 0


# Slow tokenizers, lone sentencepiece models


def test_a_lone_tokenizer_model(folder: Path, tmp_path: Path) -> None:
    path = train_sentencepiece(tmp_path / "lone")
    for given in (path.parent, path):
        tokenizer = _load(given)
        assert isinstance(tokenizer, SentencePieceTokenizer)
        assert tokenizer.encode("hello")[0] == 1
    train_sentencepiece(folder)
    assert not isinstance(_load(folder), SentencePieceTokenizer)
    assert isinstance(_load(folder, mode="slow"), SentencePieceTokenizer)
    assert isinstance(_load(folder / "tokenizer.model"), SentencePieceTokenizer)


def test_a_python_tokenizer_of_transformers(folder: Path, tmp_path: Path) -> None:
    ByT5Tokenizer().save_pretrained(tmp_path / "slow")
    for mode in ("auto", "slow"):
        tokenizer, reference = _load(tmp_path / "slow", mode=mode), ByT5Tokenizer()
        for prompt in ("hi you", "é 你", "a</s>b", ""):
            ids = reference(prompt).input_ids
            assert tokenizer.encode(prompt) == ids
            assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
        assert tokenizer.min_num_tokens("a" * 1000) == 0
        with ThreadPoolExecutor(4) as pool:
            assert len({tuple(ids) for ids in pool.map(tokenizer.encode, ["some text " * 50] * 16)}) == 1


def test_slow_mode_where_there_is_no_slow_tokenizer(folder: Path) -> None:
    with pytest.raises(StartupError, match=r"--tokenizer-mode slow: .*leave --tokenizer-mode out"):
        _load(folder, mode="slow")


# Refusals


CUSTOM_CODE = """
from pathlib import Path
Path(__file__).with_name("canary").touch()
Path({canary!r}).touch()
from transformers import PreTrainedTokenizerFast
class Custom(PreTrainedTokenizerFast):
    pass
"""


@pytest.mark.parametrize("auto_map", [{"AutoTokenizer": [None, "custom.Custom"]}, [None, "custom.Custom"]])
def test_custom_code_is_refused_without_being_asked_about_or_run(folder: Path, tmp_path: Path, auto_map: Any) -> None:
    canary = tmp_path / "canary"
    (folder / "custom.py").write_text(CUSTOM_CODE.format(canary=str(canary)))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    write_tokenizer_config(folder, **(config | {"auto_map": auto_map}))
    with pytest.raises(StartupError, match=r"its own Python code.*--trust-remote-code"):
        _load(folder)
    assert not canary.exists()


def test_custom_code_of_the_model_does_not_concern_the_tokenizer(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "custom.py").write_text(CUSTOM_CODE.format(canary=str(tmp_path / "canary")))
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoConfig": "custom.Custom"}}))
    assert _load(folder).encode("A") == [34]
    assert not (tmp_path / "canary").exists()


def test_trusted_custom_code_runs(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    canary = tmp_path / "canary"
    (folder / "custom.py").write_text(CUSTOM_CODE.format(canary=str(canary)))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    write_tokenizer_config(folder, **(config | {"auto_map": {"AutoTokenizer": [None, "custom.Custom"]}}))
    assert _load(folder, trust=True).encode("A") == [34]
    assert canary.exists()


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    LlamaConfig().save_pretrained(tmp_path)
    with pytest.raises(StartupError, match=rf"{tmp_path} holds no tokenizer.*--tokenizer"):
        _load(tmp_path)


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"no such file or folder.*--tokenizer"):
        _load(tmp_path / "no such folder")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_is_named(folder: Path, name: str) -> None:
    (folder / name).write_text('{"version": "1.0", ')
    with pytest.raises(StartupError, match=f"{name} is not JSON"):
        _load(folder)


@pytest.mark.parametrize("change", [{}, {"version": 5}, {"model": {"type": "banana"}}, {"model": {"type": "BPE"}}])
def test_a_tokenizer_json_that_is_something_else(folder: Path, change: dict[str, Any]) -> None:
    content = json.loads((folder / "tokenizer.json").read_text()) if change else {"version": "1.0"}
    (folder / "tokenizer.json").write_text(json.dumps(content | change))
    with pytest.raises(StartupError, match=r"No tokenizer can be loaded.*--tokenizer"):
        _load(folder)


def test_a_tokenizer_config_that_says_something_else(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    write_tokenizer_config(folder, **(config | {"model_max_length": "long"}))
    with pytest.raises(StartupError, match=r"No tokenizer can be loaded.*--tokenizer"):
        _load(folder)
