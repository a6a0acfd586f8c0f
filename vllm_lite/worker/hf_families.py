"""What each architecture's config.json calls its settings, and what it takes for granted where one is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vllm_lite.errors import StartupError
from vllm_lite.worker.config_values import ConfigValues
from vllm_lite.worker.hf_rope import LLAMA_KEYS, RopeKeys


@dataclass(frozen=True)
class Family:
    """`*_bias` name the key that decides, or the fixed answer."""

    max_position_embeddings: int
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The spellings of a setting, the one that counts most first; what is not here is called as in Llama's file."""
    own: Callable[[ConfigValues], dict[str, Any]] = lambda values: {}
    """Fields of ModelConfig that no other architecture has, or that its files cannot change."""
    num_kv_heads: int | None = None
    """None: as many as attention heads."""
    head_dim: int | None = None
    """None: hidden size / attention heads."""
    has_own_heads: bool = True
    """Whether keys may say the two; otherwise it is always None's rule."""
    intermediate_factor: int | None = None
    """intermediate_size / hidden_size where the file does not say the former; None: it must."""
    norm_eps: float = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    eos_token_id: int | None = None
    rope: RopeKeys | None = LLAMA_KEYS
    """None: positions do not turn queries and keys."""
    window: Literal["none", "every layer", "by layer type"] = "none"
    qkv_bias: str | bool = False
    o_bias: str | bool = False
    mlp_bias: str | bool = False
    qk_norm: bool = False

    def key(self, setting: str, values: ConfigValues) -> str:
        """The spelling of a setting in this file; the usual one where it is missing or null."""
        spellings = self.keys.get(setting, (setting,))
        return next((spelling for spelling in spellings if values.get(spelling) is not None), spellings[0])


def _gpt2(values: ConfigValues) -> dict[str, Any]:
    return {
        "scale_attention": values.flag("scale_attn_weights", True),
        "scale_attention_by_layer": values.flag("scale_attn_by_inverse_layer_idx", False),
    }


def _opt(values: ConfigValues) -> dict[str, Any]:
    is_first = values.flag("do_layer_norm_before", True)
    size = values.integer("word_embed_proj_dim", values.integer("hidden_size"))
    return {
        "norm_eps": 1e-5,
        "norm_is_first": is_first,
        "norm_is_affine": values.flag("layer_norm_elementwise_affine", True),
        "has_final_norm": is_first and not values.flag("_remove_final_layer_norm", False),
        "word_embed_proj_dim": None if size == values.integer("hidden_size") else size,
        **dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), values.flag("enable_bias", True)),
    }


def _bloom(values: ConfigValues) -> dict[str, Any]:
    if values.flag("slow_but_exact", False) and values.integer("pretraining_tp", 1) > 1:
        raise StartupError(
            f"{values.source}: 'slow_but_exact' true is not supported where 'pretraining_tp' is above 1; it may be "
            "false, which computes the same up to rounding."
        )
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "norm_is_residual": values.flag("apply_residual_connection_post_layernorm", False),
    }


def _gpt_neox(values: ConfigValues) -> dict[str, Any]:
    return {
        "has_parallel_residual": values.flag("use_parallel_residual", True),
        **dict.fromkeys(("qkv_bias", "o_bias"), values.flag("attention_bias", True)),
    }


FAMILIES = {
    "LlamaForCausalLM": Family(
        2048, eos_token_id=2, qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"
    ),
    "MistralForCausalLM": Family(131072, num_kv_heads=8, eos_token_id=2, window="every layer"),
    "Qwen2ForCausalLM": Family(32768, num_kv_heads=32, window="by layer type", qkv_bias=True),
    "Qwen3ForCausalLM": Family(
        32768,
        num_kv_heads=32,
        head_dim=128,
        window="by layer type",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
    ),
    "GPT2LMHeadModel": Family(
        1024,
        keys={
            "hidden_size": ("n_embd", "hidden_size"),
            "num_hidden_layers": ("n_layer", "num_hidden_layers"),
            "num_attention_heads": ("n_head", "num_attention_heads"),
            "max_position_embeddings": ("n_positions", "max_position_embeddings"),
            "intermediate_size": ("n_inner",),
            "rms_norm_eps": ("layer_norm_epsilon",),
            "hidden_act": ("activation_function",),
        },
        own=_gpt2,
        has_own_heads=False,
        intermediate_factor=4,
        norm_eps=1e-5,
        hidden_act="gelu_new",
        tie_word_embeddings=True,
        eos_token_id=50256,
        rope=None,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
    ),
    "OPTForCausalLM": Family(
        2048,
        keys={"intermediate_size": ("ffn_dim",), "hidden_act": ("activation_function",)},
        own=_opt,
        has_own_heads=False,
        hidden_act="relu",
        tie_word_embeddings=True,
        eos_token_id=2,
        rope=None,
    ),
    "BloomForCausalLM": Family(
        2048,
        keys={
            "hidden_size": ("n_embed", "hidden_size"),
            "num_hidden_layers": ("n_layer", "num_hidden_layers"),
            "num_attention_heads": ("n_head", "num_attention_heads"),
            "max_position_embeddings": ("seq_length",),
            "intermediate_size": ("n_inner",),
            "rms_norm_eps": ("layer_norm_epsilon",),
        },
        own=_bloom,
        has_own_heads=False,
        intermediate_factor=4,
        norm_eps=1e-5,
        tie_word_embeddings=True,
        eos_token_id=2,
        rope=None,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
    ),
    "GPTNeoXForCausalLM": Family(
        2048,
        keys={"rms_norm_eps": ("layer_norm_eps",)},
        own=_gpt_neox,
        has_own_heads=False,
        norm_eps=1e-5,
        hidden_act="gelu",
        eos_token_id=2,
        rope=RopeKeys(("rotary_emb_base", "rope_theta"), ("rotary_pct", "partial_rotary_factor"), partial=0.25),
        mlp_bias=True,
    ),
}
