"""Rotary position embedding: turns pairs of dimensions of queries and keys by angles that grow with the position."""

from __future__ import annotations

import torch

from vllm_lite.engine.step import StepShape
from vllm_lite.ops.workspace import Workspace


def rotary(
    workspace: Workspace, shape: StepShape, positions: torch.Tensor, cos_sin: torch.Tensor, heads: torch.Tensor
) -> None:
    """Turns dimensions (i, i + rotary_dim / 2) of every head in place, for i < rotary_dim / 2; later ones stay.

    positions [max_tokens] int32; cos_sin [max_model_len, rotary_dim] float32, cosines in the first half of a row and
    sines in the second; heads [max_tokens, num_heads, head_dim], any stride over tokens.
    """
    n = shape.num_tokens
    half = cos_sin.shape[1] // 2

    def look_up() -> tuple[torch.Tensor, torch.Tensor]:
        angles = cos_sin.index_select(0, positions[:n]).unsqueeze(1)
        return angles[..., :half], angles[..., half:]

    # Layers share a table, so its address tells tables apart.
    cos, sin = workspace.once_a_step(("rotary", cos_sin.data_ptr()), look_up)
    first, second = heads[:n, :, :half], heads[:n, :, half : 2 * half]
    turned_first, turned_second = workspace.scratch(torch.float32, first.shape, first.shape)
    torch.mul(first, cos, out=turned_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=turned_second).addcmul_(first, sin)
    first.copy_(turned_first)
    second.copy_(turned_second)
