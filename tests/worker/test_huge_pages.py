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


def flags_of_mapping(tensor: torch.Tensor) -> list[str]:
    """What the system has noted about the mapping that the tensor's middle lies in."""
    for mapping in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", mapping):
            start, end = (int(edge, 16) for edge in found.groups())
            if start <= tensor.data_ptr() + tensor.nbytes // 2 < end:
                return str(re.findall(r"VmFlags:(.*)", mapping)[0]).split()
    raise AssertionError("the tensor is in no mapping")


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="this system has no huge pages to ask for"
)
def test_the_system_is_asked_for_huge_pages() -> None:
    """Whether it gives them is its own affair: with its memory in pieces it has none."""
    weight = Arena().empty((CHUNK_BYTES // 4096, 1024), torch.float32).fill_(1.0)
    # More than malloc keeps of what earlier tests have freed, which lies in small pages already.
    cache = prefer_huge_pages(torch.empty(CHUNK_BYTES, dtype=torch.uint8)).fill_(1)
    for tensor in (weight, cache):
        assert "hg" in flags_of_mapping(tensor)
    assert "hg" not in flags_of_mapping(torch.empty(64 * 2**20, dtype=torch.uint8))
