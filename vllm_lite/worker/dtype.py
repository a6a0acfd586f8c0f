"""Decides what a model runs in. Knows the chip's abilities, no model."""

from __future__ import annotations

import logging

import torch

from vllm_lite.config import EngineConfig, ModelConfig
from vllm_lite.kernels.cpu_library import cpu_flags

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
CPU_FLAG = {torch.bfloat16: "avx512_bf16", torch.float16: "avx512_fp16"}
"""The instructions without which torch on a CPU computes in a 16-bit dtype far slower than in float32."""


def resolve_dtype(
    config: EngineConfig, model: ModelConfig, is_gguf: bool, device: torch.device, has_cpu_kernels: bool = False
) -> torch.dtype:
    """What `--dtype` says; under auto the checkpoint's dtype, as far as it is computed in at full speed.

    GGUF and float32 checkpoints run in the chip's fastest dtype. The CPU kernels compute in bfloat16 and float32 on
    every chip, never in float16: that runs in the faster of the two. Without them a 16-bit checkpoint on a CPU without
    instructions for its dtype runs in float32, which holds every value of it: same text, twice the memory, many times
    the speed.
    """
    wanted = config.torch_dtype_name
    if wanted != "auto" and not (has_cpu_kernels and wanted == "float16"):
        return DTYPES[wanted]
    stored = torch.float32 if is_gguf or model.dtype is None else DTYPES[model.dtype]
    if wanted == "float16":
        stored = torch.float16
    has_bf16 = is_native(torch.bfloat16, device)
    if stored == torch.float32:
        if has_bf16:
            return torch.bfloat16
        return torch.float32 if device.type == "cpu" else torch.float16
    is_at_full_speed = stored == torch.bfloat16 if has_cpu_kernels else is_native(stored, device)
    if is_at_full_speed:
        return stored
    fallback = torch.float32 if device.type == "cpu" else torch.float16
    if has_cpu_kernels and has_bf16:
        fallback = torch.bfloat16
    logger.info(
        "%s is not what this %s computes in at full speed: running in %s%s",
        _name(stored), device.type, _name(fallback), "" if wanted == "float16" else " (--dtype decides otherwise)",
    )  # fmt: skip
    return fallback


def is_native(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the chip has instructions for a 16-bit dtype."""
    if device.type == "cpu":
        return CPU_FLAG[dtype] in cpu_flags()
    return dtype == torch.float16 or torch.cuda.get_device_capability(device) >= (8, 0)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
