"""GGUF metadata read into a ModelConfig: all RoPE spellings, and what is refused by name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from vllm_lite.config import ModelConfig, RopeConfig
from vllm_lite.errors import StartupError
from vllm_lite.worker.gguf_config import read_gguf_config

SHAPES = {"token_embd.weight": (256, 64)}
LLAMA = {
    "block_count": 2, "context_length": 512, "embedding_length": 64, "feed_forward_length": 128,
    "attention.head_count": 8, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 500000.0, "rope.dimension_count": 8,
}  # fmt: skip


def read(
    changes: dict[str, Any] | None = None,
    *,
    shapes: dict[str, tuple[int, ...]] | None = None,
    factors: np.ndarray | None = None,
    **general: Any,
) -> ModelConfig:
    keys = {f"llama.{key}": value for key, value in {**LLAMA, **(changes or {})}.items() if value is not None}
    metadata = {"general.architecture": "llama", **keys, **{key.replace("__", "."): general[key] for key in general}}
    return read_gguf_config(metadata, shapes or SHAPES, factors, "model.gguf")


def test_the_keys_of_a_plain_model() -> None:
    assert read(tokenizer__ggml__eos_token_id=2) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=8,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        norm_eps=1e-5,
        rope=RopeConfig(theta=500000.0),
        sliding_windows=(None, None),
        tie_word_embeddings=True,
        eos_token_ids=frozenset({2}),
    )


def test_what_the_tensors_say() -> None:
    names = ["output", "blk.0.attn_q_norm", "blk.0.attn_output"]
    shapes = {**SHAPES, **{f"{name}.weight": (1,) for name in names}, "blk.0.attn_q.bias": (64,)}
    config = read(shapes=shapes)

    assert not config.tie_word_embeddings
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == (True, False, False, True)


def test_every_end_token_counts() -> None:
    assert read(
        tokenizer__ggml__eos_token_id=2, tokenizer__ggml__eot_token_id=7, tokenizer__ggml__eom_token_id=9
    ).eos_token_ids == {2, 7, 9}
    assert read().eos_token_ids == frozenset()


def test_missing_keys_have_their_defaults() -> None:
    config = read({"attention.head_count_kv": None, "rope.freq_base": None, "rope.dimension_count": None})

    assert (config.num_kv_heads, config.rope.theta, config.head_dim) == (8, 10000.0, 8)


def test_a_value_a_layer_is_read_where_all_are_the_same() -> None:
    assert read({"attention.head_count_kv": np.array([4, 4], np.int32)}).num_kv_heads == 4
    with pytest.raises(StartupError, match=r"'attention.head_count_kv' must be an integer"):
        read({"attention.head_count_kv": np.array([4, 2], np.int32)})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope.scaling.type": "none"}, RopeConfig(theta=500000.0)),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, RopeConfig("linear", 500000.0, factor=4.0)),
        ({"rope.scale_linear": 2.0}, RopeConfig("linear", 500000.0, factor=2.0)),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 128,
                "rope.scaling.yarn_beta_fast": 16.0,
            },
            RopeConfig("yarn", 500000.0, factor=4.0, original_max_position_embeddings=128, beta_fast=16.0),
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
            RopeConfig("yarn", 500000.0, factor=4.0, original_max_position_embeddings=512),
        ),
    ],
    ids=str,
)
def test_rope_scaling(changes: dict[str, Any], expected: RopeConfig) -> None:
    assert read(changes).rope == expected


def llama3_divisors(head_dim: int, theta: float, factor: float, original: int) -> np.ndarray:
    """What the converter writes, one frequency at a time."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < original / 4.0:
            divisors.append(1.0)
        elif wavelength > original / 1.0:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - 1.0) / (4.0 - 1.0)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize(("head_dim", "factor", "original"), [(128, 8.0, 8192), (64, 32.0, 8192), (64, 4.0, 4096)])
def test_the_llama3_numbers_are_found_from_their_divisors(head_dim: int, factor: float, original: int) -> None:
    divisors = llama3_divisors(head_dim, 500000.0, factor, original)
    rope = read({"attention.key_length": head_dim, "rope.dimension_count": None}, factors=divisors).rope

    assert (rope.kind, rope.factor, rope.original_max_position_embeddings) == ("llama3", factor, original)
    assert (rope.low_freq_factor, rope.high_freq_factor, rope.theta) == (1.0, 4.0, 500000.0)


@pytest.mark.parametrize(
    "divisors",
    [
        np.ones(4, np.float32),
        np.array([1.0, 1.5, 7.0, 8.0], np.float32),
        np.array([1.0, 2.0, 8.0], np.float32),
        np.array([], np.float32),
        np.array([np.nan, 1.0, 2.0, 8.0], np.float32),
    ],
    ids=str,
)
def test_other_divisors_are_refused_by_name(divisors: np.ndarray) -> None:
    with pytest.raises(StartupError, match=r"rope_freqs.weight follow no RoPE kind"):
        read(factors=divisors)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"block_count": None}, "lacks 'block_count'"),
        ({"context_length": 0}, "'context_length' must be an integer of at least 1, got 0"),
        ({"attention.head_count_kv": 3}, "num_key_value_heads 3 does not divide"),
        ({"attention.layer_norm_rms_epsilon": None}, "lacks 'attention.layer_norm_rms_epsilon'"),
        ({"block_count": 2**31 - 1}, "'block_count' must be at most 10000"),
        ({"attention.head_count": 2**31 - 1}, "'attention.head_count' must be at most 100000"),
        ({"attention.key_length": "x"}, "'attention.key_length' must be an integer of at least 1, got 'x'"),
        ({"attention.value_length": np.array([8, 9])}, "'attention.value_length' must be an integer of at least 1"),
        ({"expert_count": 8}, "mixtures of experts are not supported"),
        ({"attention.key_length": 16}, r"must be the same, got \[8, 16\]"),
        ({"rope.scaling.type": "longrope"}, "'longrope' .*is not supported"),
        ({"rope.scaling.type": "yarn", "rope.scaling.attn_factor": 2.0}, "'yarn' with an attn_factor is not supported"),
        ({"rope.scaling.type": 3}, "'rope.scaling.type' must be a string"),
    ],
    ids=str,
)
def test_what_does_not_run_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(StartupError, match=named) as caught:
        read(changes)
    assert "model.gguf" in str(caught.value)


@pytest.mark.parametrize(
    ("general", "named"),
    [
        ({"general__architecture": "falcon"}, "'falcon' is not supported; supported are llama, qwen2, qwen3"),
        ({"general__architecture": ["llama"]}, "'general.architecture' must be a string"),
        ({"split__count": 3}, "one part of several"),
        ({"tokenizer__ggml__eos_token_id": "2"}, "'tokenizer.ggml.eos_token_id' must be a token id"),
    ],
)
def test_general_keys_that_do_not_run_are_refused(general: dict[str, Any], named: str) -> None:
    with pytest.raises(StartupError, match=named):
        read(**general)


def test_a_file_without_embedding_is_refused() -> None:
    with pytest.raises(StartupError, match="has no token embedding"):
        read(shapes={"output.weight": (256, 64)})
