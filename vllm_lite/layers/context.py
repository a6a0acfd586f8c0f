"""What is handed down through the layers: how to build them, and the step to run. Knows no layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_lite.engine.step import StepShape
from vllm_lite.ops.workspace import Workspace


@dataclass(frozen=True)
class LayerOptions:
    """What every layer of a model has in common."""

    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class StepTensors:
    """The step's numbers in persistent int32 tensors of maximal size; `engine/step.py` says what each one holds."""

    token_ids: torch.Tensor
    """[max_tokens]"""
    positions: torch.Tensor
    """[max_tokens]"""
    slot_mapping: torch.Tensor
    """[max_tokens]"""
    query_starts: torch.Tensor
    """[max_seqs + 1]"""
    context_lens: torch.Tensor
    """[max_seqs]"""
    block_tables: torch.Tensor
    """[max_seqs, max_blocks]"""
    token_indices: torch.Tensor
    """[max_seqs]"""


@dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer, each [num_blocks, num_kv_heads, block_size, head_dim]."""

    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True)
class ForwardContext:
    """One step on its way through the layers."""

    workspace: Workspace
    shape: StepShape
    tensors: StepTensors
