"""Calls of every op with the sizes of a model, on the CPU kernels and on the torch reference. Measures nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from vllm_lite.config import ModelConfig
from vllm_lite.engine.step import StepShape
from vllm_lite.kernels.cpu import PANEL_ROWS
from vllm_lite.ops.activation import gate_up_silu
from vllm_lite.ops.attention import attend
from vllm_lite.ops.embedding import embedding
from vllm_lite.ops.greedy_head import greedy_head
from vllm_lite.ops.kv_cache import write
from vllm_lite.ops.linear import linear, linear_accumulate
from vllm_lite.ops.logits import logits
from vllm_lite.ops.norm import layer_norm, rms_norm
from vllm_lite.ops.rotary import rotary
from vllm_lite.ops.workspace import Workspace

BLOCK_SIZE = 16
MAX_COPIES = 64
MAX_FLOPS_OF_COPIES = 4 * 10**9
"""Of one call on each copy, so that it takes a fraction of a second. With that much to compute for every byte of a
weight, it matters little where the weight comes from."""

Call = Callable[[], None]


@dataclass(frozen=True)
class OpSizes:
    """How large the steps are."""

    num_tokens: Sequence[int] = (1, 4, 8, 16, 32, 128, 512)
    """Of the products."""
    num_rows: Sequence[int] = (1, 32)
    """Of the two heads, and sequences of decoding attention."""
    num_small: Sequence[int] = (1, 32, 512)
    """Tokens of norms, rotary embedding, embedding and cache write."""
    contexts: Sequence[int] = (128, 1500)
    """Of decoding attention."""
    prompts: Sequence[tuple[int, int]] = ((128, 128), (512, 512), (512, 1500))
    """New tokens and context of a prompt chunk."""
    cold_bytes: int = 128 * 2**20
    """Weights and caches are taken in turn from copies of this size together, as a model's layers come in turn: one
    alone would stay in the processor's cache. At most MAX_COPIES, and no more than MAX_FLOPS_OF_COPIES allows."""


@dataclass(frozen=True)
class Case:
    """One op at one size."""

    op: str
    size: str
    shape: StepShape
    num_bytes: int
    """What a call has to read and write at least."""
    flops: int
    cold_bytes: int
    """Of weights or caches, which a model has one of for each layer."""
    new_call: Callable[[Workspace], Call]
    """Makes a call on data of its own: of the CPU kernel where the workspace has them, else of the reference."""

    def calls(self, space: Workspace, cold_bytes: int) -> list[Call]:
        """Calls on as many copies of the data as take `cold_bytes` together."""
        wanted = -(-cold_bytes // max(self.cold_bytes, 1))
        affordable = MAX_FLOPS_OF_COPIES // max(self.flops, 1)
        return [self.new_call(space) for _ in range(max(1, min(MAX_COPIES, wanted, affordable)))]


class OpCases:
    """The cases of a model. Numbers are random, and the same in every case."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, sizes: OpSizes) -> None:
        self._config = config
        self._dtype = dtype
        self._sizes = sizes
        self._numbers = torch.randn(2**20, generator=torch.Generator().manual_seed(0)).to(dtype)

    def __iter__(self) -> Iterator[Case]:
        config, sizes = self._config, self._sizes
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        for n in sizes.num_tokens:
            yield self._linear("linear", linear, n, query_size + 2 * kv_size, config.hidden_size)
            yield self._linear("linear_accumulate", linear_accumulate, n, config.hidden_size, query_size)
            yield self._linear("linear_accumulate", linear_accumulate, n, config.hidden_size, config.intermediate_size)
            yield self._gate_up_silu(n)
        for n in sizes.num_rows:
            yield self._head("greedy_head", greedy_head, n, torch.empty(n, dtype=torch.int32))
            yield self._head("logits", logits, n, torch.empty(n, config.vocab_size))
        for n in sizes.num_small:
            yield from (self._embedding(n), self._rms_norm(n), self._layer_norm(n), self._rotary(n), self._write(n))
        for num_seqs in sizes.num_rows:
            for context in sizes.contexts:
                yield self._attend("decode attention", num_seqs, 1, context)
        for new, context in sizes.prompts:
            yield self._attend("prefill attention", 1, new, context)

    def _linear(self, op: str, function: Callable[..., None], n: int, rows: int, columns: int) -> Case:
        shape = _decodes(n)

        def new_call(space: Workspace) -> Call:
            weight = self._weight(space, rows, columns)
            return partial(function, space, shape, self._random(n, columns), weight, None, self._random(n, rows))

        moved = rows * columns + n * columns + n * rows * (1 if function is linear else 2)
        size = f"{n} x {columns} to {rows}"
        return self._case(op, size, shape, moved, 2 * n * rows * columns, rows * columns, new_call)

    def _gate_up_silu(self, n: int) -> Case:
        inner, hidden, shape = self._config.intermediate_size, self._config.hidden_size, _decodes(n)

        def new_call(space: Workspace) -> Call:
            half = inner if space.cpu is None else -(-inner // PANEL_ROWS) * PANEL_ROWS
            weight = self._weight(space, 2 * half, hidden)
            return partial(gate_up_silu, space, shape, self._random(n, hidden), weight, None, self._random(n, inner))

        moved = 2 * inner * hidden + n * hidden + n * inner
        size = f"{n} x {hidden} to 2 x {inner}"
        return self._case("gate_up_silu", size, shape, moved, 4 * n * inner * hidden, 2 * inner * hidden, new_call)

    def _head(self, op: str, function: Callable[..., None], n: int, out: torch.Tensor) -> Case:
        vocab, hidden, shape = self._config.vocab_size, self._config.hidden_size, _decodes(n)

        def new_call(space: Workspace) -> Call:
            weight, rows = self._weight(space, vocab, hidden), torch.arange(n, dtype=torch.int32)
            return partial(function, space, shape, self._random(n, hidden), rows, weight, out)

        moved = vocab * hidden + n * hidden + (out.numel() * out.itemsize) // self._dtype.itemsize
        size = f"{n} x {hidden} to {vocab}"
        return self._case(op, size, shape, moved, 2 * n * vocab * hidden, vocab * hidden, new_call)

    def _embedding(self, n: int) -> Case:
        vocab, hidden, shape = self._config.vocab_size, self._config.hidden_size, _decodes(n)
        ids = (torch.arange(n) * 7919 % vocab).to(torch.int32)

        def new_call(space: Workspace) -> Call:
            return partial(embedding, space, shape, ids, self._weight(space, vocab, hidden), self._random(n, hidden))

        return self._case("embedding", f"{n} x {hidden}", shape, 2 * n * hidden, 0, vocab * hidden, new_call)

    def _rms_norm(self, n: int) -> Case:
        hidden, shape = self._config.hidden_size, _decodes(n)

        def new_call(space: Workspace) -> Call:
            x, weight = self._random(n, hidden), self._random(hidden)
            return partial(rms_norm, space, shape, x, weight, 1e-5, self._random(n, hidden))

        return self._case("rms_norm", f"{n} x {hidden}", shape, 2 * n * hidden, 4 * n * hidden, 0, new_call)

    def _layer_norm(self, n: int) -> Case:
        hidden, shape = self._config.hidden_size, _decodes(n)

        def new_call(space: Workspace) -> Call:
            x, weight, bias = self._random(n, hidden), self._random(hidden), self._random(hidden)
            return partial(layer_norm, space, shape, x, weight, bias, 1e-5, self._random(n, hidden))

        return self._case("layer_norm", f"{n} x {hidden}", shape, 2 * n * hidden, 8 * n * hidden, 0, new_call)

    def _rotary(self, n: int) -> Case:
        config, shape = self._config, _decodes(n)
        num_heads, head_dim = config.num_heads + config.num_kv_heads, config.head_dim
        angles = torch.arange(n).unsqueeze(1) / 10_000 ** torch.linspace(0, 1, head_dim // 2)
        cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
        positions = torch.arange(n, dtype=torch.int32)

        def new_call(space: Workspace) -> Call:
            return partial(rotary, space, shape, positions, cos_sin, self._random(n, num_heads, head_dim))

        size, count = f"{n} x {num_heads} x {head_dim}", n * num_heads * head_dim
        return self._case("rotary", size, shape, 2 * count, 3 * count, 0, new_call)

    def _write(self, n: int) -> Case:
        heads, head_dim, shape = self._config.num_kv_heads, self._config.head_dim, _decodes(n)
        num_blocks = -(-n // BLOCK_SIZE)
        slots = torch.arange(n, dtype=torch.int32)

        def new_call(space: Workspace) -> Call:
            key, value = (self._random(n, heads, head_dim) for _ in range(2))
            key_cache, value_cache = (self._random(num_blocks, heads, BLOCK_SIZE, head_dim) for _ in range(2))
            return partial(write, space, shape, key, value, slots, key_cache, value_cache)

        count = 2 * n * heads * head_dim
        return self._case("cache write", f"{n} x {heads} x {head_dim}", shape, 2 * count, 0, count, new_call)

    def _attend(self, op: str, num_seqs: int, new: int, context: int) -> Case:
        """Sequences of the same context with the same number of new tokens, their blocks in random order."""
        config = self._config
        num_tokens, blocks_each = num_seqs * new, -(-context // BLOCK_SIZE)
        shape = StepShape(num_tokens, num_seqs, num_seqs if new == 1 else 0, new, context, num_seqs)
        order = torch.randperm(num_seqs * blocks_each, generator=torch.Generator().manual_seed(0))
        tables = order.view(num_seqs, blocks_each).to(torch.int32)
        starts = torch.arange(num_seqs + 1, dtype=torch.int32) * new
        context_lens = torch.full((num_seqs,), context, dtype=torch.int32)

        def new_call(space: Workspace) -> Call:
            query, out = (self._random(num_tokens, config.num_heads, config.head_dim) for _ in range(2))
            sizes = (num_seqs * blocks_each, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
            key_cache, value_cache = (self._random(*sizes) for _ in range(2))
            tensors = (query, key_cache, value_cache, starts, context_lens, tables)
            return partial(attend, space, shape, *tensors, config.head_dim**-0.5, None, None, None, out)

        cached = 2 * num_seqs * context * config.num_kv_heads * config.head_dim
        num_scores = num_seqs * config.num_heads * (new * context - new * (new - 1) // 2)
        moved = cached + 2 * num_tokens * config.num_heads * config.head_dim
        size = f"{num_seqs} x {new} of {context}"
        return self._case(op, size, shape, moved, 4 * num_scores * config.head_dim, cached, new_call)

    def _case(
        self, op: str, size: str, shape: StepShape, moved: int, flops: int, cold: int, new_call: Callable[..., Call]
    ) -> Case:
        """`moved` and `cold` are elements of the run's dtype."""
        itemsize = self._dtype.itemsize
        return Case(op, size, shape, moved * itemsize, flops, cold * itemsize, new_call)

    def _weight(self, space: Workspace, rows: int, columns: int) -> torch.Tensor:
        """[rows, columns], packed for the CPU kernels, whose products have the size of ordinary ones."""
        num_rows = rows if space.cpu is None else -(-rows // PANEL_ROWS) * PANEL_ROWS
        weight = self._random(num_rows, columns).mul_(columns**-0.5)
        if space.cpu is not None:
            space.cpu.pack(weight)
        return weight[:rows]

    def _random(self, *sizes: int) -> torch.Tensor:
        count = math.prod(sizes)
        return self._numbers.repeat(-(-count // self._numbers.numel()))[:count].clone().view(sizes)


def _decodes(n: int) -> StepShape:
    return StepShape(n, n, n, 1, 1, n)
