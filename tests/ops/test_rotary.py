"""rotary."""

from __future__ import annotations

import pytest
import torch

from tests.cuda.emulator import EmulatedKernels
from tests.ops.tensors import assert_close, assert_near, random, tokens_shape, workspace
from vllm_lite.ops.rotary import rotary
from vllm_lite.ops.workspace import Workspace

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("rotary_dim", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary(space: Workspace, dtype: torch.dtype, rotary_dim: int) -> None:
    half = rotary_dim // 2
    angles = random(20, half, seed=2)
    table = torch.cat([angles.cos(), angles.sin()], 1)
    wide = random(5, 6, 8, dtype=dtype)
    before = wide.double()
    heads = wide[:, 1:4]
    positions = torch.tensor([19, 0, 7, 3, 3], dtype=torch.int32)
    rotary(space, tokens_shape(4), positions, table, heads)
    expected = before.clone()
    for t in range(4):
        for h in range(1, 4):
            for i in range(half):
                angle = angles[positions[t], i].double()
                a, b = before[t, h, i], before[t, h, i + half]
                expected[t, h, i] = a * angle.cos() - b * angle.sin()
                expected[t, h, i + half] = b * angle.cos() + a * angle.sin()
    assert_close(wide, expected)
    assert torch.equal(wide.double()[4], before[4])


@pytest.mark.parametrize(("num_heads", "head_dim", "rotary_dim"), [(1, 64, 64), (9, 80, 32), (40, 128, 128), (3, 6, 2)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_give_what_the_reference_gives(
    kernels: EmulatedKernels, dtype: torch.dtype, num_heads: int, head_dim: int, rotary_dim: int
) -> None:
    table = random(7, rotary_dim, seed=1)
    positions = torch.tensor([6, 0, 3], dtype=torch.int32)
    qkv = random(3, num_heads + 2, head_dim, dtype=dtype)
    expected = qkv.clone()
    rotary(workspace(), tokens_shape(3), positions, table, expected[:, 1 : num_heads + 1])
    rotary(workspace(cuda=kernels), tokens_shape(3), positions, table, qkv[:, 1 : num_heads + 1])
    assert_near(qkv, expected)
