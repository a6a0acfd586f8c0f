"""The most likely token of each sampled row, without writing the logits down."""

from __future__ import annotations

import torch

from vllm_lite.engine.step import NO_TOKEN, StepShape
from vllm_lite.kernels.cpu import CpuKernels, type_name
from vllm_lite.ops.linear import multiplies_directly, multiply, products
from vllm_lite.ops.logits import gather_rows
from vllm_lite.ops.workspace import Workspace


def greedy_head(
    workspace: Workspace,
    shape: StepShape,
    hidden: torch.Tensor,
    token_indices: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """out[r] = the id of row r's largest logit, the lower id in a tie; NO_TOKEN where the largest is not finite.

    hidden [max_tokens, hidden_size]; token_indices [max_rows] int32; weight [vocab_size, hidden_size] in hidden's
    dtype; out [max_rows] int32. A NaN counts as largest. With CPU kernels the weight is packed.
    """
    if workspace.cpu is not None:
        _call(workspace, workspace.cpu, shape, hidden, token_indices, weight, out)
        return
    x = hidden.index_select(0, token_indices[: shape.num_rows])
    best = torch.full((x.shape[0],), -torch.inf, device=x.device)
    ids = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
    if multiplies_directly(workspace, x):
        for rows in workspace.row_tiles(x.shape[0], weight.shape[0] * x.dtype.itemsize):
            (product,) = workspace.scratch(x.dtype, (rows.stop - rows.start, weight.shape[0]))
            best[rows], ids[rows] = multiply(x[rows], weight, product).max(dim=1)
    else:
        for rows, columns, product in products(workspace, x, weight):
            piece_best, piece_ids = product.max(dim=1)
            is_better = (piece_best > best[rows]) | piece_best.isnan()
            best[rows] = torch.where(is_better, piece_best, best[rows])
            ids[rows] = torch.where(is_better, piece_ids + columns.start, ids[rows])
    out[: shape.num_rows] = torch.where(best.isfinite(), ids, NO_TOKEN)


def _call(
    workspace: Workspace,
    kernels: CpuKernels,
    shape: StepShape,
    hidden: torch.Tensor,
    token_indices: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Each thread finds the best of its part of the vocabulary; then the best of these."""
    max_rows = token_indices.shape[0]
    x = gather_rows(workspace, kernels, shape, hidden, token_indices)
    values = workspace.kept("best values", torch.float32, kernels.num_threads, max_rows)
    ids = workspace.kept("best ids", torch.int32, kernels.num_threads, max_rows)
    name = f"greedy_parts_{type_name(x.dtype)}"
    kernels.call(name, shape, x, weight, values, ids, max_rows, weight.shape[0], x.shape[1])
    kernels.call("greedy_pick", shape, values, ids, max_rows, out)
