"""Root mean square normalisation, of hidden states or of single heads."""

from __future__ import annotations

import torch
from torch.nn import functional

from vllm_lite.engine.step import StepShape
from vllm_lite.ops.workspace import Workspace


def rms_norm(
    workspace: Workspace, shape: StepShape, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    """out[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight over the last dimension, computed in float32.

    x and out [max_tokens, size] or [max_tokens, num_heads, size], any stride over tokens and heads; weight [size]; all
    of one dtype. out may be x.
    """
    n = shape.num_tokens
    out[:n] = functional.rms_norm(x[:n], weight.shape, weight, eps)
