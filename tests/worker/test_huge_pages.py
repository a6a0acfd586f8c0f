"""Tensors side by side in memory of huge pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from vllm_lite.worker import huge_pages
from vllm_lite.worker.huge_pages import ALIGNMENT, CHUNK_BYTES, Arena, prefer_huge_pages


def test_tensors_keep_apart_and_aligned() -> None:
    arena = Arena()
    shapes = [(3, 5), (16, 576), (1, 1), (7, 2)]
    tensors = [arena.empty(shape, dtype) for shape in shapes for dtype in (torch.float32, torch.bfloat16)]
    for number, tensor in enumerate(tensors):
        assert tensor.data_ptr() % ALIGNMENT == tensors[0].data_ptr() % ALIGNMENT
        tensor.fill_(number)
    for number, tensor in enumerate(tensors):
        assert (tensor == number).all()
    assert [tuple(tensor.shape) for tensor in tensors[::2]] == shapes


def test_a_tensor_larger_than_a_chunk_has_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "CHUNK_BYTES", 1000)
    arena = Arena()
    first, large, last = (arena.empty((rows, 10), torch.float32) for rows in (10, 100, 10))
    for tensor in (first, large, last):
        tensor.fill_(1.0)
    assert large.numel() == 1000


def huge_kib(tensor: torch.Tensor) -> int:
    """Of the mapping that the tensor lies in."""
    for mapping in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", mapping):
            start, end = (int(edge, 16) for edge in found.groups())
            if start <= tensor.data_ptr() + tensor.nbytes // 2 < end:
                return int(re.findall(r"AnonHugePages:\s+(\d+)", mapping)[0])
    raise AssertionError("the tensor is in no mapping")


SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not SETTING.exists() or "[never]" in SETTING.read_text(), reason="this system gives nobody huge pages"
)
def test_the_system_gives_huge_pages() -> None:
    weight = Arena().empty((CHUNK_BYTES // 4096, 1024), torch.float32).fill_(1.0)
    # More than malloc keeps of what earlier tests have freed, which lies in small pages already.
    cache = prefer_huge_pages(torch.empty(CHUNK_BYTES, dtype=torch.uint8)).fill_(1)
    for tensor in (weight, cache):
        assert huge_kib(tensor) > 0
