"""Reads config.json and generation_config.json into a ModelConfig, as plain JSON: runs no code, needs no transformers.

Where a key is missing, each architecture has its own default, the one that transformers has for it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from vllm_lite.config import INT32_MAX, ModelConfig, RopeConfig
from vllm_lite.errors import StartupError
from vllm_lite.worker.config_values import ConfigValues, read_json
from vllm_lite.worker.hf_families import FAMILIES, Family
from vllm_lite.worker.hf_rope import read_rope

MAX_LAYERS = 10_000
MAX_HEADS = 100_000
"""Far above any model's; a broken file that says more would have the start count to it."""
DTYPE_NAMES = ("float32", "float16", "bfloat16")


def read_model_config(folder: Path, *, trust_remote_code: bool) -> ModelConfig:
    """What the checkpoint in `folder` says about its model.

    Raises StartupError that names the file and the key for what is missing, contradictory or not supported.
    """
    values = read_json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else ConfigValues({}, str(generation_path))
    architecture = _architecture(values, trust_remote_code=trust_remote_code)
    family = FAMILIES[architecture]

    def key(setting: str) -> str:
        return family.key(setting, values)

    hidden_size = values.integer(key("hidden_size"))
    num_layers = values.integer(key("num_hidden_layers"), at_most=MAX_LAYERS)
    num_heads = values.integer(key("num_attention_heads"), at_most=MAX_HEADS)
    inner = None if family.intermediate_factor is None else family.intermediate_factor * hidden_size
    max_position_embeddings = values.integer(key("max_position_embeddings"), family.max_position_embeddings)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=values.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=values.integer(key("intermediate_size"), inner),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(values, family, num_heads),
        head_dim=_head_dim(values, family, hidden_size, num_heads),
        max_position_embeddings=max_position_embeddings,
        norm_eps=values.number(key("rms_norm_eps"), family.norm_eps),
        rope=RopeConfig() if family.rope is None else read_rope(values, max_position_embeddings, family.rope),
        sliding_windows=_sliding_windows(values, family, num_layers),
        hidden_act=values.text(key("hidden_act"), family.hidden_act),
        tie_word_embeddings=values.flag("tie_word_embeddings", family.tie_word_embeddings),
        qkv_bias=_bias(values, family.qkv_bias),
        o_bias=_bias(values, family.o_bias),
        mlp_bias=_bias(values, family.mlp_bias),
        qk_norm=family.qk_norm,
        eos_token_ids=_eos_token_ids(values, generation, family.eos_token_id),
        dtype=_dtype_name(values),
    )
    config = replace(config, **family.own(values))
    check_heads(config, values.source, is_rotary=family.rope is not None)
    return config


def derived_max_model_len(config: ModelConfig) -> int:
    """The most tokens, prompt and answer together, that the checkpoint is made for."""
    rope, length, factor = config.rope, config.max_position_embeddings, 1.0
    if rope.kind == "linear":
        factor = rope.factor
    elif rope.kind == "yarn":
        length, factor = rope.original_max_position_embeddings or length, rope.factor
    return min(round(length * factor), INT32_MAX)  # positions are int32


def check_heads(config: ModelConfig, source: str, *, is_rotary: bool = True) -> None:
    """Raises StartupError for head counts that no attention can be built from."""
    if config.num_heads % config.num_kv_heads:
        allowed = [str(n) for n in range(1, config.num_heads + 1) if config.num_heads % n == 0]
        raise StartupError(
            f"{source}: num_key_value_heads {config.num_kv_heads} does not divide num_attention_heads "
            f"{config.num_heads}; it may be {', '.join(allowed)}."
        )
    rotary_dim = int(config.head_dim * config.rope.partial_rotary_factor)
    if is_rotary and (rotary_dim % 2 or not rotary_dim):
        part = "" if rotary_dim == config.head_dim else f", of which {rotary_dim} are turned,"
        raise StartupError(f"{source}: head_dim {config.head_dim}{part} is odd, but RoPE turns pairs of dimensions.")


def _architecture(values: ConfigValues, *, trust_remote_code: bool) -> str:
    quantization = values.get("quantization_config") or values.get("quantization")
    if quantization:
        method = quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else quantization
        raise StartupError(
            f"{values.source}: quantization {method!r} is not supported yet; use an unquantised or a GGUF checkpoint."
        )
    if values.get("auto_map") and not trust_remote_code:
        raise StartupError(
            f"{values.source} has an 'auto_map': the checkpoint brings Python code of its own. It was not run. "
            "With --trust-remote-code the model runs if its architecture is one that is built in."
        )
    names = values.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise values.wrong("architectures", f"a list with a name such as {next(iter(FAMILIES))}")
    if names[0] not in FAMILIES:
        raise StartupError(
            f"{values.source}: architecture {names[0]!r} is not supported; supported are {', '.join(FAMILIES)}."
        )
    return names[0]


def _num_kv_heads(values: ConfigValues, family: Family, num_heads: int) -> int:
    if not family.has_own_heads:
        return num_heads
    default = family.num_kv_heads if "num_key_value_heads" not in values else None
    return values.integer("num_key_value_heads", default or num_heads)


def _head_dim(values: ConfigValues, family: Family, hidden_size: int, num_heads: int) -> int:
    if family.has_own_heads and (values.get("head_dim") is not None or family.head_dim is not None):
        return values.integer("head_dim", family.head_dim)
    if hidden_size % num_heads:
        keys = family.key("hidden_size", values), family.key("num_attention_heads", values)
        raise StartupError(
            f"{values.source}: {keys[0]} {hidden_size} is not a multiple of {keys[1]} {num_heads}"
            f"{', and there is no head_dim' if family.has_own_heads else ''}."
        )
    return hidden_size // num_heads


def _bias(values: ConfigValues, rule: str | bool) -> bool:
    return values.flag(rule, False) if isinstance(rule, str) else rule


def _sliding_windows(values: ConfigValues, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer in tokens, the query itself included; None for full attention."""
    is_used = family.window == "every layer" or (
        family.window == "by layer type" and values.flag("use_sliding_window", False)
    )
    is_null = "sliding_window" in values and values.get("sliding_window") is None
    window = values.integer("sliding_window", 4096) if is_used and not is_null else None
    if family.window != "by layer type":
        return (window,) * num_layers
    layer_types = values.get("layer_types")
    if layer_types is None:
        first = values.get("max_window_layers")
        first = 28 if first is None else first
        if not isinstance(first, int):
            raise values.wrong("max_window_layers", "an integer")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise values.wrong("layer_types", f"a list of {num_layers} names, one a layer")
    unknown = [name for name in layer_types if name not in ("full_attention", "sliding_attention")]
    if unknown:
        raise StartupError(
            f"{values.source}: layer type {unknown[0]!r} is not supported; supported are full_attention and "
            "sliding_attention."
        )
    if window is None and "sliding_attention" in layer_types:
        raise StartupError(
            f"{values.source}: 'layer_types' asks for sliding_attention, but 'use_sliding_window' and "
            "'sliding_window' give no window."
        )
    return tuple(window if name == "sliding_attention" else None for name in layer_types)


def _eos_token_ids(values: ConfigValues, generation: ConfigValues, default: int | None) -> frozenset[int]:
    """The union over both files. The default only counts where neither says anything, null included."""
    ids = values.ids("eos_token_id") | generation.ids("eos_token_id")
    says_nothing = "eos_token_id" not in values and "eos_token_id" not in generation
    return frozenset([default]) if says_nothing and default is not None else ids


def _dtype_name(values: ConfigValues) -> str | None:
    """float32, float16 or bfloat16; None where the file says nothing or something else."""
    name = values.get("dtype") or values.get("torch_dtype")
    name = str(name).removeprefix("torch.")
    return name if name in DTYPE_NAMES else None
