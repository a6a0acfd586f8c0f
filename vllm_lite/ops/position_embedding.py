"""Learnt rows for the positions of a step's tokens, added to their hidden states."""

from __future__ import annotations

import torch

from vllm_lite.engine.step import StepShape
from vllm_lite.kernels.cpu import type_name
from vllm_lite.ops.workspace import Workspace


def position_embedding(
    workspace: Workspace, shape: StepShape, positions: torch.Tensor, table: torch.Tensor, hidden: torch.Tensor
) -> None:
    """hidden[t] += table[positions[t]], rounded once.

    positions [max_tokens] int32, each below num_positions; table [num_positions, size], never packed; hidden
    [max_tokens, size] in the table's dtype; both contiguous.
    """
    if workspace.cpu is not None:
        name = f"position_embedding_{type_name(table.dtype)}"
        workspace.cpu.call(name, shape, positions, table, hidden, hidden.shape[1])
        return
    n, size = shape.num_tokens, hidden.shape[1]
    for rows in workspace.row_tiles(n, size * table.dtype.itemsize):
        (learnt,) = workspace.scratch(table.dtype, (rows.stop - rows.start, size))
        hidden[rows].add_(torch.index_select(table, 0, positions[rows], out=learnt))
