"""What a model runs in, for each thing that a checkpoint may say and each chip (faked): case L8."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.test_hf_config import read, write_config
from vllm_lite.config import EngineConfig, ModelConfig
from vllm_lite.kernels.cpu_library import cpu_flags
from vllm_lite.worker import dtype as dtype_module
from vllm_lite.worker.dtype import resolve_dtype

CPU = torch.device("cpu")
GPU = torch.device("cuda")
OLD_CPU = frozenset({"avx2"})
NEW_CPU = frozenset({"avx2", "avx512_bf16", "avx512_fp16"})


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    return read(write_config(tmp_path))


@pytest.mark.parametrize(
    ("stored", "is_gguf", "flags", "expected"),
    [
        ("bfloat16", False, OLD_CPU, torch.float32),
        ("float16", False, OLD_CPU, torch.float32),
        ("float32", False, OLD_CPU, torch.float32),
        (None, False, OLD_CPU, torch.float32),
        (None, True, OLD_CPU, torch.float32),
        ("bfloat16", False, NEW_CPU, torch.bfloat16),
        ("float16", False, NEW_CPU, torch.float16),
        ("float16", False, frozenset({"avx512_bf16"}), torch.float32),
        ("float32", False, NEW_CPU, torch.bfloat16),
        (None, False, NEW_CPU, torch.bfloat16),
        (None, True, NEW_CPU, torch.bfloat16),
    ],
)
def test_auto_on_a_cpu(
    stored: str | None, is_gguf: bool, flags: frozenset[str], expected: torch.dtype,
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(dtype_module, "cpu_flags", lambda: flags)

    assert resolve_dtype(EngineConfig(), dataclasses.replace(model, dtype=stored), is_gguf, CPU) == expected


@pytest.mark.parametrize(
    ("stored", "flag", "flags", "expected"),
    [
        ("bfloat16", "auto", OLD_CPU, torch.bfloat16),
        ("float16", "auto", OLD_CPU, torch.float32),
        ("float32", "auto", OLD_CPU, torch.float32),
        ("float16", "auto", NEW_CPU, torch.bfloat16),
        ("float32", "auto", NEW_CPU, torch.bfloat16),
        ("float32", "half", OLD_CPU, torch.float32),
        ("bfloat16", "float16", NEW_CPU, torch.bfloat16),
        ("bfloat16", "float32", NEW_CPU, torch.float32),
        ("float32", "bfloat16", OLD_CPU, torch.bfloat16),
    ],
)
def test_cpu_kernels_know_two_dtypes(
    stored: str, flag: Any, flags: frozenset[str], expected: torch.dtype,
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(dtype_module, "cpu_flags", lambda: flags)

    stored_model = dataclasses.replace(model, dtype=stored)
    assert resolve_dtype(EngineConfig(dtype=flag), stored_model, False, CPU, has_cpu_kernels=True) == expected


@pytest.mark.parametrize(
    ("stored", "capability", "expected"),
    [
        ("bfloat16", (7, 5), torch.float16),
        ("float16", (7, 5), torch.float16),
        ("float32", (7, 5), torch.float16),
        ("bfloat16", (9, 0), torch.bfloat16),
        ("float32", (9, 0), torch.bfloat16),
    ],
)
def test_auto_on_a_gpu(
    stored: str, capability: tuple[int, int], expected: torch.dtype,
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    assert resolve_dtype(EngineConfig(), dataclasses.replace(model, dtype=stored), False, GPU) == expected


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("half", torch.float16),
        ("float16", torch.float16),
        ("bfloat16", torch.bfloat16),
        ("float", torch.float32),
        ("float32", torch.float32),
    ],
)
@pytest.mark.parametrize("flags", [OLD_CPU, NEW_CPU])
def test_a_flag_is_always_honoured(
    flag: str, expected: torch.dtype, flags: frozenset[str], model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtype_module, "cpu_flags", lambda: flags)
    config = EngineConfig(dtype=flag)  # type: ignore[arg-type]  # one of its choices

    assert resolve_dtype(config, dataclasses.replace(model, dtype="bfloat16"), False, CPU) == expected


def test_a_fallback_says_so_in_one_line(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dtype_module, "cpu_flags", lambda: OLD_CPU)

    with caplog.at_level(logging.INFO):
        resolve_dtype(EngineConfig(), dataclasses.replace(model, dtype="bfloat16"), False, CPU)

    assert [record.getMessage() for record in caplog.records] == [
        "bfloat16 is not what this cpu computes in at full speed: running in float32 (--dtype decides otherwise)"
    ]


def test_flags_are_read_from_the_first_processor(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(
        "processor\t: 0\nvmx flags\t: nothing\nflags\t\t: fpu avx2 avx512_bf16\nbugs\t\t: none\n\nprocessor\t: 1\n"
    )

    assert cpu_flags(path) == {"fpu", "avx2", "avx512_bf16"}
    assert cpu_flags(tmp_path / "missing") == frozenset()
