"""Files of GPT-2, OPT, BLOOM and GPT-NeoX in every layout that people have: names, formats, dtypes, heads, damage.

Logits after a prompt are those of Hugging Face, which reads the same folder, through the torch reference or the CPU
kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.checkpoints import FAMILIES as LLAMA_FAMILIES
from tests.helpers.checkpoints import (
    LAYER_NORM_FAMILIES,
    REMOVED,
    cached_checkpoint,
    copy_checkpoint,
    edit_json,
    make_model,
    reference_greedy,
    reference_model,
    save_checkpoint,
)
from tests.helpers.cpu_kernels import cpu_kernels
from tests.helpers.runner import last_logits, load_runner
from vllm_lite import SamplingParams
from vllm_lite.build import build_parts
from vllm_lite.config import EngineConfig
from vllm_lite.errors import StartupError
from vllm_lite.models.registry import MODELS

Tensors = dict[str, torch.Tensor]

PROMPT = [(17 * i + 5) % 254 + 2 for i in range(40)]
PREFIXES = {
    "llama": "model.",
    "qwen2": "model.",
    "gpt2": "transformer.",
    "opt": "model.",
    "bloom": "transformer.",
    "gpt_neox": "gpt_neox.",
}
HEADS = {family: "embed_out.weight" if family == "gpt_neox" else "lm_head.weight" for family in PREFIXES}
FAMILIES = list(LAYER_NORM_FAMILIES)


def embedding_of(family: str) -> str:
    _, hugging_face_s = {**LLAMA_FAMILIES, **LAYER_NORM_FAMILIES}[family]
    return MODELS[hugging_face_s.__name__].embedding_name


def change(family: str, tmp_path: Path, edit: Callable[[Tensors], Tensors], **overrides: Any) -> Path:
    """A checkpoint with other tensors in model.safetensors."""
    folder = copy_checkpoint(cached_checkpoint(family, **overrides), tmp_path / "model")
    tensors = edit(load_file(folder / "model.safetensors"))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


def reference_logits(folder: Path) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = reference_model(folder)(torch.tensor([PROMPT])).logits[0, -1]
    return logits


def assert_equals(folder: Path, expected: torch.Tensor, *, has_kernels: bool = True) -> None:
    runner = load_runner(folder, cpu=cpu_kernels() if has_kernels else None)
    assert (last_logits(runner, PROMPT) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("has_head", [False, True], ids=["no head", "equal head"])
@pytest.mark.parametrize("has_prefix", [False, True], ids=["base names", "full names"])
@pytest.mark.parametrize("family", ["llama", "qwen2", *FAMILIES])
def test_case_l5_names_with_and_without_what_begins_them(
    family: str, has_prefix: bool, has_head: bool, tmp_path: Path
) -> None:
    def edit(tensors: Tensors) -> Tensors:
        tensors.pop(HEADS[family], None)
        head = {HEADS[family]: tensors[embedding_of(family)].clone()} if has_head else {}
        prefix = "" if has_prefix else PREFIXES[family]
        return {**{name.removeprefix(prefix): tensor for name, tensor in tensors.items()}, **head}

    folder = change(family, tmp_path, edit, tie_word_embeddings=True)
    names = load_file(folder / "model.safetensors").keys()
    assert any(name.startswith(PREFIXES[family]) for name in names) == has_prefix
    expected = reference_logits(cached_checkpoint(family, tie_word_embeddings=True))
    assert torch.equal(reference_logits(folder), expected)
    assert_equals(folder, expected)
    assert_equals(folder, expected, has_kernels=False)


@pytest.mark.parametrize(
    ("family", "layer"), [("gpt2", "transformer.h.{}.attn."), ("gpt_neox", "gpt_neox.layers.{}.attention.")]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bool])
def test_case_l5_masks_are_ignored(
    family: str, layer: str, dtype: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def edit(tensors: Tensors) -> Tensors:
        for index in range(3):
            tensors[f"{layer.format(index)}bias"] = torch.ones(1, 1, 128, 128).tril().to(dtype)
            tensors[f"{layer.format(index)}masked_bias"] = torch.tensor(-1e4)
            tensors[f"{layer.format(index)}rotary_emb.inv_freq"] = torch.ones(2)
        return tensors

    folder = change(family, tmp_path, edit)
    assert_equals(folder, reference_logits(cached_checkpoint(family)))
    assert "no use for" not in caplog.text


@pytest.mark.parametrize("family", FAMILIES)
def test_case_l5_a_tensor_of_no_use_is_named_in_a_warning(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = change(family, tmp_path, lambda tensors: {**tensors, "score.weight": torch.ones(2, 3)})
    with caplog.at_level(logging.WARNING):
        assert_equals(folder, reference_logits(cached_checkpoint(family)))
    assert "the model has no use for tensor score.weight" in caplog.text


@pytest.mark.parametrize("has_kernels", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", *FAMILIES])
def test_case_l1_a_head_that_differs_from_the_tied_embedding_is_used(
    family: str, has_kernels: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def edit(tensors: Tensors) -> Tensors:
        return {**tensors, HEADS[family]: tensors[embedding_of(family)].flip(0)}

    folder = change(family, tmp_path, edit, tie_word_embeddings=True)
    expected = reference_logits(folder)
    assert not torch.equal(expected, reference_logits(cached_checkpoint(family, tie_word_embeddings=True)))
    assert_equals(folder, expected, has_kernels=has_kernels)
    assert f"ties {HEADS[family]} to {embedding_of(family)}, but the checkpoint's differ" in caplog.text


@pytest.mark.parametrize("family", ["llama", "qwen2", *FAMILIES])
def test_case_l1_an_untied_head_that_is_missing_is_named(family: str, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> Tensors:
        return {name: tensor for name, tensor in tensors.items() if name != HEADS[family]}

    folder = change(family, tmp_path, edit, tie_word_embeddings=False)
    with pytest.raises(StartupError, match=rf"lacks tensor {HEADS[family]} .*not tied to the embedding"):
        load_runner(folder)


def test_gpt_neox_s_head_may_have_the_usual_name(tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> Tensors:
        return {"lm_head.weight": tensors.pop("embed_out.weight"), **tensors}

    folder = change("gpt_neox", tmp_path, edit)
    assert_equals(folder, reference_logits(cached_checkpoint("gpt_neox")))


@pytest.mark.parametrize("layout", ["bin", "bin beside safetensors", "shards", "shards beside an old file"])
@pytest.mark.parametrize("family", FAMILIES)
def test_case_l6_the_right_files_are_read(family: str, layout: str, tmp_path: Path) -> None:
    folder, whole = tmp_path / "model", tmp_path / "model" / "model.safetensors"
    expected = reference_logits(cached_checkpoint(family))
    if layout.startswith("shards"):
        save_checkpoint(folder, make_model(family), max_shard_size="100KB")
        assert not whole.exists()
    else:
        copy_checkpoint(cached_checkpoint(family), folder)
    tensors = load_file(cached_checkpoint(family) / "model.safetensors")
    zeros = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    if layout == "bin":
        whole.unlink()
        torch.save(tensors, folder / "pytorch_model.bin")
    elif layout == "bin beside safetensors":
        torch.save(zeros, folder / "pytorch_model.bin")
    elif layout == "shards beside an old file":
        save_file(zeros, whole, {"format": "pt"})
    assert_equals(folder, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_case_l8_16_bit_files_in_float32_are_hugging_face_s(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = copy_checkpoint(cached_checkpoint(family, dtype=dtype), tmp_path / "model")
    expected = reference_logits(folder)
    assert_equals(folder, expected)
    edit_json(folder / "config.json", dtype=REMOVED)
    assert_equals(folder, expected, has_kernels=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_that_is_missing_or_of_another_shape_is_named(family: str, tmp_path: Path) -> None:
    """Whatever is wrong with a file, nothing is computed from it."""
    folder = change(family, tmp_path, lambda tensors: tensors)
    tensors = load_file(folder / "model.safetensors")
    kinds = {name.replace(".1.", ".0."): name for name in tensors if ".2." not in name}
    assert len(kinds) > 12
    for name in kinds.values():
        rest = {other: tensor for other, tensor in tensors.items() if other != name}
        save_file(rest, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(StartupError, match=f"lacks tensor {name}"):
            load_runner(folder)
        longer = torch.cat([tensors[name], tensors[name][:1]])
        save_file({**rest, name: longer}, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(StartupError, match=f"tensor {name} has shape .{len(longer)}"):
            load_runner(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_that_was_cut_off_is_named(family: str, tmp_path: Path) -> None:
    folder = change(family, tmp_path, lambda tensors: tensors)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-7])
    with pytest.raises(StartupError, match=r"model.safetensors cannot be read"):
        load_runner(folder)


def test_a_configuration_that_asks_for_other_weights_is_refused_by_name(tmp_path: Path) -> None:
    folder = copy_checkpoint(cached_checkpoint("gpt2"), tmp_path / "model")
    edit_json(folder / "config.json", vocab_size=259)
    with pytest.raises(StartupError, match=r"transformer.wte.weight has shape \[256, 64\] .* asks for \[259, 64\]"):
        load_runner(folder)
    edit_json(folder / "config.json", vocab_size=256, n_inner=96)
    with pytest.raises(StartupError, match=r"transformer.h.0.mlp.c_fc.weight has shape \[64, 128\] .* \[64, 96\]"):
        load_runner(folder)


def test_an_architecture_that_does_not_run_is_refused_with_those_that_do(tmp_path: Path) -> None:
    folder = copy_checkpoint(cached_checkpoint("gpt2"), tmp_path / "model")
    edit_json(folder / "config.json", architectures=["GPTJForCausalLM"])
    (folder / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(StartupError) as caught:
        load_runner(folder)
    assert all(name in str(caught.value) for name in ("GPTJForCausalLM", *MODELS))


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_need_no_file(family: str, tmp_path: Path) -> None:
    folder = copy_checkpoint(cached_checkpoint(family), tmp_path / "model")
    (folder / "model.safetensors").unlink()
    assert len(answer(folder, load_format="dummy", dtype="float32")) == 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_case_l8_every_stored_dtype_starts_by_default(
    family: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    folder = cached_checkpoint(family, dtype=dtype)
    with caplog.at_level(logging.INFO, "vllm_lite"):
        ids = answer(folder)
    assert len(ids) == 16
    if "CausalLM in float32" in caplog.text or "HeadModel in float32" in caplog.text:
        assert ids == reference_greedy(folder, PROMPT, 16)


def answer(folder: Path, **fields: Any) -> list[int]:
    """Greedy ids of the engine as it starts for a folder."""
    parts = build_parts(EngineConfig(model=str(folder), num_kv_blocks=128, num_threads=1, device="cpu", **fields))
    parts.engine.add_request("0", None, PROMPT, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    ids: list[int] = []
    while parts.engine.has_unfinished:
        for delta in parts.engine.step(parts.executor):
            ids.extend(delta.outputs[0].token_ids)
    return ids
