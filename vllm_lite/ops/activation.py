"""Activations, and the gated half of an MLP in one operation: two products, the activation and their product."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import partial

import numpy as np
import torch
from torch.nn import functional

from vllm_lite.engine.step import StepShape
from vllm_lite.kernels.cpu import type_name
from vllm_lite.kernels.cuda import C_TYPES, CudaKernels, Kernel, access_widths, elements_per_access, threads_for
from vllm_lite.ops.linear import multiplies_directly, multiply, products
from vllm_lite.ops.workspace import Workspace

MAX_THREADS = 256


class Activation(IntEnum):
    """Functions of single numbers. Values as in activation.cu."""

    RELU = 0
    GELU = 1
    """x * (share of a normal distribution below x), exactly."""
    GELU_TANH = 2
    """The same, nearly: with a tanh."""
    QUICK_GELU = 3
    """x * sigmoid(1.702 * x)"""


ACTIVATIONS = {
    "relu": Activation.RELU,
    "gelu": Activation.GELU,
    "gelu_python": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_accurate": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_python_tanh": Activation.GELU_TANH,
    "quick_gelu": Activation.QUICK_GELU,
}
"""By Hugging Face's names."""


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """float32, whatever x is."""
    return x * torch.sigmoid(1.702 * x.float())


_REFERENCES: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.RELU: functional.relu,
    Activation.GELU: functional.gelu,
    Activation.GELU_TANH: partial(functional.gelu, approximate="tanh"),
    Activation.QUICK_GELU: _quick_gelu,
}


def kernels(dtype: torch.dtype) -> list[Kernel]:
    """Every instance for a dtype."""
    return [
        Kernel("activation.cu", f"{name}<{C_TYPES[dtype]}, {width}>")
        for name in ("silu_and_mul", "activate")
        for width in access_widths(dtype)
    ]


def activate(workspace: Workspace, shape: StepShape, x: torch.Tensor, kind: Activation, out: torch.Tensor) -> None:
    """out[t] = kind(x[t]), computed in float32.

    x and out [max_tokens, size] of one dtype, any stride over tokens. out may be x.
    """
    if workspace.cpu is not None:
        name = f"activate_{type_name(x.dtype)}"
        workspace.cpu.call(name, shape, x, out, x.stride(0), out.stride(0), x.shape[1], int(kind))
        return
    num_tokens, size = shape.num_tokens, x.shape[1]
    x, out = x[:num_tokens], out[:num_tokens]
    if workspace.cuda is None:
        for rows in workspace.row_tiles(num_tokens, 4 * size):
            out[rows] = _REFERENCES[kind](x[rows])
        return
    width = elements_per_access(x, out)
    num_threads = threads_for(size // width, MAX_THREADS)
    workspace.cuda.launch(
        f"activate<{C_TYPES[x.dtype]}, {width}>",
        (num_tokens, -(-size // (width * num_threads))),
        num_threads,
        x,
        out,
        *map(np.int64, (x.stride(0), out.stride(0))),
        *map(np.int32, (size, kind)),
    )


def gate_up_silu(
    workspace: Workspace,
    shape: StepShape,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """out[t] = silu(x[t] @ gate.T + gate_bias) * (x[t] @ up.T + up_bias).

    x [max_tokens, in_features]; weight [2 * size, in_features] and bias [2 * size], the gate's rows before the up
    rows; out [max_tokens, size]; all of one dtype. With CPU kernels the weight is packed, and the up rows of both begin
    at the next multiple of PANEL_ROWS.
    """
    if workspace.cpu is not None:
        name = f"gate_up_silu_{type_name(x.dtype)}"
        sizes = (out.stride(0), out.shape[1], x.shape[1])
        workspace.cpu.call(name, shape, x, x.stride(0), weight, bias, out, *sizes)
        return
    n, size = shape.num_tokens, out.shape[1]
    x, out = x[:n], out[:n]
    if workspace.cuda is not None or multiplies_directly(workspace, x):
        for rows in workspace.row_tiles(n, 2 * size * x.dtype.itemsize):
            (product,) = workspace.scratch(x.dtype, (rows.stop - rows.start, 2 * size))
            multiply(x[rows], weight, product)
            if workspace.cuda is not None:
                _launch_silu_and_mul(workspace.cuda, product, bias, out[rows])
                continue
            if bias is not None:
                product.add_(bias)
            torch.mul(functional.silu(product[:, :size], inplace=True), product[:, size:], out=out[rows])
        return
    for rows, columns, product in products(workspace, x, weight[:size]):
        if bias is not None:
            product.add_(bias[columns])
        out[rows, columns] = functional.silu(product, inplace=True)
    for rows, columns, product in products(workspace, x, weight[size:]):
        if bias is not None:
            product.add_(bias[columns.start + size : columns.stop + size])
        out[rows, columns] *= product


def _launch_silu_and_mul(
    kernels: CudaKernels, gate_up: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    num_tokens, size = out.shape
    # The gate's half of a row and the other half both have to begin where a wide access may.
    width = elements_per_access(gate_up.view(num_tokens, 2, size), bias, out)
    num_threads = threads_for(size // width, MAX_THREADS)
    kernels.launch(
        f"silu_and_mul<{C_TYPES[out.dtype]}, {width}>",
        (num_tokens, -(-size // (width * num_threads))),
        num_threads,
        gate_up,
        bias,
        out,
        np.int64(out.stride(0)),
        np.int32(size),
    )
