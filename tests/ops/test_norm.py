"""rms_norm and layer_norm."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from tests.cuda.emulator import EmulatedKernels
from tests.ops.tensors import assert_close, assert_near, random, tokens_shape, workspace
from vllm_lite.ops.norm import layer_norm, rms_norm
from vllm_lite.ops.workspace import Workspace

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(space: Workspace, dtype: torch.dtype) -> None:
    x, weight, out = random(5, 12, dtype=dtype), random(12, dtype=dtype, seed=1), torch.zeros(5, 12, dtype=dtype)
    rms_norm(space, tokens_shape(3), x, weight, 1e-3, out)
    for t in range(3):
        mean = sum(v * v for v in x[t].tolist()) / 12
        assert_close(out[t], x[t].double() / math.sqrt(mean + 1e-3) * weight.double())
    assert (out[3:] == 0).all()


def test_rms_norm_of_heads_in_place_inside_a_wider_tensor(space: Workspace) -> None:
    qkv, weight = random(4, 7, 8), random(8, seed=1)
    before = qkv.clone()
    heads = qkv[:, 2:5]
    rms_norm(space, tokens_shape(3), heads, weight, 1e-6, heads)
    wide = before.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert_close(qkv[:3, 2:5], expected[:3, 2:5])
    qkv[:3, 2:5] = before[:3, 2:5]
    assert torch.equal(qkv, before)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm(space: Workspace, dtype: torch.dtype, has_bias: bool) -> None:
    # A mean far from 0: the variance must not come from a difference of large squares.
    x = random(5, 3, 24, dtype=torch.float32).add(100.0).to(dtype)[:, :2]
    weight, bias = random(24, dtype=dtype, seed=1), random(24, dtype=dtype, seed=2) if has_bias else None
    out = torch.zeros(5, 2, 24, dtype=dtype)
    layer_norm(space, tokens_shape(3), x, weight, bias, 1e-5, out)
    wide_bias = None if bias is None else bias.double()
    assert_close(out[:3], functional.layer_norm(x[:3].double(), (24,), weight.double(), wide_bias, 1e-5))
    assert (out[3:] == 0).all()


@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("size", [1, 40, 576, 1027, 9000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_give_what_the_reference_gives(
    kernels: EmulatedKernels, dtype: torch.dtype, size: int, norm: str
) -> None:
    x, weight, bias = (
        random(2, 3, size, dtype=dtype),
        random(size, dtype=dtype, seed=1),
        random(size, dtype=dtype, seed=2),
    )
    outs = []
    for space in (workspace(), workspace(cuda=kernels)):
        outs.append(torch.empty(2, 2, size + 8, dtype=dtype)[..., :size])
        if norm == "rms_norm":
            rms_norm(space, tokens_shape(2), x[:, 1:], weight, 1e-5, outs[-1])
        else:
            layer_norm(space, tokens_shape(2), x[:, 1:], weight, bias, 1e-5, outs[-1])
    assert_near(outs[1], outs[0])


def test_a_step_without_tokens_launches_nothing(space: Workspace) -> None:
    x = torch.full((2, 8), torch.nan)
    rms_norm(space, tokens_shape(0), x, x[0], 1e-5, x)
    layer_norm(space, tokens_shape(0), x, x[0], None, 1e-5, x)
    assert x.isnan().all()
