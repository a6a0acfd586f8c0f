"""Rows of the embedding table for the tokens of a step."""

from __future__ import annotations

import torch

from vllm_lite.engine.step import StepShape
from vllm_lite.kernels.cpu import type_name
from vllm_lite.ops.workspace import Workspace


def embedding(
    workspace: Workspace, shape: StepShape, token_ids: torch.Tensor, weight: torch.Tensor, out: torch.Tensor
) -> None:
    """out[t] = weight[token_ids[t]].

    token_ids [max_tokens] int32, each below vocab_size; weight [vocab_size, hidden_size]; out [max_tokens, hidden_size]
    in the weight's dtype. With CPU kernels the weight is packed.
    """
    if workspace.cpu is not None:
        name = f"embedding_{type_name(weight.dtype)}"
        workspace.cpu.call(name, shape, token_ids, weight, out, out.shape[1])
        return
    n = shape.num_tokens
    torch.index_select(weight, 0, token_ids[:n], out=out[:n])
