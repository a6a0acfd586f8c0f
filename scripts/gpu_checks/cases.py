"""Calls of the ops that have CUDA kernels, made on the CPU from a seed, so that every implementation gets the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from vllm_lite.engine.step import StepShape
from vllm_lite.ops.activation import gate_up_silu
from vllm_lite.ops.attention import attend
from vllm_lite.ops.kv_cache import copy_blocks, write
from vllm_lite.ops.norm import layer_norm, rms_norm
from vllm_lite.ops.rotary import rotary
from vllm_lite.ops.workspace import Workspace

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TOLERANCES = {F32: 1e-4, BF16: 2e-2, F16: 3e-3}
"""Absolute, on data of about 1."""
NUM_TOKENS = 37
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A call that leaves its results in the tensors named by `outputs`."""

    name: str
    dtype: torch.dtype
    inputs: Tensors
    outputs: tuple[str, ...]
    call: Callable[[Workspace, Tensors], None]
    is_exact: bool = False

    def results(self, workspace: Workspace, device: torch.device) -> Tensors:
        """On the CPU, of a run on a device; the inputs stay as they are."""
        tensors = {name: tensor.clone().to(device) for name, tensor in self.inputs.items()}
        workspace.begin_step()
        with torch.inference_mode():
            self.call(workspace, tensors)
        return {name: tensors[name].cpu() for name in self.outputs}

    def error(self, results: Tensors, expected: Tensors) -> float:
        """The largest difference, in units of what is allowed: more than 1 is wrong. NaN only where it is expected."""
        worst = 0.0
        for name in self.outputs:
            ours, theirs = results[name].double(), expected[name].double()
            if self.is_exact:
                is_equal = torch.equal(ours.nan_to_num(1e9), theirs.nan_to_num(1e9))
                worst = max(worst, 0.0 if is_equal else float("inf"))
                continue
            allowed = TOLERANCES[self.dtype] + torch.finfo(self.dtype).eps * theirs.abs()
            ratio = ((ours - theirs).abs() / allowed).nan_to_num(float("inf")).max()
            worst = max(worst, float(ratio))
        return worst


def all_cases() -> list[Case]:
    """Every kernel in every dtype; attention over its options."""
    return [*attention_cases(), *itertools.chain.from_iterable(map(small_cases, (F32, BF16, F16)))]


def attention_cases() -> Iterator[Case]:
    """Decodes over one partition and over several, and prompt chunks with and without a cached prefix."""
    work = [(1, 1), (1, 17), (1, 333), (1, 1100), (3, 3), (40, 40), (33, 100), (2, 70)]
    for dtype, head_dim, num_heads, num_kv_heads, block_size, window, has_slopes, soft_cap in (
        (BF16, 128, 8, 2, 16, None, False, None),
        (BF16, 128, 8, 8, 8, 20, True, None),
        (BF16, 64, 14, 2, 16, None, False, None),
        (BF16, 64, 16, 1, 32, 100, False, 1.5),
        (BF16, 256, 4, 1, 16, None, False, None),
        (BF16, 96, 6, 2, 16, 50, False, None),
        (BF16, 80, 4, 2, 8, None, True, 1.5),
        (F16, 128, 8, 1, 16, None, False, None),
        (F16, 64, 8, 2, 8, 20, False, 1.5),
        (F16, 256, 4, 2, 32, 300, True, None),
        (F32, 128, 4, 2, 16, None, False, None),
        (F32, 64, 7, 1, 8, 20, True, 1.5),
        (F32, 5, 4, 4, 32, None, False, None),
    ):
        yield attention_case(work, dtype, head_dim, num_heads, num_kv_heads, block_size, window, has_slopes, soft_cap)


def attention_case(
    work: list[tuple[int, int]],
    dtype: torch.dtype,
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    block_size: int,
    window: int | None = None,
    has_slopes: bool = False,
    soft_cap: float | None = None,
) -> Case:
    """Sequences of (new tokens, context), decodes first. Slots that no context reaches hold NaN."""
    new_lens, contexts = zip(*work)
    blocks_of = [-(-context // block_size) for context in contexts]
    generator = torch.Generator().manual_seed(0)
    block_ids = torch.randperm(sum(blocks_of) + 3, generator=generator, dtype=torch.int64).to(torch.int32)
    block_tables = torch.zeros(len(work), max(blocks_of), dtype=torch.int32)
    caches = torch.full((2, len(block_ids), num_kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
    first = 0
    for sequence, (context, num_blocks) in enumerate(zip(contexts, blocks_of)):
        ids = block_ids[first : first + num_blocks]
        first += num_blocks
        block_tables[sequence, :num_blocks] = ids
        positions = torch.arange(context)
        blocks, offsets = ids.long()[positions // block_size], positions % block_size
        numbers = torch.randn(2, context, num_kv_heads, head_dim, generator=generator).to(dtype)
        caches[:, blocks, :, offsets] = numbers.transpose(0, 1)
    query_starts = torch.tensor([0, *itertools.accumulate(new_lens)], dtype=torch.int32)
    num_tokens = int(query_starts[-1])
    inputs = {
        "query": torch.randn(num_tokens, num_heads, head_dim, generator=generator).to(dtype),
        "key_cache": caches[0].clone(),
        "value_cache": caches[1].clone(),
        "query_starts": query_starts,
        "context_lens": torch.tensor(contexts, dtype=torch.int32),
        "block_tables": block_tables,
        "out": torch.zeros(num_tokens, num_heads, head_dim, dtype=dtype),
    }
    if has_slopes:
        inputs["slopes"] = 0.5 ** torch.arange(1, num_heads + 1).float()
    shape = StepShape(num_tokens, len(work), new_lens.count(1), max(new_lens), max(contexts))

    def call(workspace: Workspace, t: Tensors) -> None:
        attend(
            workspace, shape, t["query"], t["key_cache"], t["value_cache"], t["query_starts"], t["context_lens"],
            t["block_tables"], head_dim**-0.5, window, t.get("slopes"), soft_cap, t["out"],
        )  # fmt: skip

    options = f"window {window}, ALiBi {has_slopes}, soft cap {soft_cap}"
    name = (
        f"attention {_name(dtype)}, {num_heads}/{num_kv_heads} heads of {head_dim}, blocks of {block_size}, {options}"
    )
    return Case(name, dtype, inputs, ("out",), call)


def small_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Everything but attention."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    shape = StepShape(NUM_TOKENS, NUM_TOKENS, NUM_TOKENS, 1, 1)
    slots = torch.randperm(12 * 16, generator=generator)[:NUM_TOKENS].to(torch.int32)
    slots[::5] = -1
    kv = {"key": random(NUM_TOKENS, 2, 64), "value": random(NUM_TOKENS, 2, 64)}
    caches = {"key_cache": random(12, 2, 16, 64), "value_cache": random(12, 2, 16, 64)}
    both = ("key_cache", "value_cache")
    yield Case(
        f"write {_name(dtype)}", dtype, {**kv, **caches, "slots": slots}, both,
        lambda w, t: write(w, shape, t["key"], t["value"], t["slots"], t["key_cache"], t["value_cache"]),
        is_exact=True,
    )  # fmt: skip
    pairs = {"sources": torch.tensor([3, 7]), "destinations": torch.tensor([0, 11])}
    yield Case(
        f"copy_blocks {_name(dtype)}", dtype, {**caches, **pairs}, both,
        lambda w, t: copy_blocks(w, [t["key_cache"], t["value_cache"]], t["sources"], t["destinations"]),
        is_exact=True,
    )  # fmt: skip
    rows = {"x": random(NUM_TOKENS, 576), "weight": random(576), "bias": random(576), "out": random(NUM_TOKENS, 576)}
    yield Case(
        f"rms_norm {_name(dtype)}", dtype, rows, ("out",),
        lambda w, t: rms_norm(w, shape, t["x"], t["weight"], 1e-5, t["out"]),
    )  # fmt: skip
    yield Case(
        f"layer_norm {_name(dtype)}", dtype, rows, ("out",),
        lambda w, t: layer_norm(w, shape, t["x"], t["weight"], t["bias"], 1e-5, t["out"]),
    )  # fmt: skip
    angles = torch.rand(50, 16, generator=generator) * 6
    turned = {
        "positions": torch.randint(50, (NUM_TOKENS,), generator=generator).to(torch.int32),
        "cos_sin": torch.cat([angles.cos(), angles.sin()], dim=1),
        "heads": random(NUM_TOKENS, 4, 64),
    }
    yield Case(
        f"rotary {_name(dtype)}", dtype, turned, ("heads",),
        lambda w, t: rotary(w, shape, t["positions"], t["cos_sin"], t["heads"]),
    )  # fmt: skip
    gated = {
        "x": random(NUM_TOKENS, 32),
        "weight": (random(2 * 120, 32).float() * 32**-0.5).to(dtype),
        "out": random(NUM_TOKENS, 120),
    }
    yield Case(
        f"silu_and_mul {_name(dtype)}", dtype, gated, ("out",),
        lambda w, t: gate_up_silu(w, shape, t["x"], t["weight"], None, t["out"]),
    )  # fmt: skip


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
