"""The config.json of GPT-2, OPT, BLOOM and GPT-NeoX, old spellings and new, with transformers as the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from vllm_lite.config import ModelConfig, RopeConfig
from vllm_lite.errors import StartupError
from vllm_lite.worker.hf_config import derived_max_model_len, read_model_config

MODEL_TYPES = {
    "GPT2LMHeadModel": "gpt2",
    "OPTForCausalLM": "opt",
    "BloomForCausalLM": "bloom",
    "GPTNeoXForCausalLM": "gpt_neox",
}
SIZES: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"n_embd": 48, "n_layer": 3, "n_head": 6},
    "OPTForCausalLM": {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "ffn_dim": 96},
    "BloomForCausalLM": {"hidden_size": 48, "n_layer": 3, "n_head": 6},
    "GPTNeoXForCausalLM": {
        "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 96,
    },
}  # fmt: skip
GPT2, OPT, BLOOM, NEOX = SIZES


def write_config(folder: Path, architecture: str, *, without: tuple[str, ...] = (), **changes: Any) -> Path:
    values = {"architectures": [architecture], "model_type": MODEL_TYPES[architecture], "vocab_size": 256}
    values |= SIZES[architecture]
    kept = {key: value for key, value in values.items() if key not in without} | changes
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def read(folder: Path) -> ModelConfig:
    return read_model_config(folder, trust_remote_code=False)


CONFIGURATIONS: list[tuple[str, dict[str, Any]]] = [
    *((architecture, {}) for architecture in SIZES),
    *((architecture, {"tie_word_embeddings": False}) for architecture in SIZES),
    *((architecture, {"eos_token_id": [3, 4], "dtype": "bfloat16"}) for architecture in SIZES),
    (GPT2, {"n_positions": 32, "n_inner": 80, "activation_function": "gelu", "layer_norm_epsilon": 1e-3}),
    (GPT2, {"n_inner": None, "torch_dtype": "float16"}),
    (OPT, {"max_position_embeddings": 32, "activation_function": "gelu_new", "word_embed_proj_dim": 24}),
    (BLOOM, {"layer_norm_epsilon": 1e-3, "n_inner": None}),
    (BLOOM, {"n_embed": 96, "num_attention_heads": 12}),
    (BLOOM, {"n_embed": None, "hidden_size": 96, "num_attention_heads": 12}),
    (NEOX, {"max_position_embeddings": 32, "hidden_act": "gelu_fast", "layer_norm_eps": 1e-3}),
    (NEOX, {"rotary_pct": 0.5, "rotary_emb_base": 500}),
    (NEOX, {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}),
    (NEOX, {"rope_scaling": {"type": "linear", "factor": 2.0}, "rotary_pct": 1.0}),
    (NEOX, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
]


@pytest.mark.parametrize(("architecture", "changes"), CONFIGURATIONS, ids=str)
def test_the_configuration_is_read_as_transformers_reads_it(
    architecture: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    without = ("n_head",) if "num_attention_heads" in changes else ()
    folder = write_config(tmp_path, architecture, without=without, **changes)
    reference: Any = AutoConfig.from_pretrained(folder)
    config = read(folder)

    assert config.architecture == architecture
    assert config.vocab_size == reference.vocab_size
    assert config.hidden_size == reference.hidden_size
    assert config.embedding_size == getattr(reference, "word_embed_proj_dim", reference.hidden_size)
    assert config.num_layers == reference.num_hidden_layers
    assert config.num_heads == config.num_kv_heads == reference.num_attention_heads
    assert config.head_dim == reference.hidden_size // reference.num_attention_heads
    assert config.tie_word_embeddings == reference.tie_word_embeddings
    ids = reference.eos_token_id
    assert config.eos_token_ids == set(ids if isinstance(ids, list) else [ids])
    assert config.dtype == (None if reference.dtype is None else str(reference.dtype).removeprefix("torch."))
    if architecture != BLOOM:
        assert config.max_position_embeddings == reference.max_position_embeddings
    inner = {GPT2: "n_inner", OPT: "ffn_dim", NEOX: "intermediate_size"}.get(architecture, "")
    assert config.intermediate_size == (getattr(reference, inner, None) or 4 * reference.hidden_size)
    eps = {NEOX: "layer_norm_eps"}.get(architecture, "layer_norm_epsilon")
    assert config.norm_eps == getattr(reference, eps, 1e-5)
    act = {NEOX: "hidden_act"}.get(architecture, "activation_function")
    assert config.hidden_act == getattr(reference, act, "gelu_pytorch_tanh")
    if architecture == NEOX:
        rope = reference.rope_parameters
        assert (config.rope.kind, config.rope.theta) == (rope["rope_type"], rope["rope_theta"])
        assert config.rope.partial_rotary_factor == rope["partial_rotary_factor"]
        assert config.rope.factor == rope.get("factor", 1.0)
    else:
        assert config.rope == RopeConfig()


@pytest.mark.parametrize(
    ("architecture", "changes", "fields"),
    [
        (GPT2, {}, {"scale_attention": True, "scale_attention_by_layer": False, "mlp_bias": True}),
        (GPT2, {"scale_attn_weights": False}, {"scale_attention": False}),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, {"scale_attention_by_layer": True}),
        (OPT, {}, {"norm_is_first": True, "has_final_norm": True, "norm_is_affine": True, "qkv_bias": True}),
        (OPT, {"do_layer_norm_before": False}, {"norm_is_first": False, "has_final_norm": False}),
        (OPT, {"_remove_final_layer_norm": True}, {"norm_is_first": True, "has_final_norm": False}),
        (OPT, {"layer_norm_elementwise_affine": False}, {"norm_is_affine": False}),
        (OPT, {"enable_bias": False}, {"qkv_bias": False, "o_bias": False, "mlp_bias": False}),
        (OPT, {"word_embed_proj_dim": 48}, {"word_embed_proj_dim": None}),
        (BLOOM, {}, {"norm_is_residual": False, "o_bias": True}),
        (BLOOM, {"apply_residual_connection_post_layernorm": True}, {"norm_is_residual": True}),
        (NEOX, {}, {"has_parallel_residual": True, "qkv_bias": True, "o_bias": True, "mlp_bias": True}),
        (NEOX, {"use_parallel_residual": False}, {"has_parallel_residual": False}),
        (NEOX, {"attention_bias": False}, {"qkv_bias": False, "o_bias": False, "mlp_bias": True}),
    ],
    ids=str,
)
def test_what_only_one_family_has(
    architecture: str, changes: dict[str, Any], fields: dict[str, Any], tmp_path: Path
) -> None:
    config = read(write_config(tmp_path, architecture, **changes))

    assert {name: getattr(config, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("architecture", "changes", "length"),
    [
        (GPT2, {"n_positions": 32}, 32),
        (OPT, {"max_position_embeddings": 32}, 32),
        (BLOOM, {}, 2048),
        (BLOOM, {"seq_length": 32}, 32),
        (NEOX, {"max_position_embeddings": 32}, 32),
        (NEOX, {"max_position_embeddings": 32, "rope_scaling": {"type": "linear", "factor": 4.0}}, 128),
    ],
)
def test_the_context_is_what_the_positions_are_made_for(
    architecture: str, changes: dict[str, Any], length: int, tmp_path: Path
) -> None:
    assert derived_max_model_len(read(write_config(tmp_path, architecture, **changes))) == length


@pytest.mark.parametrize(
    ("architecture", "without", "changes", "named"),
    [
        (GPT2, ("n_embd",), {}, "lacks 'n_embd'"),
        (GPT2, (), {"n_head": 7}, "n_embd 48 is not a multiple of n_head 7.$"),
        (GPT2, (), {"activation_function": 3}, "'activation_function' must be a string"),
        (GPT2, (), {"n_positions": 0}, "'n_positions' must be an integer of at least 1, got 0"),
        (GPT2, (), {"scale_attn_weights": "no"}, "'scale_attn_weights' must be true or false"),
        (OPT, ("ffn_dim",), {}, "lacks 'ffn_dim'"),
        (OPT, (), {"word_embed_proj_dim": -1}, "'word_embed_proj_dim' must be an integer of at least 1, got -1"),
        (OPT, (), {"do_layer_norm_before": 1}, "'do_layer_norm_before' must be true or false, got 1"),
        (BLOOM, ("hidden_size",), {}, "lacks 'n_embed'"),
        (BLOOM, (), {"slow_but_exact": True, "pretraining_tp": 4}, "'slow_but_exact' true is not supported"),
        (NEOX, (), {"rotary_pct": 0.4}, "head_dim 8, of which 3 are turned, is odd"),
        (NEOX, (), {"rotary_pct": 0.1}, "head_dim 8, of which 0 are turned"),
        (
            NEOX,
            (),
            {"rotary_pct": 1.5},
            "rotary_pct or partial_rotary_factor 1.5 is not supported, above 0 and",
        ),
        (NEOX, (), {"rotary_pct": 0}, "'rotary_pct' must be a number above 0, got 0"),
        (NEOX, (), {"rope_scaling": {"type": "banana", "factor": 2.0}}, "RoPE kind 'banana' is not supported"),
    ],
    ids=str,
)
def test_nonsense_is_refused_by_name(
    architecture: str, without: tuple[str, ...], changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(StartupError, match=named) as caught:
        read(write_config(tmp_path, architecture, without=without, **changes))
    assert "config.json" in str(caught.value)


def test_heads_of_odd_size_are_fine_where_nothing_turns_them(tmp_path: Path) -> None:
    assert read(write_config(tmp_path, GPT2, n_embd=30)).head_dim == 5
