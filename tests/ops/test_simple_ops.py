"""embedding, rms_norm, rotary, and the writes and copies of the cache."""

from __future__ import annotations

import math

import pytest
import torch

from tests.ops.tensors import CPU, assert_close, random, tokens_shape, workspace
from vllm_lite.ops import kv_cache
from vllm_lite.ops.embedding import embedding
from vllm_lite.ops.norm import rms_norm
from vllm_lite.ops.rotary import rotary
from vllm_lite.ops.workspace import Workspace

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding(dtype: torch.dtype) -> None:
    weight, out = random(10, 6, dtype=dtype), torch.zeros(5, 6, dtype=dtype)
    embedding(workspace(), tokens_shape(3), torch.tensor([9, 0, 9, -7, 99], dtype=torch.int32), weight, out)
    assert torch.equal(out[:3], weight[[9, 0, 9]])
    assert (out[3:] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype: torch.dtype) -> None:
    x, weight, out = random(5, 12, dtype=dtype), random(12, dtype=dtype, seed=1), torch.zeros(5, 12, dtype=dtype)
    rms_norm(workspace(), tokens_shape(3), x, weight, 1e-3, out)
    for t in range(3):
        mean = sum(v * v for v in x[t].tolist()) / 12
        assert_close(out[t], x[t].double() / math.sqrt(mean + 1e-3) * weight.double())
    assert (out[3:] == 0).all()


def test_rms_norm_of_heads_in_place_inside_a_wider_tensor() -> None:
    qkv, weight = random(4, 7, 8), random(8, seed=1)
    before = qkv.clone()
    heads = qkv[:, 2:5]
    rms_norm(workspace(), tokens_shape(3), heads, weight, 1e-6, heads)
    wide = before.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert_close(qkv[:3, 2:5], expected[:3, 2:5])
    qkv[:3, 2:5] = before[:3, 2:5]
    assert torch.equal(qkv, before)


@pytest.mark.parametrize("rotary_dim", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary(dtype: torch.dtype, rotary_dim: int) -> None:
    half = rotary_dim // 2
    angles = random(20, half, seed=2)
    table = torch.cat([angles.cos(), angles.sin()], 1)
    wide = random(5, 6, 8, dtype=dtype)
    before = wide.double()
    heads = wide[:, 1:4]
    positions = torch.tensor([19, 0, 7, 3, 3], dtype=torch.int32)
    rotary(workspace(), tokens_shape(4), positions, table, heads)
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


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_write_skips_slot_minus_one(dtype: torch.dtype, block_size: int) -> None:
    num_blocks = 5
    qkv = random(7, 9, 4, dtype=dtype)
    key, value = qkv[:, 2:5], qkv[:, 6:9]
    slots = [0, 3 * block_size + 2, -1, block_size - 1, -1, num_blocks * block_size - 1, 1]
    caches = [torch.full((num_blocks, 3, block_size, 4), 7.0, dtype=dtype) for _ in range(2)]
    expected = [cache.clone() for cache in caches]
    kv_cache.write(
        workspace(), tokens_shape(6), key, value, torch.tensor(slots, dtype=torch.int32), caches[0], caches[1]
    )
    for t, slot in enumerate(slots[:6]):
        if slot >= 0:
            for cache, source in zip(expected, (key, value)):
                cache[slot // block_size, :, slot % block_size] = source[t]
    for cache, right in zip(caches, expected):
        assert torch.equal(cache, right)


def test_write_of_nothing() -> None:
    caches = [torch.full((2, 1, 8, 4), 7.0) for _ in range(2)]
    slots = torch.full((3,), -1, dtype=torch.int32)
    kv_cache.write(workspace(), tokens_shape(3), random(3, 1, 4), random(3, 1, 4), slots, caches[0], caches[1])
    kv_cache.write(workspace(), tokens_shape(0), random(3, 1, 4), random(3, 1, 4), slots + 1, caches[0], caches[1])
    assert all((cache == 7.0).all() for cache in caches)


def test_copy_blocks() -> None:
    caches = [random(6, 2, 8, 4, seed=s) for s in range(4)]
    before = [cache.clone() for cache in caches]
    kv_cache.copy_blocks(caches, torch.tensor([1, 1, 4]), torch.tensor([0, 5, 2]))
    for cache, old in zip(caches, before):
        assert torch.equal(cache, old[[1, 1, 4, 3, 4, 1]])


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
