"""embedding, position_embedding, and the workspace."""

from __future__ import annotations

import pytest
import torch

from tests.ops.tensors import CPU, random, tokens_shape, workspace
from vllm_lite.ops.embedding import embedding
from vllm_lite.ops.position_embedding import position_embedding
from vllm_lite.ops.workspace import Workspace

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding(dtype: torch.dtype) -> None:
    weight, out = random(10, 6, dtype=dtype), torch.zeros(5, 6, dtype=dtype)
    embedding(workspace(), tokens_shape(3), torch.tensor([9, 0, 9, -7, 99], dtype=torch.int32), weight, out)
    assert torch.equal(out[:3], weight[[9, 0, 9]])
    assert (out[3:] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scratch_bytes", [2**20, 16])
def test_position_embedding(dtype: torch.dtype, scratch_bytes: int) -> None:
    table, hidden = random(10, 6, dtype=dtype), random(5, 6, dtype=dtype, seed=1)
    before = hidden.clone()
    positions = torch.tensor([7, 0, 7, -7, 99], dtype=torch.int32)
    position_embedding(workspace(scratch_bytes), tokens_shape(3), positions, table[2:], hidden)
    assert torch.equal(hidden[:3], (before[:3].float() + table[[9, 2, 9]].float()).to(dtype))
    assert torch.equal(hidden[3:], before[3:])


def test_workspace_parts_do_not_overlap_and_grow() -> None:
    space = Workspace(CPU, scratch_bytes=256)
    a, b = space.scratch(torch.bfloat16, (3, 5), (7,))
    a.fill_(1.0)
    b.fill_(2.0)
    assert (a == 1.0).all()
    (large,) = space.scratch(torch.float32, (1000,))
    assert large.shape == (1000,)


def test_workspace_derives_once_a_step() -> None:
    space, calls = workspace(), []
    for _ in range(2):
        space.begin_step()
        for _ in range(3):
            space.once_a_step("key", lambda: calls.append(1))
    assert len(calls) == 2
