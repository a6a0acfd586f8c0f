"""Rotary position embedding: turns pairs of dimensions of queries and keys by angles that grow with the position."""

from __future__ import annotations

import numpy as np
import torch

from vllm_lite.engine.step import StepShape
from vllm_lite.kernels.cpu import type_name
from vllm_lite.kernels.cuda import C_TYPES, CudaKernels, Kernel, threads_for
from vllm_lite.ops.workspace import Workspace


def kernels(dtype: torch.dtype) -> list[Kernel]:
    """Every instance for a dtype."""
    return [Kernel("rotary.cu", f"rotary<{C_TYPES[dtype]}>")]


def rotary(
    workspace: Workspace, shape: StepShape, positions: torch.Tensor, cos_sin: torch.Tensor, heads: torch.Tensor
) -> None:
    """Turns dimensions (i, i + rotary_dim / 2) of every head in place, for i < rotary_dim / 2; later ones stay.

    positions [max_tokens] int32; cos_sin [max_model_len, rotary_dim] float32, cosines in the first half of a row and
    sines in the second; heads [max_tokens, num_heads, head_dim], any stride over tokens.
    """
    if workspace.cuda is not None:
        _launch(workspace.cuda, shape, positions, cos_sin, heads)
        return
    if workspace.cpu is not None:
        sizes = (heads.stride(0), *heads.shape[1:], cos_sin.shape[1] // 2)
        workspace.cpu.call(f"rotary_{type_name(heads.dtype)}", shape, heads, positions, cos_sin, *sizes)
        return
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


def _launch(
    kernels: CudaKernels, shape: StepShape, positions: torch.Tensor, cos_sin: torch.Tensor, heads: torch.Tensor
) -> None:
    _, num_heads, head_dim = heads.shape
    num_pairs = cos_sin.shape[1] // 2
    kernels.launch(
        f"rotary<{C_TYPES[heads.dtype]}>",
        (shape.num_tokens,),
        threads_for(num_heads * num_pairs),
        heads,
        positions,
        cos_sin,
        np.int64(heads.stride(0)),
        *map(np.int32, (num_heads, head_dim, num_pairs)),
    )
