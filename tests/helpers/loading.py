"""Loads every tensor of a checkpoint into fresh memory, the way a model does, without a model."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from vllm_lite.config import EngineConfig
from vllm_lite.worker.checkpoint import open_checkpoint


def load_tensors(model: Path | str, *, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, torch.Tensor]:
    """Every tensor by its Hugging Face name; NaN where loading wrote nothing."""
    checkpoint = open_checkpoint(EngineConfig(model=str(model), **options))
    targets = {tensor.name: torch.full(tensor.shape, torch.nan, dtype=dtype) for tensor in checkpoint.tensors()}
    checkpoint.load_into(targets, lambda name: False)
    return targets


def assert_same_tensors(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 0
) -> None:
    assert sorted(actual) == sorted(expected)
    for name, tensor in expected.items():
        difference = (actual[name].float() - tensor.float()).abs().max().item()
        assert difference <= tolerance, f"{name} differs by {difference}"  # also where it is NaN


def forbid_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any use of the network from here on fails the test, whoever catches the error."""

    def refuse(*args: object, **keywords: object) -> NoReturn:
        pytest.fail(f"a connection was attempted: {args}")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
