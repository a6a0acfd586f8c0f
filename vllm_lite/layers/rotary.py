"""Tables of the angles of rotary position embedding, for every kind of scaling."""

from __future__ import annotations

import math

import torch

from vllm_lite.config import RopeConfig
from vllm_lite.errors import StartupError
from vllm_lite.layers.context import ForwardContext
from vllm_lite.ops.rotary import rotary


class RotaryEmbedding:
    """Turns queries and keys by one fixed table of angles."""

    def __init__(self, rope: RopeConfig, head_dim: int, max_model_len: int, device: torch.device) -> None:
        self.cos_sin = cos_sin_table(rope, head_dim, max_model_len).to(device)

    def __call__(self, context: ForwardContext, heads: torch.Tensor) -> None:
        """heads [max_tokens, num_heads, head_dim], turned in place."""
        rotary(context.workspace, context.shape, context.tensors.positions, self.cos_sin, heads)


def cos_sin_table(rope: RopeConfig, head_dim: int, max_model_len: int) -> torch.Tensor:
    """[max_model_len, rotary_dim] float32: a row holds the cosines of a position, then its sines.

    Raises StartupError for settings that give no finite angles.
    """
    dim = int(head_dim * rope.partial_rotary_factor)
    try:
        frequencies = _frequencies(rope, dim, max_model_len)
    except ArithmeticError:
        frequencies = torch.full((dim // 2,), torch.nan)
    magnitude = _yarn_magnitude(rope) if rope.kind == "yarn" else 1.0
    angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * frequencies
    if not angles[-1].isfinite().all():  # the largest ones
        raise StartupError(f"no finite angles follow from a head_dim of {head_dim} and the RoPE settings {rope}.")
    return torch.cat([angles.cos() * magnitude, angles.sin() * magnitude], dim=1)


def _frequencies(rope: RopeConfig, dim: int, max_model_len: int) -> torch.Tensor:
    """[dim / 2] radians a token."""
    if rope.kind == "linear":
        return _plain(rope.theta, dim) / rope.factor
    if rope.kind == "dynamic":
        return _plain(_dynamic_theta(rope, dim, max_model_len), dim)
    if rope.kind == "llama3":
        return _llama3(rope, _plain(rope.theta, dim))
    if rope.kind == "yarn":
        return _yarn(rope, dim)
    return _plain(rope.theta, dim)


def _plain(theta: float, dim: int) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _dynamic_theta(rope: RopeConfig, dim: int, max_model_len: int) -> float:
    """One base for all positions: keys in the cache cannot be turned again when a sequence outgrows a length."""
    original = _original_length(rope)
    if max_model_len <= original:
        return rope.theta
    stretch = rope.factor * max_model_len / original - (rope.factor - 1)
    return float(rope.theta * stretch ** (dim / (dim - 2)))


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Slow turns are slowed down by the factor, fast ones kept, those between blended."""
    turns = _original_length(rope) * frequencies / (2 * math.pi)
    share_kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    share_kept = share_kept.clamp(0.0, 1.0)
    return (1 - share_kept) * frequencies / rope.factor + share_kept * frequencies


def _yarn(rope: RopeConfig, dim: int) -> torch.Tensor:
    """As llama3, but the blend runs linearly over the dimensions."""
    frequencies = _plain(rope.theta, dim)
    low, high = (_yarn_dimension(rope, dim, turns) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    share_slowed = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return frequencies / rope.factor * share_slowed + frequencies * (1 - share_slowed)


def _yarn_dimension(rope: RopeConfig, dim: int, turns: float) -> float:
    """The dimension that makes so many full turns within the original length."""
    return dim * math.log(_original_length(rope) / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def _yarn_magnitude(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def grown(scale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * scale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return grown(rope.mscale) / grown(rope.mscale_all_dim)
    return grown(1.0)


def _original_length(rope: RopeConfig) -> int:
    if rope.original_max_position_embeddings is None:
        raise ValueError(f"RoPE kind {rope.kind} needs original_max_position_embeddings")
    return rope.original_max_position_embeddings
