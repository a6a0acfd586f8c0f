"""Normalisation by the root mean square, or by mean and variance."""

from __future__ import annotations

import torch

from vllm_lite.layers.context import ForwardContext, LayerOptions
from vllm_lite.ops.norm import layer_norm, rms_norm


class RMSNorm:
    """Normalises the last dimension, of hidden states or of each head."""

    def __init__(self, options: LayerOptions, size: int, eps: float) -> None:
        self.weight = torch.empty(size, dtype=options.dtype, device=options.device)
        self.eps = eps

    def weight_targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """`<prefix>weight`."""
        return {f"{prefix}weight": self.weight}

    def __call__(self, context: ForwardContext, x: torch.Tensor, out: torch.Tensor) -> None:
        """x and out [max_tokens, size] or [max_tokens, num_heads, size]; out may be x."""
        rms_norm(context.workspace, context.shape, x, self.weight, self.eps, out)


class LayerNorm:
    """Normalises hidden states by mean and variance; with learnt weight and bias unless `is_affine` is false."""

    def __init__(self, options: LayerOptions, size: int, eps: float, *, is_affine: bool = True) -> None:
        self.weight = torch.ones(size, dtype=options.dtype, device=options.device)
        self.bias = torch.zeros_like(self.weight) if is_affine else None
        self.eps = eps

    def weight_targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """`<prefix>weight` and `<prefix>bias`, or nothing where neither is learnt."""
        return {} if self.bias is None else {f"{prefix}weight": self.weight, f"{prefix}bias": self.bias}

    def __call__(self, context: ForwardContext, x: torch.Tensor, out: torch.Tensor) -> None:
        """x and out [max_tokens, size]; out may be x."""
        layer_norm(context.workspace, context.shape, x, self.weight, self.bias, self.eps, out)
