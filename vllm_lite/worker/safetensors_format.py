"""Reads .safetensors files: memory-mapped, so that a tensor costs nothing before some of it is read."""

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
        with safe_open(path, framework="pt", device="cpu") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            return [_tensor(path, name, view) for name, view in slices.items()]
    except (SafetensorError, OSError) as error:
        raise StartupError(f"{path} cannot be read as safetensors (missing, cut off or broken): {error}") from error


def _tensor(path: Path, name: str, view: Any) -> CheckpointTensor:
    def read(rows: slice) -> torch.Tensor:
        try:
            # Opened anew: pages that have been read count as the process's memory for as long as a file is mapped.
            with safe_open(path, framework="pt", device="cpu") as file:
                tensor: torch.Tensor = file.get_slice(name)[rows]
        except (SafetensorError, OSError) as error:
            raise StartupError(f"{path}: tensor {name} cannot be read: {error}") from error
        return tensor

    return CheckpointTensor(name, tuple(view.get_shape()), read, DTYPES.get(view.get_dtype()))
