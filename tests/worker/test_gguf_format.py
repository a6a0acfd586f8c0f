"""Tensors of GGUF files: names, row order and values of every type, against the model that was written."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from tests.helpers.checkpoints import FAMILIES, make_model
from tests.helpers.gguf_files import (
    ARCHITECTURES,
    expanded,
    gguf_tensors,
    metadata_of,
    write,
    write_gguf,
)
from tests.helpers.loading import assert_same_tensors, load_tensors
from tests.worker.test_gguf_config import llama3_divisors
from vllm_lite.config import EngineConfig
from vllm_lite.errors import StartupError
from vllm_lite.worker import gguf_format
from vllm_lite.worker.checkpoint import open_checkpoint
from vllm_lite.worker.gguf_format import huggingface_name
from vllm_lite.worker.gguf_header import GGUFFile, open_gguf

BLOCKS_OF_32 = [Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1]
K_QUANTS = [Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K]
SCALE_BYTES = {Type.Q2_K: (80, 84), Type.Q3_K: (108, 110), Type.Q4_K: (0, 4), Type.Q5_K: (0, 4), Type.Q6_K: (208, 210)}
"""Where the float16 scales lie in a block of 256 weights."""


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("matrix_type", [Type.F32, Type.F16, Type.BF16, *BLOCKS_OF_32], ids=lambda t: t.name)
def test_every_tensor_is_that_of_the_model(family: str, matrix_type: Type, tmp_path: Path) -> None:
    model = make_model(family)
    path = write_gguf(tmp_path / "model.gguf", family, model, matrix_type=matrix_type)
    expected = {
        name: expanded(tensor, matrix_type) if tensor.dim() == 2 else tensor
        for name, tensor in model.state_dict().items()
    }

    assert_same_tensors(load_tensors(path), expected)
    assert_same_tensors(
        load_tensors(path, dtype=torch.bfloat16), {name: tensor.bfloat16() for name, tensor in expected.items()}
    )


@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_configuration_is_that_of_the_model(family: str, tmp_path: Path) -> None:
    model = make_model(family, head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 70000.0})
    reference: Any = model.config
    checkpoint = open_checkpoint(EngineConfig(model=str(write_gguf(tmp_path / "model.gguf", family, model))))
    config = checkpoint.config

    assert config.architecture == ("LlamaForCausalLM" if family == "mistral" else type(model).__name__)
    assert (config.hidden_size, config.intermediate_size, config.num_layers) == (64, 128, 3)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 2, 16)
    assert (config.vocab_size, config.max_position_embeddings, config.rope.theta) == (256, 128, 70000.0)
    assert config.norm_eps == pytest.approx(reference.rms_norm_eps)
    assert (config.qkv_bias, config.qk_norm) == (family == "qwen2", family == "qwen3")
    assert not config.tie_word_embeddings
    assert config.eos_token_ids == {1}
    assert checkpoint.gguf_metadata is not None
    assert checkpoint.gguf_metadata["tokenizer.ggml.eos_token_id"] == 1


def test_biases_of_a_llama_are_reordered_like_its_weights(tmp_path: Path) -> None:
    model = make_model("llama", attention_bias=True, mlp_bias=True)
    path = write_gguf(tmp_path / "model.gguf", "llama", model)
    config = open_checkpoint(EngineConfig(model=str(path))).config

    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, True, True)
    assert_same_tensors(load_tensors(path), model.state_dict())


def test_pieces_of_a_reordered_tensor_leave_the_others_pages_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "model.gguf", "llama", make_model("llama", head_dim=16))
    released: list[tuple[int, int]] = []
    monkeypatch.setattr(GGUFFile, "release", lambda self, offset, length: released.append((offset, length)))
    tensors = {tensor.name: tensor for tensor in open_checkpoint(EngineConfig(model=str(path))).tensors()}
    query = tensors["model.layers.0.self_attn.q_proj.weight"]
    (info,) = [info for info in open_gguf(path).tensors if info.name == "blk.0.attn_q.weight"]
    row_bytes = 64 * 4
    assert query.shape == (8 * 16, 64)

    for rows in (slice(0, 16), slice(32, 64), slice(120, 128)):
        query.read(rows)

    # The last is the second half of a head: all of its odd rows.
    assert released == [
        (info.offset, 16 * row_bytes),
        (info.offset + 32 * row_bytes, 32 * row_bytes),
        (info.offset + 113 * row_bytes, 15 * row_bytes),
    ]


def test_a_tied_model_has_no_head(tmp_path: Path) -> None:
    model = make_model("llama", tie_word_embeddings=True)
    path = write_gguf(tmp_path / "model.gguf", "llama", model)

    assert open_checkpoint(EngineConfig(model=str(path))).config.tie_word_embeddings
    assert "lm_head.weight" not in load_tensors(path)


@pytest.mark.parametrize("tensor_type", K_QUANTS, ids=lambda t: t.name)
def test_blocks_of_256_are_expanded_as_the_gguf_package_does(tensor_type: Type, tmp_path: Path) -> None:
    model = make_model("qwen2", hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen2")
    for key, value in metadata_of(model, "qwen2").items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    expected = {}
    for name, values in gguf_tensors(model, "qwen2").items():
        if values.ndim == 1:
            writer.add_tensor(name, values)
            expected[huggingface_name(name)] = torch.from_numpy(values)
            continue
        num_bytes = values.shape[1] // 256 * gguf.GGML_QUANT_SIZES[tensor_type][1]
        data = random.integers(0, 256, (values.shape[0], num_bytes), dtype=np.uint8)
        first, end = SCALE_BYTES[tensor_type]
        scales = random.normal(0, 0.01, (values.shape[0], (end - first) // 2)).astype(np.float16)
        data[:, first:end] = scales.view(np.uint8)
        writer.add_tensor(name, data, raw_dtype=tensor_type)
        expected[huggingface_name(name)] = torch.from_numpy(gguf.dequantize(data, tensor_type).reshape(values.shape))
    write(writer)

    loaded = load_tensors(tmp_path / "model.gguf")
    assert_same_tensors(loaded, expected)
    assert loaded["model.layers.0.mlp.up_proj.weight"].std() > 0.01


def test_a_folder_with_one_file_is_that_file(tmp_path: Path) -> None:
    model = make_model("qwen3")
    path = write_gguf(tmp_path / "model.gguf", "qwen3", model)

    for load_format in ("auto", "gguf"):
        assert_same_tensors(load_tensors(tmp_path, load_format=load_format), model.state_dict())
    checkpoint = open_checkpoint(EngineConfig(model=str(tmp_path), load_format="dummy"))
    assert (checkpoint.path, checkpoint.tensors()) == (path, [])


def test_the_divisors_of_llama_3_become_its_rope_and_no_tensor(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    model = make_model("llama", head_dim=32, rope_parameters=rope)
    divisors = llama3_divisors(32, 500000.0, 8.0, 32)
    path = write_gguf(tmp_path / "model.gguf", "llama", model, tensors={"rope_freqs.weight": divisors})
    config = open_checkpoint(EngineConfig(model=str(path))).config

    assert (config.rope.kind, config.rope.factor, config.rope.original_max_position_embeddings) == ("llama3", 8.0, 32)
    assert_same_tensors(load_tensors(path), model.state_dict())


@pytest.mark.parametrize("num_bytes_missing", [1, 1000, 100_000])
def test_a_file_whose_tensors_are_cut_off_is_refused(num_bytes_missing: int, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "llama", make_model())
    # The writer pads the last tensor, a norm of 256 bytes, to the alignment of 32: nothing to spare.
    path.write_bytes(path.read_bytes()[:-num_bytes_missing])

    with pytest.raises(StartupError, match=r"model.gguf.*cut off"):
        open_checkpoint(EngineConfig(model=str(path)))


def test_a_tensor_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "llama", make_model())
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up", b"blk.0.ffn_up"))

    with pytest.raises(StartupError, match=r"model.gguf: tensor blk.0.ffn_up.weight is there twice"):
        open_checkpoint(EngineConfig(model=str(path)))


def test_types_that_cannot_be_expanded_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = make_model()
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata_of(model, "llama").items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    for name, values in gguf_tensors(model, "llama").items():
        writer.add_tensor(name, values)
    writer.add_tensor("counts", np.arange(8, dtype=np.int32))
    write(writer)
    with pytest.raises(StartupError, match="tensor counts is of type I32, which is not supported"):
        load_tensors(path)

    content = path.read_bytes()
    at = content.index(b"counts") + len(b"counts") + 4 + 8
    path.write_bytes(content[:at] + (31).to_bytes(4, "little") + content[at + 4 :])
    with pytest.raises(StartupError, match="tensor counts is of type 31, which is not known"):
        open_checkpoint(EngineConfig(model=str(path)))


def test_names_that_are_not_known_stay(tmp_path: Path) -> None:
    assert huggingface_name("blk.3.attn_q.weight") == "model.layers.3.self_attn.q_proj.weight"
    assert huggingface_name("blk.3.attn_sinks.weight") == "blk.3.attn_sinks.weight"
    assert huggingface_name("mm.0.weight") == "mm.0.weight"
    assert set(ARCHITECTURES) == set(FAMILIES)


def test_the_default_model() -> None:
    started = time.perf_counter()
    checkpoint = open_checkpoint(EngineConfig())
    targets = {tensor.name: torch.full(tensor.shape, torch.nan) for tensor in checkpoint.tensors()}
    checkpoint.load_into(targets, lambda name: False)
    seconds = time.perf_counter() - started

    config = checkpoint.config
    assert config.architecture == "LlamaForCausalLM"
    assert (config.hidden_size, config.intermediate_size, config.num_layers) == (576, 1536, 30)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings, config.rope.theta) == (49152, 8192, 100000.0)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == {2}
    assert checkpoint.gguf_metadata is not None
    assert checkpoint.gguf_metadata["tokenizer.ggml.pre"] == "smollm"
    assert len(checkpoint.gguf_metadata["tokenizer.ggml.tokens"]) == 49152
    assert len(targets) == 272
    assert all(target.isfinite().all() for target in targets.values())
    assert seconds < 30


def test_without_the_gguf_package_a_file_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_format, "gguf", None)
    with pytest.raises(StartupError, match=r"model\.gguf cannot be read without the package gguf: pip install gguf"):
        gguf_format.read_gguf(tmp_path / "model.gguf")
