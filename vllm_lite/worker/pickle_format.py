"""Reads the state dicts that torch.save wrote (.bin, .pt, .pth). Never runs code that such a file may hold."""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vllm_lite.errors import StartupError
from vllm_lite.worker.weights import CheckpointTensor

BROKEN_FILE_ERRORS = (
    *(RuntimeError, OSError, EOFError, ValueError, LookupError, AttributeError, TypeError, AssertionError),
    *(struct.error, zipfile.BadZipFile),
)
"""What torch.load raises for one damaged file or another."""


def open_pickle(path: Path) -> list[CheckpointTensor]:
    """The tensors of one file. Raises StartupError where it is broken, or holds anything else than named tensors."""
    state = _load(path)
    if not isinstance(state, Mapping):
        raise StartupError(f"{path} holds a {type(state).__name__}, not a state dict: names with their tensors.")
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or not _is_plain(value):
            raise StartupError(f"{path}: {name!r} is a {type(value).__name__}; only plain tensors are read.")
    return [_tensor(name, value) for name, value in state.items()]


def _load(path: Path) -> Any:
    try:
        # The format from before torch 1.6 is no zip file, and cannot be mapped into memory.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise StartupError(
            f"{path} is no plain state dict: it is broken or asks to run code. Nothing of it was run. "
            f"Convert it to safetensors where you trust it. ({_first_line(error)})"
        ) from error
    except BROKEN_FILE_ERRORS as error:
        raise StartupError(f"{path} cannot be read (missing, cut off or broken): {_first_line(error)}") from error


def _is_plain(value: torch.Tensor) -> bool:
    """Whether it has values of its own that can be copied: torch.save also keeps sparse tensors and empty shells."""
    return value.layout == torch.strided and value.device.type == "cpu" and not value.is_nested


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _tensor(name: str, value: torch.Tensor) -> CheckpointTensor:
    return CheckpointTensor(name, tuple(value.shape), lambda rows: value[rows], value.dtype)
