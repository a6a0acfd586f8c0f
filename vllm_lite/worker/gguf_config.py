"""Reads the metadata of a GGUF file into a ModelConfig. Knows llama.cpp's keys and tensor names, not how they lie."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from vllm_lite.config import ModelConfig, RopeConfig
from vllm_lite.errors import StartupError
from vllm_lite.worker.config_values import ConfigValues
from vllm_lite.worker.hf_config import MAX_HEADS, MAX_LAYERS, check_heads

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Mistral models are "llama" in GGUF: llama.cpp gives them no window."""
HEAD_DIM_KEYS = ("attention.key_length", "attention.value_length", "rope.dimension_count")
END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def read_gguf_config(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], rope_factors: np.ndarray | None, source: str
) -> ModelConfig:
    """What a GGUF file says about its model.

    `shapes` are those of the tensors under their GGUF names, `rope_factors` the [head_dim / 2] float32 divisors of the
    frequencies that files of Llama 3.1 and later carry. Raises StartupError that names the key.
    """
    general = ConfigValues(metadata, source)
    architecture = general.text("general.architecture", "")
    if architecture not in ARCHITECTURES:
        raise StartupError(
            f"{source}: GGUF architecture {architecture!r} is not supported; supported are {', '.join(ARCHITECTURES)}."
        )
    if general.number("split.count", 0.0, may_be_zero=True) > 1:
        raise StartupError(f"{source} is one part of several; join them with `llama-gguf-split --merge`.")
    values = _model_values(metadata, architecture, source)
    embedding = shapes.get("token_embd.weight", ())
    if len(embedding) != 2:
        raise StartupError(f"{source} has no token embedding (tensor token_embd.weight).")
    num_layers = values.integer("block_count", at_most=MAX_LAYERS)
    num_heads = values.integer("attention.head_count", at_most=MAX_HEADS)
    head_dim = values.integer("attention.key_length", values.integer("embedding_length") // num_heads)
    context_length = values.integer("context_length")
    config = ModelConfig(
        architecture=ARCHITECTURES[architecture],
        vocab_size=embedding[0],
        hidden_size=values.integer("embedding_length"),
        intermediate_size=values.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=values.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=context_length,
        norm_eps=values.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(values, context_length, head_dim, rope_factors),
        sliding_windows=(None,) * num_layers,
        tie_word_embeddings="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        o_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        qk_norm="blk.0.attn_q_norm.weight" in shapes,
        eos_token_ids=frozenset().union(*(general.ids(key) for key in END_KEYS)),
    )
    check_heads(config, source)
    return config


def _model_values(metadata: Mapping[str, Any], architecture: str, source: str) -> ConfigValues:
    """The keys of the model without their prefix. A list with a value a layer becomes that value where all agree."""
    prefix = architecture + "."
    values: dict[str, Any] = {}
    for key, value in metadata.items():
        if key.startswith(prefix):
            is_uniform = isinstance(value, np.ndarray) and value.size > 0 and bool((value == value[0]).all())
            values[key.removeprefix(prefix)] = value[0].item() if is_uniform else value
    if values.get("expert_count"):
        raise StartupError(f"{source}: mixtures of experts are not supported ({prefix}expert_count).")
    wrapped = ConfigValues(values, f"{source}, metadata {prefix}*")
    head_dims = {wrapped.integer(key) for key in HEAD_DIM_KEYS if key in wrapped}
    if len(head_dims) > 1:
        raise StartupError(
            f"{source}: {prefix}attention.key_length, attention.value_length and rope.dimension_count must be the "
            f"same, got {sorted(head_dims)}."
        )
    if head_dims:
        values["attention.key_length"] = head_dims.pop()
    return wrapped


def _rope(values: ConfigValues, context_length: int, head_dim: int, factors: np.ndarray | None) -> RopeConfig:
    theta = values.number("rope.freq_base", 10000.0)
    kind = values.text("rope.scaling.type", "linear" if "rope.scale_linear" in values else "none")
    if factors is not None:
        if kind != "none":
            raise StartupError(f"{values.source}: tensor rope_freqs.weight beside {kind} scaling is not supported.")
        return _llama3_rope(theta, head_dim, factors, values.source)
    if kind == "none":
        return RopeConfig(theta=theta)
    factor = values.number("rope.scaling.factor", values.number("rope.scale_linear", 1.0))
    if kind == "linear":
        return RopeConfig(kind="linear", theta=theta, factor=factor)
    if kind != "yarn" or values.number("rope.scaling.attn_factor", 1.0) != 1.0:
        detail = "with an attn_factor" if kind == "yarn" else "(supported are none, linear and yarn)"
        raise StartupError(f"{values.source}: RoPE kind {kind!r} {detail} is not supported.")
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=values.integer("rope.scaling.original_context_length", context_length),
        beta_fast=values.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=values.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def _llama3_rope(theta: float, head_dim: int, factors: np.ndarray, source: str) -> RopeConfig:
    """Finds the numbers that the divisors were made from: GGUF keeps the result of the llama3 rule alone.

    Every published model has low and high frequency factors of 1 and 4. With these, one divisor between the two ends
    gives the original context length; all the others then show whether that is right.
    """
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high, factor = 1.0, 4.0, float(factors.max(initial=1.0))
    between = np.flatnonzero((factors > 1.0) & (factors < factor))
    if factors.shape == wavelengths.shape and between.size:
        at = between[0]
        smooth = (1 / factors[at] - 1 / factor) / (1 - 1 / factor)
        original = round(float(wavelengths[at] * (smooth * (high - low) + low)))
        smooths = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
        if np.allclose(1 / ((1 - smooths) / factor + smooths), factors, rtol=1e-3):
            return RopeConfig("llama3", theta, 1.0, factor, original, low, high)
    raise StartupError(f"{source}: the divisors in tensor rope_freqs.weight follow no RoPE kind that is supported.")
