"""The gated half of an MLP in one operation: two products, the activation and their product."""

from __future__ import annotations

import torch
from torch.nn import functional

from vllm_lite.engine.step import StepShape
from vllm_lite.ops.linear import multiplies_directly, multiply, products
from vllm_lite.ops.workspace import Workspace


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
    rows; out [max_tokens, size]; all of one dtype.
    """
    n, size = shape.num_tokens, out.shape[1]
    x, out = x[:n], out[:n]
    if multiplies_directly(workspace, x):
        for rows in workspace.row_tiles(n, 2 * size * x.dtype.itemsize):
            (product,) = workspace.scratch(x.dtype, (rows.stop - rows.start, 2 * size))
            multiply(x[rows], weight, product)
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
