"""Writes keys and values into the paged cache and copies its blocks.

A layer's keys and its values are `[num_blocks, num_kv_heads, block_size, head_dim]` each. Only this file and
`attention.py` know that; an implementation for a device may order the bytes of a head's block as it likes.
"""

from __future__ import annotations

import torch

from vllm_lite.engine.step import StepShape
from vllm_lite.ops.workspace import Workspace


def write(
    workspace: Workspace,
    shape: StepShape,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> None:
    """Puts token t's key and value into slot `slot_mapping[t]` (block id * block_size + offset); -1 writes nothing.

    key and value [max_tokens, num_kv_heads, head_dim], any stride over tokens; slot_mapping [max_tokens] int32; all but
    the last of one dtype.
    """
    n, block_size = shape.num_tokens, key_cache.shape[2]

    def locate() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        slots = slot_mapping[:n].long()
        kept = None if (slots >= 0).all() else (slots >= 0).nonzero().squeeze(1)
        slots = slots if kept is None else slots[kept]
        return slots // block_size, slots % block_size, kept

    blocks, offsets, kept = workspace.once_a_step("slots", locate)
    key_cache[blocks, :, offsets] = key[:n] if kept is None else key[kept]
    value_cache[blocks, :, offsets] = value[:n] if kept is None else value[kept]


def copy_blocks(caches: list[torch.Tensor], sources: torch.Tensor, destinations: torch.Tensor) -> None:
    """Copies whole blocks in every cache, before a step's ops run; no block is both a source and a destination.

    sources and destinations [num_copies] int64 block ids.
    """
    for cache in caches:
        cache.index_copy_(0, destinations, cache.index_select(0, sources))
