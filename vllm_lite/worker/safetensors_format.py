"""Reads .safetensors files: memory-mapped, so that a tensor costs nothing before it is copied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vllm_lite.errors import StartupError
from vllm_lite.worker.weights import CheckpointTensor

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def open_safetensors(path: Path) -> list[CheckpointTensor]:
    """The tensors of one file. Raises StartupError where the file is missing, cut off or not safetensors."""
    try:
        file: Any = safe_open(path, framework="pt", device="cpu")
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise StartupError(f"{path} cannot be read as safetensors (missing, cut off or broken): {error}") from error
    return [_tensor(path, file, name, view) for name, view in slices.items()]


def _tensor(path: Path, file: Any, name: str, view: Any) -> CheckpointTensor:
    def read() -> torch.Tensor:
        try:
            tensor: torch.Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise StartupError(f"{path}: tensor {name} cannot be read: {error}") from error
        return tensor

    return CheckpointTensor(name, tuple(view.get_shape()), read, DTYPES.get(view.get_dtype()))
