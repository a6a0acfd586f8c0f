"""Models whose output is known, through the whole engine; where the contexts of GPT-2 and OPT end."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.checkpoints import cached_checkpoint, copy_checkpoint, edit_json, reference_greedy
from tests.helpers.scripted_models import const_model, save_scripted, script_model
from tests.helpers.tokenizers import make_tokenizer
from vllm_lite import SamplingParams, build
from vllm_lite.config import EngineConfig
from vllm_lite.errors import RequestError, StartupError
from vllm_lite.outputs import CompletionOutput, OutputAccumulator

TEXT = "Grüße, 世界! \U0001f600 <|x|>\n\0\ttabs  and  spaces"


def make_parts(folder: Path, **fields: Any) -> build.EngineParts:
    fields = {"dtype": "auto", "num_kv_blocks": 64, "num_threads": 1, "device": "cpu", **fields}
    return build.build_parts(EngineConfig(model=str(folder), **fields))


def answer(parts: build.EngineParts, prompt: list[int], **params: Any) -> CompletionOutput:
    return answers(parts, prompt, **params)[-1]


def answers(parts: build.EngineParts, prompt: list[int], **params: Any) -> list[CompletionOutput]:
    """After each step."""
    total = OutputAccumulator("one", None, prompt)
    outputs: list[CompletionOutput] = []
    parts.engine.add_request("one", None, list(prompt), SamplingParams(**{"temperature": 0, **params}))
    while parts.engine.has_unfinished:
        for delta in parts.engine.step(parts.executor):
            total.add(delta)
            outputs.append(total.output().outputs[0])
    return outputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_kernels", [True, False])
def test_a_script_comes_out_to_the_letter(
    dtype: torch.dtype, has_kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    if not has_kernels:
        monkeypatch.setattr("vllm_lite.kernels.cpu.find_compiler", lambda: None)
    tokenizer = make_tokenizer(["<|x|>"])
    ids = tokenizer(TEXT).input_ids
    parts = make_parts(save_scripted(tmp_path, script_model(ids, 3, len(tokenizer)), tokenizer, dtype=dtype))
    prompt = list(parts.tokenizer.encode("abc"))
    assert len(prompt) == 3

    output = answer(parts, prompt, max_tokens=200)
    assert output.text == TEXT
    assert list(output.token_ids) == [*ids, 0]
    assert output.finish_reason == "stop"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_logits_at_every_step(dtype: str, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    model = const_model({34: 2.0, 35: 1.0, 36: -5.0}, len(tokenizer))
    parts = make_parts(save_scripted(tmp_path, model, tokenizer, eos_token_id=[36, 0]), dtype=dtype)

    assert answer(parts, [40, 41], max_tokens=5).text == "AAAAA"
    sampled = answer(parts, [40, 41], temperature=1.0, seed=1, max_tokens=200, top_k=2).text
    share = sampled.count("A") / len(sampled)
    assert set(sampled) == {"A", "B"} and 0.63 < share < 0.83  # e / (e + 1) is 0.731
    ended = answer(parts, [40], max_tokens=5, logit_bias={36: 20.0})
    assert (ended.text, ended.finish_reason) == ("", "stop")


STOP_TEXT = "go ABC DEFGHIJ xx END. Then more"


@functools.cache
def stop_parts() -> build.EngineParts:
    """Says `STOP_TEXT`, "END. Then" as one token."""
    tokenizer = make_tokenizer(["END. Then"])
    ids = tokenizer(STOP_TEXT).input_ids
    assert len(ids) == 24 and 258 in ids
    with tempfile.TemporaryDirectory() as folder:
        return make_parts(save_scripted(Path(folder), script_model(ids, 3, len(tokenizer)), tokenizer))


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"stop": ["DEFGHIJ"]}, "go ABC "),
        ({"stop": ["DEFGHIJ"], "include_stop_str_in_output": True}, "go ABC DEFGHIJ"),
        ({"stop": ["END."]}, "go ABC DEFGHIJ xx "),
        ({"stop": ["END."], "include_stop_str_in_output": True}, "go ABC DEFGHIJ xx END."),
        ({"stop": ["xx", "DEF"]}, "go ABC "),
        ({"stop": "DEFGHIJ"}, "go ABC "),
        ({"stop": ["abc"]}, STOP_TEXT),
    ],
    ids=str,
)
def test_case_s1_stop_strings_across_and_inside_tokens(params: dict[str, Any], expected: str) -> None:
    parts = stop_parts()
    outputs = answers(parts, list(parts.tokenizer.encode("abc")), max_tokens=40, **params)
    assert (outputs[-1].text, outputs[-1].finish_reason) == (expected, "stop")
    assert all(expected.startswith(output.text) for output in outputs), "no message says more than the last"


@functools.cache
def hello_folder() -> tempfile.TemporaryDirectory[str]:
    """Says "hello", 1 (`<stop>`), "world" and ends with 0."""
    tokenizer = make_tokenizer()
    ids = [*tokenizer("hello").input_ids, 1, *tokenizer("world").input_ids]
    folder = tempfile.TemporaryDirectory()
    save_scripted(Path(folder.name), script_model(ids, 3, len(tokenizer)), tokenizer)
    return folder


ABSENT = "absent"


@pytest.mark.parametrize(
    ("in_config", "in_generation_config", "of_tokenizer", "is_end"),
    [
        (0, [0, 1], "<|endoftext|>", True),
        ([0, 1], ABSENT, "<|endoftext|>", True),
        ([0, 1], 0, "<|endoftext|>", True),
        (0, 1, "<|endoftext|>", True),
        (1, None, "<|endoftext|>", True),
        (None, ABSENT, "<stop>", True),
        (0, 0, "<stop>", True),
        (0, 0, "<|endoftext|>", False),
        (0, ABSENT, "<|endoftext|>", False),
        (0, None, "<|endoftext|>", False),
        (None, None, "<|endoftext|>", False),
    ],
)
def test_case_s2_every_end_token_of_any_file_ends_the_text(
    in_config: Any, in_generation_config: Any, of_tokenizer: str, is_end: bool, tmp_path: Path
) -> None:
    folder = copy_checkpoint(Path(hello_folder().name), tmp_path / "model")
    edit_json(folder / "config.json", eos_token_id=in_config)
    if in_generation_config == ABSENT:
        (folder / "generation_config.json").unlink()
    else:
        edit_json(folder / "generation_config.json", eos_token_id=in_generation_config)
    edit_json(folder / "tokenizer_config.json", eos_token=of_tokenizer)

    shown = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
    output = answer(make_parts(folder), [66, 67, 68], max_tokens=40, **shown)
    expected = ("hello", 6) if is_end else ("hello<stop>world", 12)
    assert (output.text, len(output.token_ids)) == expected
    assert (output.finish_reason, output.stop_reason) == ("stop", None)


def test_case_s3_a_special_token_that_stops_cuts_nothing_else() -> None:
    parts = make_parts(Path(hello_folder().name))
    for params, reason in (({"stop": ["<stop>"]}, "<stop>"), ({"stop_token_ids": [1]}, 1)):
        for skips in (True, False):
            output = answer(parts, [66, 67, 68], max_tokens=40, skip_special_tokens=skips, **params)
            assert (output.text, output.finish_reason, output.stop_reason) == ("hello", "stop", reason)
    with_stop = {"stop": ["<stop>"], "include_stop_str_in_output": True, "skip_special_tokens": False}
    assert answer(parts, [66, 67, 68], max_tokens=40, **with_stop).text == "hello <stop>"
    for stop in ("o <stop>", " <stop>"):  # who asks for the space gets rid of it, too
        output = answer(parts, [66, 67, 68], max_tokens=40, stop=stop, skip_special_tokens=False)
        assert (output.text, output.stop_reason) == ("hello <stop>".removesuffix(stop), stop)


def test_case_p3_penalties_count_the_tokens_that_users_expect(tmp_path: Path) -> None:
    """All in one batch, with a neighbour that samples."""
    tokenizer = make_tokenizer()
    model = const_model({34: 2.05, 35: 1.5, 36: 1.2}, len(tokenizer))
    parts = make_parts(save_scripted(tmp_path, model, tokenizer), dtype="float32")
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("z", {}, "AAAAAAAAAA"),
        ("z", {"presence_penalty": 0.6}, "ABAAAAAAAA"),
        ("z", {"frequency_penalty": 0.6}, "ABACBACBAC"),
        ("z", {"repetition_penalty": 1.5}, "ABAA"),
        ("A", {"repetition_penalty": 1.5}, "BAAA"),
        ("A", {"presence_penalty": 1.0}, "ABCA"),
    ]
    for index, (prompt, params, text) in enumerate(cases):
        fields = {"temperature": 0, "max_tokens": len(text), **params}
        parts.engine.add_request(str(index), prompt, list(parts.tokenizer.encode(prompt)), SamplingParams(**fields))
    parts.engine.add_request("x", "AB", [34, 35], SamplingParams(presence_penalty=2, repetition_penalty=3, seed=1))
    texts = dict.fromkeys([*map(str, range(len(cases))), "x"], "")
    while parts.engine.has_unfinished:
        for delta in parts.engine.step(parts.executor):
            texts[delta.request_id] += delta.outputs[0].text
    assert [texts[str(index)] for index in range(len(cases))] == [text for _, _, text in cases]


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_case_m5_the_context_ends_where_the_learnt_positions_do(family: str) -> None:
    """Hugging Face gives one token more than the table has rows, for the last one is not fed back; here none does."""
    size: dict[str, Any] = {"n_positions": 32} if family == "gpt2" else {"max_position_embeddings": 32}
    folder = cached_checkpoint(family, **size)
    parts = make_parts(folder, dtype="float32")
    ids = [(17 * i + 5) % 254 + 2 for i in range(33)]
    assert parts.settings.max_model_len == 32

    def length(num_prompt_tokens: int, **params: Any) -> tuple[int, str | None]:
        output = answer(parts, ids[:num_prompt_tokens], ignore_eos=True, **params)
        assert list(output.token_ids) == reference_greedy(folder, ids[:num_prompt_tokens], len(output.token_ids))
        return len(output.token_ids), output.finish_reason

    assert length(5) == (16, "length")
    assert length(5, max_tokens=None) == (27, "length")
    assert length(20, max_tokens=12) == (12, "length")
    assert length(20, max_tokens=13) == (12, "length")
    assert length(20, max_tokens=10**9) == (12, "length")
    assert length(31) == (1, "length")
    for num_prompt_tokens in (32, 33):
        with pytest.raises(RequestError, match="context holds 32"):
            answer(parts, ids[:num_prompt_tokens])
    for max_tokens in (0, -1):
        with pytest.raises(RequestError, match="max_tokens"):
            answer(parts, ids[:4], max_tokens=max_tokens)
    assert length(3, max_tokens=2) == (2, "length")


@pytest.mark.parametrize(
    ("family", "size"),
    [("gpt2", {"n_positions": 32}), ("opt", {"max_position_embeddings": 32})],
)
def test_case_m5_a_context_beyond_the_learnt_positions_is_refused_at_the_start(
    family: str, size: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "build_model", lambda *_: pytest.fail("a model was built"))
    with pytest.raises(StartupError, match=r"--max-model-len 33 is more than the checkpoint's context of 32 tokens"):
        make_parts(cached_checkpoint(family, **size), max_model_len=33)
