"""Root mean square normalisation with a learnt weight."""

from __future__ import annotations

import torch

from vllm_lite.layers.context import ForwardContext, LayerOptions
from vllm_lite.ops.norm import rms_norm


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
