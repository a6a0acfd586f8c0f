"""Writes keys and values into the paged cache and copies its blocks.

A layer's keys and its values are `[num_blocks, num_kv_heads, block_size, head_dim]` each. Only this file and
`attention.py` know that; an implementation for a device may order the bytes of a head's block as it likes. The CUDA
kernels keep this order; cpu/kv_cache.h says what the CPU kernels do.
"""

from __future__ import annotations

import numpy as np
import torch

from vllm_lite.engine.step import StepShape
from vllm_lite.kernels.cpu import type_name
from vllm_lite.kernels.cuda import CudaKernels, Kernel, elements_per_access, threads_for
from vllm_lite.ops.workspace import Workspace

UNITS = {16: "uint4", 2: "unsigned short"}
"""What the kernels call this many bytes that they move at once."""


def kernels() -> list[Kernel]:
    """Every instance; they move bytes of any dtype."""
    names = [*(f"write_kv<{unit}>" for unit in UNITS.values()), "copy_blocks"]
    return [Kernel("kv_cache.cu", name) for name in names]


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
    if workspace.cuda is not None:
        _launch_write(workspace.cuda, shape, key, value, slot_mapping, key_cache, value_cache)
        return
    if workspace.cpu is not None:
        sizes = (key.stride(0), value.stride(0), *key_cache.shape[1:])
        name = f"write_kv_{type_name(key.dtype)}"
        workspace.cpu.call(name, shape, key, value, slot_mapping, key_cache, value_cache, *sizes)
        return
    n, block_size = shape.num_tokens, key_cache.shape[2]

    def locate() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        slots = slot_mapping[:n].long()
        kept = None if (slots >= 0).all() else (slots >= 0).nonzero().squeeze(1)
        slots = slots if kept is None else slots[kept]
        return slots // block_size, slots % block_size, kept

    blocks, offsets, kept = workspace.once_a_step("slots", locate)
    key_cache[blocks, :, offsets] = key[:n] if kept is None else key[kept]
    value_cache[blocks, :, offsets] = value[:n] if kept is None else value[kept]


def _launch_write(
    kernels: CudaKernels,
    shape: StepShape,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> None:
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    # A token's heads lie side by side: one row of bytes.
    tokens = [tensor.view(tensor.shape[0], num_kv_heads * head_dim) for tensor in (key, value)]
    itemsize = key.dtype.itemsize
    is_wide = elements_per_access(*tokens, key_cache, value_cache) > 1
    unit_bytes = 16 if is_wide else 2
    head_size, *strides = (size * itemsize // unit_bytes for size in (head_dim, key.stride(0), value.stride(0)))
    kernels.launch(
        f"write_kv<{UNITS[unit_bytes]}>",
        (shape.num_tokens,),
        threads_for(num_kv_heads * head_size),
        key,
        value,
        slot_mapping,
        key_cache,
        value_cache,
        *map(np.int64, strides),
        *map(np.int32, (num_kv_heads, block_size, head_size)),
    )


def copy_blocks(
    workspace: Workspace, caches: list[torch.Tensor], sources: torch.Tensor, destinations: torch.Tensor
) -> None:
    """Copies whole blocks in every cache, before a step's ops run; no block is both a source and a destination.

    sources and destinations [num_copies] int64 block ids.
    """
    if workspace.cuda is None:
        for cache in caches:
            cache.index_copy_(0, destinations, cache.index_select(0, sources))
        return
    for cache in caches:
        # Blocks of 8 tokens or a multiple of it: 16 bytes or a multiple of them, whatever the dtype.
        units_per_block = cache[0].numel() * cache.dtype.itemsize // 16
        workspace.cuda.launch(
            "copy_blocks",
            (len(sources),),
            threads_for(units_per_block),
            cache,
            sources,
            destinations,
            np.int64(units_per_block),
        )
