"""Root mean square normalisation, of hidden states or of single heads."""

from __future__ import annotations

import torch

from vllm_lite.engine.step import StepShape
from vllm_lite.ops.workspace import Workspace


def rms_norm(
    workspace: Workspace, shape: StepShape, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    """out[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight over the last dimension, computed in float32.

    x and out [max_tokens, size] or [max_tokens, num_heads, size], any stride over tokens and heads; weight [size]; all
    of one dtype. out may be x.
    """
    x = x[: shape.num_tokens]
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    factor = norm.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    (normed,) = workspace.scratch(torch.float32, x.shape)
    torch.mul(torch.mul(x, factor, out=normed), weight, out=out[: shape.num_tokens])
