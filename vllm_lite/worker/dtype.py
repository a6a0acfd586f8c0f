"""Decides what a model runs in. Knows the chip's abilities, no model."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import torch

from vllm_lite.config import EngineConfig, ModelConfig

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
CPU_FLAG = {torch.bfloat16: "avx512_bf16", torch.float16: "avx512_fp16"}
"""The instructions without which a CPU computes in a 16-bit dtype far slower than in float32."""


def resolve_dtype(config: EngineConfig, model: ModelConfig, is_gguf: bool, device: torch.device) -> torch.dtype:
    """What `--dtype` says; under auto the checkpoint's dtype, as far as the chip computes in it at full speed.

    GGUF and float32 checkpoints run in the chip's fastest dtype. A 16-bit checkpoint on a CPU without instructions
    for its dtype runs in float32, which holds every value of it: same text, twice the memory, many times the speed.
    """
    if config.torch_dtype_name != "auto":
        return DTYPES[config.torch_dtype_name]
    stored = torch.float32 if is_gguf or model.dtype is None else DTYPES[model.dtype]
    if stored == torch.float32:
        if is_native(torch.bfloat16, device):
            return torch.bfloat16
        return torch.float32 if device.type == "cpu" else torch.float16
    if is_native(stored, device):
        return stored
    fallback = torch.float32 if device.type == "cpu" else torch.float16
    logger.info(
        "the checkpoint is in %s, which this %s has no instructions for: running in %s (--dtype decides otherwise)",
        _name(stored), device.type, _name(fallback),
    )  # fmt: skip
    return fallback


def is_native(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the chip has instructions for a 16-bit dtype."""
    if device.type == "cpu":
        return CPU_FLAG[dtype] in cpu_flags()
    return dtype == torch.float16 or torch.cuda.get_device_capability(device) >= (8, 0)


def cpu_flags(path: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The instruction sets that Linux reports; empty on other systems."""
    if not path.exists():
        return frozenset()
    flags = re.search(r"^flags\s*:(.*)$", path.read_text(), re.MULTILINE)
    return frozenset(flags[1].split()) if flags else frozenset()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
