"""How large the KV cache is, and its memory. Knows sizes, no request and no block's owner."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from vllm_lite.config import ModelConfig
from vllm_lite.errors import StartupError
from vllm_lite.layers.context import LayerCache

SHARE_OF_MEMORY = 0.4
"""Of the memory that is available once the weights are loaded; the rest is for activations and everybody else."""


def choose_num_blocks(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    num_kv_blocks: int | None,
    available_bytes: int,
) -> int:
    """Blocks of the cache: `num_kv_blocks` where that is given, else as many as the memory holds and all can use.

    Raises StartupError where a context of `max_model_len` tokens does not fit.
    """
    blocks_per_context = -(-max_model_len // block_size)
    num_blocks = num_kv_blocks
    if num_blocks is None:
        affordable = int(available_bytes * SHARE_OF_MEMORY) // bytes_per_block(config, dtype, block_size)
        num_blocks = min(affordable, max_num_seqs * blocks_per_context)
    if num_blocks < blocks_per_context:
        way_out = (
            "raise --num-kv-blocks"
            if num_kv_blocks is not None
            else f"free some memory ({available_bytes / 2**30:.1f} GiB are available, of which the cache takes "
            f"{SHARE_OF_MEMORY:.0%}), or set --num-kv-blocks"
        )
        raise StartupError(
            f"a context of {max_model_len} tokens does not fit the KV cache of {num_blocks} blocks of {block_size}, "
            f"{num_blocks * block_size} tokens: lower --max-model-len to {num_blocks * block_size} or less, or "
            f"{way_out} to {blocks_per_context} or more."
        )
    return num_blocks


def bytes_per_block(config: ModelConfig, dtype: torch.dtype, block_size: int) -> int:
    """Memory of one block, keys and values of all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * block_size * dtype.itemsize


def allocate(
    config: ModelConfig, *, dtype: torch.dtype, block_size: int, num_blocks: int, device: torch.device
) -> list[LayerCache]:
    """The cache of each layer. Uninitialised, so that the system hands out memory only when a block is first used."""
    shape = (num_blocks, config.num_kv_heads, block_size, config.head_dim)

    def empty() -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return [LayerCache(empty(), empty()) for _ in range(config.num_layers)]


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still take: what the system has free, within the limits of its control groups.

    Systems other than Linux only tell how much there is in all.
    """
    meminfo = proc / "meminfo"
    found = re.search(r"^MemAvailable:\s*(\d+) kB", meminfo.read_text(), re.MULTILINE) if meminfo.exists() else None
    if found is None:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([int(found[1]) * 1024, *_control_group_rests(proc, cgroups)])


def _control_group_rests(proc: Path, cgroups: Path) -> Iterator[int]:
    """What is left under each limit, of the process's group and of those around it; version 2 and version 1."""
    listing = proc / "self" / "cgroup"
    for line in listing.read_text().splitlines() if listing.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit_name, usage_name = cgroups, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit_name, usage_name = cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = root / path.lstrip("/")
        # Inside a container the path may be the host's, which does not exist here: then only the root does.
        for group in (folder, *folder.parents):
            if not group.is_relative_to(root):
                break
            limit, usage = _number(group / limit_name), _number(group / usage_name)
            if limit is not None and usage is not None:
                yield max(0, limit - usage + _reclaimable(group / "memory.stat"))


def _number(path: Path) -> int | None:
    """None for a file that is not there and for the word `max`."""
    text = path.read_text().strip() if path.exists() else ""
    return int(text) if text.isdigit() else None


def _reclaimable(path: Path) -> int:
    """File pages that count as used but that the kernel drops when it needs the memory."""
    text = path.read_text() if path.exists() else ""
    found = re.search(r"^(?:total_)?inactive_file (\d+)", text, re.MULTILINE)
    return int(found[1]) if found else 0
