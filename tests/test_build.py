"""What the composition root decides itself: the context, the end ids, whose tokenizer it is."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from tests.helpers.checkpoints import cached_checkpoint, copy_checkpoint, edit_json, reference_greedy
from tests.helpers.cpu_kernels import missing_requirement
from vllm_lite import SamplingParams, build
from vllm_lite.config import EngineConfig
from vllm_lite.errors import StartupError
from vllm_lite.kernels.cpu_library import cpu_flags
from vllm_lite.worker.hub import default_model_path


def make_parts(**fields: Any) -> build.EngineParts:
    return build.build_parts(EngineConfig(num_kv_blocks=64, num_threads=1, dtype="float32", **fields))


def test_context_is_the_checkpoints_or_less() -> None:
    folder = str(cached_checkpoint("llama"))
    assert make_parts(model=folder).settings.max_model_len == 128
    assert make_parts(model=folder, max_model_len=50).settings.max_model_len == 50
    with pytest.raises(StartupError, match=r"--max-model-len 129 is more than the checkpoint's context of 128 tokens"):
        make_parts(model=folder, max_model_len=129)


def test_a_context_without_room_for_an_answer_is_refused(tmp_path: Path) -> None:
    folder = copy_checkpoint(cached_checkpoint("llama"), tmp_path / "model")
    edit_json(folder / "config.json", max_position_embeddings=1)
    with pytest.raises(StartupError, match="the checkpoint's context of 1 token has no room"):
        make_parts(model=str(folder))
    assert make_parts(model=str(cached_checkpoint("llama")), max_model_len=2).settings.max_model_len == 2


def test_logprobs_of_more_tokens_than_there_are_mean_all(caplog: pytest.LogCaptureFixture) -> None:
    parts = make_parts(model=str(cached_checkpoint("llama")), max_logprobs=100_000)
    vocab_size = parts.model.vocab_size
    assert parts.settings.max_logprobs == vocab_size
    assert f"--max-logprobs 100000 is more than the vocabulary has tokens: {vocab_size} are meant" in caplog.text
    params = SamplingParams(max_tokens=1, logprobs=vocab_size, ignore_eos=True)
    parts.engine.add_request("id", None, [1, 2, 3], params)
    [delta] = parts.engine.step(parts.executor)
    assert delta.outputs[0].logprobs is not None and len(delta.outputs[0].logprobs[0]) == vocab_size


def test_dynamic_rope_goes_beyond_its_length_when_asked() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    folder = str(cached_checkpoint("llama", rope_parameters=rope))
    assert make_parts(model=folder).settings.max_model_len == 128
    assert make_parts(model=folder, max_model_len=256).settings.max_model_len == 256
    with pytest.raises(StartupError, match="context of 256 tokens"):
        make_parts(model=folder, max_model_len=257)


def test_context_larger_than_the_cache_names_both_and_the_way_out() -> None:
    folder = str(cached_checkpoint("llama"))
    with pytest.raises(StartupError, match=r"128 tokens.*7 blocks.*--max-model-len.*--num-kv-blocks"):
        build.build_parts(EngineConfig(model=folder, num_kv_blocks=7))


@pytest.mark.parametrize("num_kv_blocks", [None, 1000])
def test_context_that_cannot_fit_ends_the_start_before_anything_is_made(
    tmp_path: Path, num_kv_blocks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy_checkpoint(cached_checkpoint("llama"), tmp_path / "model")
    edit_json(folder / "config.json", max_position_embeddings=2**31 - 1)
    monkeypatch.setattr(build, "build_model", lambda *_: pytest.fail("a model was built"))
    with pytest.raises(StartupError, match="context of 2147483647 tokens does not fit the KV cache"):
        build.build_parts(EngineConfig(model=str(folder), num_kv_blocks=num_kv_blocks))


@pytest.mark.parametrize(
    "changes",
    [{"hidden_size": 2**31 - 8, "vocab_size": 2**20}, {"vocab_size": 2**31 - 1, "hidden_size": 2**30}],
    ids=["more than memory holds", "more than can be counted"],
)
def test_sizes_that_no_memory_has_are_named(tmp_path: Path, changes: dict[str, int]) -> None:
    folder = copy_checkpoint(cached_checkpoint("llama"), tmp_path / "model")
    edit_json(folder / "config.json", **changes)
    with pytest.raises(StartupError, match=r"not enough memory for LlamaForCausalLM with 3 layers.*--max-model-len"):
        make_parts(model=str(folder))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA: 2.00 MiB are too many"),
        MemoryError(),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        RuntimeError("unable to mmap 8 bytes from file <model>: Cannot allocate memory (12)"),
    ],
    ids=["of torch", "of Python", "of CUDA", "of the allocator", "of mmap"],
)
def test_a_lack_of_memory_is_named(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_to_build_the_model(monkeypatch, error)
    with pytest.raises(StartupError, match="not enough memory for LlamaForCausalLM"):
        make_parts(model=str(cached_checkpoint("llama")))


def test_a_fault_of_the_gpu_is_no_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    fail_to_build_the_model(monkeypatch, error)
    with pytest.raises(RuntimeError) as raised:
        make_parts(model=str(cached_checkpoint("llama")))
    assert raised.value is error


def fail_to_build_the_model(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*arguments: object, **keywords: object) -> None:
        raise error

    monkeypatch.setattr(build, "build_model", fail)


def test_end_ids_are_the_union_of_all_files(tmp_path: Path) -> None:
    folder = copy_checkpoint(cached_checkpoint("llama"), tmp_path / "model")
    edit_json(folder / "config.json", eos_token_id=[5, 6])
    edit_json(folder / "generation_config.json", eos_token_id=7)
    assert make_parts(model=str(folder)).settings.eos_token_ids == {1, 5, 6, 7}  # 1 is the tokenizer's


def test_tokenizer_of_another_model() -> None:
    folder = str(cached_checkpoint("llama", vocab_size=49152))
    own = make_parts(model=folder).tokenizer.encode("hello world")
    other = make_parts(model=folder, tokenizer=str(default_model_path())).tokenizer.encode("hello world")
    assert len(own) == 11
    assert len(other) == 2


def test_without_a_compiler_torch_gives_the_same_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("vllm_lite.kernels.cpu.find_compiler", lambda: None)
    folder = cached_checkpoint("llama")
    parts = make_parts(model=str(folder), device="cpu")
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "torch computes everything" in warning and "apt install g++" in warning
    prompt = [7, 99, 23, 54, 201]
    assert generate(parts, prompt, 20) == reference_greedy(folder, prompt, 20)


@pytest.mark.parametrize("flag", ["half", "float16"])
def test_float16_is_computed_in_what_the_cpu_kernels_know(
    flag: Literal["half", "float16"], caplog: pytest.LogCaptureFixture
) -> None:
    """One line says so, once; the answer is that of the checkpoint in float32, or near it in bfloat16."""
    if (missing := missing_requirement()) is not None:
        pytest.skip(missing)
    folder = cached_checkpoint("llama", dtype=torch.float16)
    config = EngineConfig(model=str(folder), num_kv_blocks=64, num_threads=1, device="cpu", dtype=flag)
    with caplog.at_level(logging.INFO, "vllm_lite"):
        parts = build.build_parts(config)
    used = "bfloat16" if "avx512_bf16" in cpu_flags() else "float32"
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "float16 is not" in line] == [
        f"float16 is not what this cpu computes in at full speed: running in {used}"
    ]
    assert any(line.startswith(f"LlamaForCausalLM in {used} on 1 threads") for line in lines)
    prompt = [7, 99, 23, 54, 201]
    output = generate(parts, prompt, 20)
    if used == "float32":
        assert output == reference_greedy(folder, prompt, 20)
    assert len(output) == 20


def generate(parts: build.EngineParts, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy ids."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    parts.engine.add_request("one", None, list(prompt), params)
    output: list[int] = []
    while parts.engine.has_unfinished:
        for delta in parts.engine.step(parts.executor):
            output.extend(delta.outputs[0].token_ids)
    return output
