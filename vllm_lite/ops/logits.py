"""Logits of the sampled rows."""

from __future__ import annotations

import torch

from vllm_lite.engine.step import StepShape
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
    dtype; out [max_rows, vocab_size] float32.
    """
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
