"""Normalisation of hidden states or of single heads: by the root mean square, or by mean and variance."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from vllm_lite.engine.step import StepShape
from vllm_lite.kernels.cpu import CpuKernels, type_name
from vllm_lite.kernels.cuda import C_TYPES, CudaKernels, Kernel, access_widths, elements_per_access, threads_for
from vllm_lite.ops.workspace import Workspace

SHARED_BYTES = 32 * 4
"""A float for each warp of the largest block."""


def kernels(dtype: torch.dtype) -> list[Kernel]:
    """Every instance for a dtype."""
    return [
        Kernel("norm.cu", f"{norm}<{C_TYPES[dtype]}, {width}>", SHARED_BYTES)
        for norm in ("rms_norm", "layer_norm")
        for width in access_widths(dtype)
    ]


def rms_norm(
    workspace: Workspace, shape: StepShape, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    """out[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight over the last dimension, computed in float32.

    x and out [max_tokens, size] or [max_tokens, num_heads, size], any stride over tokens and heads; weight [size]; all
    of one dtype. out may be x.
    """
    if workspace.cuda is not None:
        _launch(workspace.cuda, "rms_norm", shape, x, (weight,), eps, out)
        return
    if workspace.cpu is not None:
        _call(workspace.cpu, "rms_norm", shape, x, (weight,), eps, out)
        return
    x = x[: shape.num_tokens]
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    factor = norm.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    (normed,) = workspace.scratch(torch.float32, x.shape)
    torch.mul(torch.mul(x, factor, out=normed), weight, out=out[: shape.num_tokens])


def layer_norm(
    workspace: Workspace,
    shape: StepShape,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,
) -> None:
    """out[t] = (x[t] - mean(x[t])) / sqrt(variance(x[t]) + eps) * weight + bias, computed in float32.

    Sizes as in `rms_norm`; bias [size]. out may be x.
    """
    if workspace.cuda is not None:
        _launch(workspace.cuda, "layer_norm", shape, x, (weight, bias), eps, out)
        return
    if workspace.cpu is not None:
        _call(workspace.cpu, "layer_norm", shape, x, (weight, bias), eps, out)
        return
    x = x[: shape.num_tokens].float()
    wide_bias = None if bias is None else bias.float()
    out[: shape.num_tokens] = functional.layer_norm(x, x.shape[-1:], weight.float(), wide_bias, eps)


def _launch(
    kernels: CudaKernels,
    norm: str,
    shape: StepShape,
    x: torch.Tensor,
    parameters: tuple[torch.Tensor | None, ...],
    eps: float,
    out: torch.Tensor,
) -> None:
    size = x.shape[-1]
    if x.dim() == 2:
        x, out = x.unsqueeze(1), out.unsqueeze(1)
    width = elements_per_access(x, out, *parameters)
    kernels.launch(
        f"{norm}<{C_TYPES[x.dtype]}, {width}>",
        (shape.num_tokens, x.shape[1]),
        threads_for(size // width),
        x,
        *parameters,
        out,
        np.float32(eps),
        np.int32(size),
        *map(np.int64, (*x.stride()[:2], *out.stride()[:2])),
    )


def _call(
    kernels: CpuKernels,
    norm: str,
    shape: StepShape,
    x: torch.Tensor,
    parameters: tuple[torch.Tensor | None, ...],
    eps: float,
    out: torch.Tensor,
) -> None:
    if x.dim() == 2:
        x, out = x.unsqueeze(1), out.unsqueeze(1)
    sizes = (x.shape[1], x.shape[2], *x.stride()[:2], *out.stride()[:2])
    kernels.call(f"{norm}_{type_name(x.dtype)}", shape, x, *parameters, out, eps, *sizes)
