"""Logits of the sampled rows."""

from __future__ import annotations

import torch

from vllm_lite.engine.step import StepShape
from vllm_lite.kernels.cpu import CpuKernels, type_name
from vllm_lite.ops.linear import multiplies_directly, multiply, products
from vllm_lite.ops.workspace import Workspace


def logits(
    workspace: Workspace,
    shape: StepShape,
    hidden: torch.Tensor,
    token_indices: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """out[r] = hidden[token_indices[r]] @ weight.T.

    hidden [max_tokens, hidden_size]; token_indices [max_rows] int32; weight [vocab_size, hidden_size] in hidden's
    dtype; out [max_rows, vocab_size] float32. With CPU kernels the weight is packed.
    """
    if workspace.cpu is not None:
        x = gather_rows(workspace, workspace.cpu, shape, hidden, token_indices)
        sizes = (out.stride(0), out.shape[1], x.shape[1])
        workspace.cpu.call(f"logits_{type_name(x.dtype)}", shape, x, weight, out, *sizes)
        return
    x = hidden.index_select(0, token_indices[: shape.num_rows])
    out = out[: shape.num_rows]
    if multiplies_directly(workspace, x):
        for rows in workspace.row_tiles(x.shape[0], weight.shape[0] * x.dtype.itemsize):
            part = out[rows]
            product = part if part.dtype == x.dtype else workspace.scratch(x.dtype, part.shape)[0]
            part.copy_(multiply(x[rows], weight, product))
        return
    for rows, columns, product in products(workspace, x, weight):
        out[rows, columns] = product


def gather_rows(
    workspace: Workspace, kernels: CpuKernels, shape: StepShape, hidden: torch.Tensor, token_indices: torch.Tensor
) -> torch.Tensor:
    """[max_rows, hidden_size], the sampled rows of hidden side by side."""
    rows = workspace.kept("sampled rows", hidden.dtype, token_indices.shape[0], hidden.shape[1])
    name = f"gather_rows_{type_name(hidden.dtype)}"
    kernels.call(name, shape, hidden, hidden.stride(0), token_indices, rows, hidden.shape[1])
    return rows
