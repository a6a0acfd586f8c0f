"""How large the KV cache is, and its memory. Knows sizes, no request and no block's owner."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_lite.config import ModelConfig
from vllm_lite.errors import StartupError
from vllm_lite.layers.context import LayerCache
from vllm_lite.worker.huge_pages import prefer_huge_pages

SHARE_OF_MEMORY = 0.4
"""On a CPU, of the memory that is available once the weights are loaded; the rest is for activations and everybody."""


@dataclass(frozen=True)
class CacheBudget:
    """Memory that the cache may take."""

    num_bytes: int
    way_out: str
    """How to have more of it, for a message."""


@dataclass(frozen=True)
class GpuMemory:
    """Bytes of a GPU at one moment, and what this process took of them at most before it."""

    total: int
    free: int
    reserved: int
    """Taken by torch in this process at that moment."""
    peak: int
    """Taken by torch in this process at most: weights and the largest step."""


def budget_on_cpu(available_bytes: int) -> CacheBudget:
    """A share of what this process may still take."""
    return CacheBudget(
        int(available_bytes * SHARE_OF_MEMORY),
        f"free some memory ({_gib(available_bytes)} are available, of which the cache takes {SHARE_OF_MEMORY:.0%})",
    )


def budget_on_gpu(memory: GpuMemory, utilization: float) -> CacheBudget:
    """What of the share `utilization` of the GPU neither the model, its largest step nor anything else takes.

    What is neither free nor torch's belongs to other processes, and to CUDA itself in this one.
    """
    elsewhere = memory.total - memory.free - memory.reserved
    usable = int(memory.total * utilization)
    return CacheBudget(
        usable - elsewhere - memory.peak,
        f"free some of the GPU's memory or raise --gpu-memory-utilization (of {_gib(memory.total)} the share "
        f"{utilization} is {_gib(usable)}, the model and its largest step take {_gib(memory.peak)}, other processes "
        f"and CUDA itself {_gib(elsewhere)}), lower --max-num-batched-tokens or --max-num-seqs",
    )


def choose_num_blocks(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    size: CacheBudget | int,
) -> int:
    """Blocks of the cache: `size` where that is their number, else as many as the budget holds and all can use.

    Raises StartupError where a context of `max_model_len` tokens does not fit.
    """
    blocks_per_context = -(-max_model_len // block_size)
    if isinstance(size, int):
        num_blocks, way_out = size, "raise --num-kv-blocks"
    else:
        affordable = max(0, size.num_bytes) // bytes_per_block(config, dtype, block_size)
        num_blocks = min(affordable, max_num_seqs * blocks_per_context)
        way_out = f"{size.way_out}, or set --num-kv-blocks"
    if num_blocks == 0:
        raise StartupError(
            f"there is no memory for a single KV block of {bytes_per_block(config, dtype, block_size)} bytes, and a "
            f"context of {max_model_len} tokens needs {blocks_per_context}: {way_out} to {blocks_per_context} or more."
        )
    if num_blocks < blocks_per_context:
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
        memory = torch.empty(shape, dtype=dtype, device=device)
        return prefer_huge_pages(memory) if memory.is_cpu else memory

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


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


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
