from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_lite.config import ModelConfig, RopeConfig
from vllm_lite.errors import StartupError
from vllm_lite.worker.kv_cache import (
    CacheBudget,
    GpuMemory,
    allocate,
    available_memory,
    budget_on_cpu,
    budget_on_gpu,
    bytes_per_block,
    choose_num_blocks,
)

GIB = 2**30
PLENTY = budget_on_cpu(GIB)


def config(**changes: Any) -> ModelConfig:
    fields: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_layers": 3,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "norm_eps": 1e-6,
        "rope": RopeConfig(),
        "sliding_windows": (None,) * 3,
    }
    return ModelConfig(**{**fields, **changes})


def choose(size: CacheBudget | int = PLENTY, **changes: Any) -> int:
    settings: dict[str, Any] = {"dtype": torch.float32, "block_size": 16, "max_model_len": 128, "max_num_seqs": 4}
    return choose_num_blocks(config(), **{**settings, **changes}, size=size)


def test_bytes_of_a_block_are_those_that_are_allocated() -> None:
    caches = allocate(config(), dtype=torch.bfloat16, block_size=16, num_blocks=5, device=torch.device("cpu"))
    assert len(caches) == 3
    tensors = [tensor for cache in caches for tensor in (cache.key, cache.value)]
    assert all(tensor.shape == (5, 2, 16, 8) for tensor in tensors)
    assert sum(tensor.nbytes for tensor in tensors) == 5 * bytes_per_block(config(), torch.bfloat16, 16)


def test_never_more_than_full_contexts_of_all_sequences() -> None:
    assert choose() == 4 * 8
    assert choose(max_model_len=129) == 4 * 9


def test_takes_its_share_of_the_memory() -> None:
    per_block = bytes_per_block(config(), torch.float32, 16)
    assert choose(budget_on_cpu(100 * per_block), max_num_seqs=10**6) == 40


def test_a_given_number_is_taken() -> None:
    assert choose(77) == 77


def test_case_m2a_context_larger_than_the_cache() -> None:
    with pytest.raises(
        StartupError, match=r"4096 tokens.* 8 blocks of 16, 128 tokens.*--max-model-len.*--num-kv-blocks"
    ):
        choose(8, max_model_len=4096)
    per_block = bytes_per_block(config(), torch.float32, 16)
    with pytest.raises(StartupError, match=r"2 blocks of 16.*0\.0 GiB are available.*--num-kv-blocks to 8 or more"):
        choose(budget_on_cpu(5 * per_block))


@pytest.mark.parametrize("num_bytes", [1000, 0, -5 * GIB])
def test_no_memory_for_one_block(num_bytes: int) -> None:
    with pytest.raises(StartupError, match=r"single KV block of 6144 bytes.*128 tokens needs 8: do this, or set --num"):
        choose(CacheBudget(num_bytes, "do this"))


IDLE = GpuMemory(total=80 * GIB, free=64 * GIB, reserved=15 * GIB, peak=18 * GIB)
"""A GiB is CUDA's own in this process, 15 the weights', 3 more the largest step's."""


def test_a_gpus_cache_takes_what_nothing_else_does() -> None:
    assert budget_on_gpu(IDLE, 1.0).num_bytes == (80 - 18 - 1) * GIB
    assert budget_on_gpu(IDLE, 0.5).num_bytes == (40 - 18 - 1) * GIB


def test_memory_of_other_processes_is_not_ours() -> None:
    shared = dataclasses.replace(IDLE, free=54 * GIB)
    assert budget_on_gpu(shared, 1.0).num_bytes == budget_on_gpu(IDLE, 1.0).num_bytes - 10 * GIB


def test_memory_that_torch_keeps_after_the_step_is_counted_once() -> None:
    kept = dataclasses.replace(IDLE, free=61 * GIB, reserved=18 * GIB)
    assert budget_on_gpu(kept, 0.9) == budget_on_gpu(IDLE, 0.9)


@pytest.mark.parametrize("utilization", [0.2, 0.24])
def test_a_gpu_without_room_for_a_block_says_where_its_memory_is(utilization: float) -> None:
    message = (
        r"single KV block.*raise --gpu-memory-utilization \(of 80\.0 GiB the share 0\.2\d* is 1[69]\.\d GiB, the model "
        r"and its largest step take 18\.0 GiB, other processes and CUDA itself 1\.2 GiB\), lower "
        r"--max-num-batched-tokens or --max-num-seqs, or set --num-kv-blocks to 8 or more"
    )
    memory = dataclasses.replace(IDLE, free=IDLE.free - GIB // 5)
    with pytest.raises(StartupError, match=message):
        choose(budget_on_gpu(memory, utilization))


def test_a_gpu_without_room_for_a_context() -> None:
    memory = dataclasses.replace(IDLE, free=IDLE.free - 61 * GIB + 3 * 6144)
    with pytest.raises(StartupError, match=r"KV cache of 3 blocks.*--max-model-len to 48 or less, or free some of the"):
        choose(budget_on_gpu(memory, 1.0))


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def memory_of(root: Path) -> int:
    return available_memory(root / "proc", root / "cg")


def test_memory_without_control_groups(tmp_path: Path) -> None:
    write(tmp_path, proc__meminfo="MemTotal: 99 kB\nMemAvailable:    2048 kB\n")
    assert memory_of(tmp_path) == 2048 * 1024


def test_memory_of_a_version_2_group_counts_file_pages_as_free(tmp_path: Path) -> None:
    write(
        tmp_path,
        proc__meminfo="MemAvailable: 2048 kB\n",
        proc__self__cgroup="0::/a/b\n",
        cg__memory_dot_max="max\n",
        cg__a__memory_dot_max="900000\n",
        cg__a__memory_dot_current="500000\n",
        cg__a__memory_dot_stat="anon 3\ninactive_file 100000\n",
        cg__a__b__memory_dot_max="max\n",
        cg__a__b__memory_dot_current="5\n",
    )
    assert memory_of(tmp_path) == 500_000


def test_memory_of_a_version_1_group_whose_path_is_the_host_s(tmp_path: Path) -> None:
    write(
        tmp_path,
        proc__meminfo="MemAvailable: 2048 kB\n",
        proc__self__cgroup="5:cpu,memory:/docker/123\n3:cpuset:/\n",
        cg__memory__memory_dot_limit_in_bytes="700000\n",
        cg__memory__memory_dot_usage_in_bytes="100000\n",
        cg__memory__memory_dot_stat="total_inactive_file 50000\n",
    )
    assert memory_of(tmp_path) == 650_000


def test_a_group_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    write(
        tmp_path,
        proc__meminfo="MemAvailable: 2048 kB\n",
        proc__self__cgroup="0::/\n",
        cg__memory_dot_max="100\n",
        cg__memory_dot_current="200\n",
    )
    assert memory_of(tmp_path) == 0


def test_system_that_only_tells_how_much_there_is(tmp_path: Path) -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory_of(tmp_path) == total > available_memory()


def test_this_system_says() -> None:
    assert available_memory() > 0
