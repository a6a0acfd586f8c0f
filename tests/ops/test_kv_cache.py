"""Writes and copies of the cache."""

from __future__ import annotations

import pytest
import torch

from tests.cuda.emulator import Bytes, EmulatedKernels, EmulatorError
from tests.ops.tensors import random, tokens_shape, workspace
from vllm_lite.ops import kv_cache
from vllm_lite.ops.workspace import Workspace

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_write_skips_slot_minus_one(space: Workspace, dtype: torch.dtype, block_size: int) -> None:
    num_blocks = 5
    qkv = random(7, 9, 4, dtype=dtype)
    key, value = qkv[:, 2:5], qkv[:, 6:9]
    slots = [0, 3 * block_size + 2, -1, block_size - 1, -1, num_blocks * block_size - 1, 1]
    caches = [torch.full((num_blocks, 3, block_size, 4), 7.0, dtype=dtype) for _ in range(2)]
    expected = [cache.clone() for cache in caches]
    kv_cache.write(space, tokens_shape(6), key, value, torch.tensor(slots, dtype=torch.int32), *caches)
    for t, slot in enumerate(slots[:6]):
        if slot >= 0:
            for cache, source in zip(expected, (key, value)):
                cache[slot // block_size, :, slot % block_size] = source[t]
    for cache, right in zip(caches, expected):
        assert torch.equal(cache, right)


def test_write_of_nothing(space: Workspace) -> None:
    caches = [torch.full((2, 1, 8, 4), 7.0) for _ in range(2)]
    slots = torch.full((3,), -1, dtype=torch.int32)
    kv_cache.write(space, tokens_shape(3), random(3, 1, 4), random(3, 1, 4), slots, *caches)
    space.begin_step()
    kv_cache.write(space, tokens_shape(0), random(3, 1, 4), random(3, 1, 4), slots + 1, *caches)
    assert all((cache == 7.0).all() for cache in caches)


@pytest.mark.parametrize("block", [(2, 8, 4), (5, 32, 128)])
def test_copy_blocks(space: Workspace, block: tuple[int, int, int]) -> None:
    caches = [random(6, *block, seed=s) for s in range(4)]
    before = [cache.clone() for cache in caches]
    kv_cache.copy_blocks(space, caches, torch.tensor([1, 1, 4]), torch.tensor([0, 5, 2]))
    for cache, old in zip(caches, before):
        assert torch.equal(cache, old[[1, 1, 4, 3, 4, 1]])


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize(
    ("num_kv_heads", "head_dim", "padding"), [(2, 64, 0), (1, 128, 3), (5, 6, 0), (8, 128, 8), (3, 8, 1), (9, 130, 0)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_writes_what_the_reference_writes(
    kernels: EmulatedKernels, dtype: torch.dtype, num_kv_heads: int, head_dim: int, padding: int, block_size: int
) -> None:
    size = num_kv_heads * head_dim
    wide_key, wide_value = random(4, size + padding, dtype=dtype), random(4, 2 * size + padding, dtype=dtype, seed=1)
    key, value = (part.view(4, num_kv_heads, head_dim) for part in (wide_key[:, :size], wide_value[:, -size:]))
    slots = torch.tensor([block_size, -1, 2 * block_size - 1, 5], dtype=torch.int32)
    caches = {}
    for name, space in {"reference": workspace(), "cuda": workspace(cuda=kernels)}.items():
        caches[name] = [torch.zeros(2, num_kv_heads, block_size, head_dim, dtype=dtype) for _ in range(2)]
        kv_cache.write(space, tokens_shape(4), key, value, slots, *caches[name])
    assert all(map(torch.equal, caches["cuda"], caches["reference"]))


def test_kernel_reads_and_writes_each_byte_once(kernels: EmulatedKernels) -> None:
    key, value = random(3, 2, 64), random(3, 2, 64, seed=1)
    caches = [torch.zeros(2, 2, 16, 64) for _ in range(2)]
    kv_cache.write(workspace(cuda=kernels), tokens_shape(3), key, value, torch.arange(3, dtype=torch.int32), *caches)
    module = kernels.module_of("write_kv<uint4>")
    num_bytes = key.numel() * 4
    assert [module.bytes(name) for name in ("key", "value")] == [Bytes(num_bytes, 0)] * 2
    assert [module.bytes(name) for name in ("key_cache", "value_cache")] == [Bytes(0, num_bytes)] * 2


def test_slot_beyond_the_cache_is_caught(kernels: EmulatedKernels) -> None:
    key, caches = random(1, 2, 8), [torch.zeros(2, 2, 16, 8) for _ in range(2)]
    with pytest.raises(EmulatorError, match=r"write of 16 bytes out of bounds at key_cache\[2048\]"):
        kv_cache.write(
            workspace(cuda=kernels), tokens_shape(1), key, key, torch.tensor([32], dtype=torch.int32), *caches
        )


def test_slot_given_twice_is_caught(kernels: EmulatedKernels) -> None:
    key, caches = random(2, 2, 8), [torch.zeros(2, 2, 16, 8) for _ in range(2)]
    with pytest.raises(EmulatorError, match=r"race: write after a write of key_cache"):
        kv_cache.write(
            workspace(cuda=kernels), tokens_shape(2), key, key, torch.tensor([3, 3], dtype=torch.int32), *caches
        )


def test_block_that_is_source_and_destination_is_caught(kernels: EmulatedKernels) -> None:
    with pytest.raises(EmulatorError, match=r"race: .* of cache\[.* of another block"):
        kv_cache.copy_blocks(workspace(cuda=kernels), [random(3, 2, 8, 4)], torch.tensor([0, 1]), torch.tensor([1, 2]))
