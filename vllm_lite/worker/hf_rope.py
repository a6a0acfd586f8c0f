"""How a Hugging Face config.json says what RoPE a model uses, in its old and its new spellings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from vllm_lite.config import RopeConfig, RopeKind
from vllm_lite.errors import StartupError
from vllm_lite.worker.config_values import ConfigValues

KINDS: tuple[str, ...] = get_args(RopeKind)
DEFAULT_THETA = 10000.0


@dataclass(frozen=True)
class RopeKeys:
    """How a file calls theta and the share of a head that is turned, the spelling that counts most first."""

    theta: tuple[str, ...] = ("rope_theta",)
    partial_rotary_factor: tuple[str, ...] = ("partial_rotary_factor",)
    partial: float | None = None
    """The share where no key says it; None: the whole head is turned, and no key may say else."""


LLAMA_KEYS = RopeKeys()


def read_rope(values: ConfigValues, max_position_embeddings: int, keys: RopeKeys = LLAMA_KEYS) -> RopeConfig:
    """Reads `rope_scaling` (old) or `rope_parameters` (transformers 5, theta inside).

    Raises StartupError for an unknown kind, a missing number, or settings that would have to be ignored.
    """
    rope = _section(values)
    theta = rope.number("rope_theta", _first(values, keys.theta, DEFAULT_THETA))
    partial = rope.number("partial_rotary_factor", _first(values, keys.partial_rotary_factor, keys.partial or 1.0))
    if partial > 1 or (keys.partial is None and partial != 1):
        allowed = "above 0 and at most 1" if keys.partial else "only 1"
        raise StartupError(
            f"{values.source}: {' or '.join(keys.partial_rotary_factor)} {partial!r} is not supported, {allowed}."
        )
    rest = _scaling(values, rope, theta, max_position_embeddings)
    return replace(rest, partial_rotary_factor=partial)


def _scaling(values: ConfigValues, rope: ConfigValues, theta: float, max_position_embeddings: int) -> RopeConfig:
    """All but the share of a head that is turned."""
    kind = _kind(rope)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(kind="linear", theta=theta, factor=rope.number("factor"))
    if kind == "dynamic":
        return RopeConfig(
            kind="dynamic",
            theta=theta,
            factor=rope.number("factor"),
            original_max_position_embeddings=max_position_embeddings,
        )
    original = values.integer(
        "original_max_position_embeddings", rope.integer("original_max_position_embeddings", max_position_embeddings)
    )
    return _llama3(rope, theta, original) if kind == "llama3" else _yarn(rope, theta, original, max_position_embeddings)


def _llama3(rope: ConfigValues, theta: float, original: int) -> RopeConfig:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.wrong("high_freq_factor", f"above low_freq_factor {low}")
    return RopeConfig(
        kind="llama3",
        theta=theta,
        factor=rope.number("factor"),
        original_max_position_embeddings=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(rope: ConfigValues, theta: float, original: int, max_position_embeddings: int) -> RopeConfig:
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=rope.number("factor", max_position_embeddings / original),
        original_max_position_embeddings=original,
        # Hugging Face takes the defaults for 0 too.
        beta_fast=rope.number("beta_fast", 32.0, may_be_zero=True) or 32.0,
        beta_slow=rope.number("beta_slow", 1.0, may_be_zero=True) or 1.0,
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
    )


def _first(values: ConfigValues, keys: Sequence[str], default: float) -> float:
    """The number under the first key that says one."""
    return values.number(next((key for key in keys if values.get(key) is not None), keys[0]), default)


def _section(values: ConfigValues) -> ConfigValues:
    """The settings as one flat mapping. transformers 5 may nest them by layer type: fine if all say the same."""
    key = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    section: Any = values.get(key) or {}
    if not isinstance(section, Mapping):
        raise values.wrong(key, "an object or null")
    nested = [entry for entry in section.values() if isinstance(entry, Mapping)]
    if nested and any(entry != nested[0] for entry in nested):
        raise StartupError(f"{values.source}: {key!r} differs between layers, which is not supported.")
    return ConfigValues(nested[0] if nested else section, f"{values.source}, {key!r}")


def _kind(rope: ConfigValues) -> str:
    kind = rope.get("rope_type") or rope.get("type")
    if kind is None:
        if rope.get("factor") not in (None, 1, 1.0):
            raise StartupError(f"{rope.source} has a factor but no rope_type; write one of {', '.join(KINDS)}.")
        return "default"
    if kind not in KINDS:
        raise StartupError(f"{rope.source}: RoPE kind {kind!r} is not supported; supported are {', '.join(KINDS)}.")
    return str(kind)
