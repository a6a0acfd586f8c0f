"""Every CPU kernel against plain torch, in the code path of each instruction set."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.helpers.cpu_kernels import PATHS, cpu_kernels, cpu_space, in_cache_order, packed, packed_pair
from tests.ops.tensors import random, tokens_shape
from tests.ops.test_attention import Batch, make_batch
from vllm_lite.engine.step import NO_TOKEN
from vllm_lite.kernels.cpu import MAX_INNER_SIZE
from vllm_lite.ops.activation import Activation, activate, gate_up_silu
from vllm_lite.ops.attention import attend
from vllm_lite.ops.embedding import embedding
from vllm_lite.ops.greedy_head import greedy_head
from vllm_lite.ops.kv_cache import write
from vllm_lite.ops.linear import linear, linear_accumulate
from vllm_lite.ops.logits import logits
from vllm_lite.ops.norm import layer_norm, rms_norm
from vllm_lite.ops.position_embedding import position_embedding
from vllm_lite.ops.rotary import rotary
from vllm_lite.ops.workspace import Workspace

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = [F32, BF16]


@pytest.fixture(params=PATHS)
def space(request: pytest.FixtureRequest) -> Workspace:
    return cpu_space(request.param)


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """float32: 1e-5 of the largest value; bf16: 2e-2, or one rounding of a larger value."""
    if actual.dtype == F32:
        difference = (actual.double() - expected.double()).abs().max().item() if actual.numel() else 0.0
        assert difference <= 1e-5 * max(1.0, expected.abs().max().item() if actual.numel() else 0.0)
        return
    torch.testing.assert_close(actual.double(), expected.double(), atol=2e-2, rtol=2**-7)


def unit(out_features: int, in_features: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    """A weight that keeps unit-normal data so."""
    return (random(out_features, in_features, seed=seed) / math.sqrt(in_features)).to(dtype)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("out_features", "in_features"), [(48, 64), (70, 34), (5, 2), (300, 1536)])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 5, 6, 7, 13, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_and_accumulate(
    space: Workspace, dtype: torch.dtype, num_tokens: int, out_features: int, in_features: int, has_bias: bool
) -> None:
    x, weight = random(41, in_features, dtype=dtype), unit(out_features, in_features, dtype)
    bias = random(out_features, dtype=dtype, seed=2) if has_bias else None
    expected = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    before = random(41, out_features, dtype=dtype, seed=3)
    out, residual = before.clone(), before.clone()
    linear(space, tokens_shape(num_tokens), x, packed(weight), bias, out)
    linear_accumulate(space, tokens_shape(num_tokens), x, packed(weight), bias, residual)
    assert_near(out[:num_tokens], expected[:num_tokens])
    assert_near(residual[:num_tokens], (before.double() + expected)[:num_tokens])
    for written in (out, residual):
        assert torch.equal(written[num_tokens:], before[num_tokens:])


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("size", [16, 50, 200])
@pytest.mark.parametrize("num_tokens", [1, 4, 30])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_up_silu(space: Workspace, dtype: torch.dtype, num_tokens: int, size: int, has_bias: bool) -> None:
    x, gate, up = random(31, 24, dtype=dtype), unit(size, 24, dtype), unit(size, 24, dtype, seed=2)
    weight = packed_pair(gate, up)
    half = len(weight) // 2
    bias = random(2 * half, dtype=dtype, seed=3) if has_bias else None
    gates, ups = x.double() @ gate.double().T, x.double() @ up.double().T
    if bias is not None:
        gates, ups = gates + bias[:size].double(), ups + bias[half : half + size].double()
    before = random(31, size, dtype=dtype, seed=4)
    out = before.clone()
    gate_up_silu(space, tokens_shape(num_tokens), x, weight, bias, out)
    assert_near(out[:num_tokens], (functional.silu(gates) * ups)[:num_tokens])
    assert torch.equal(out[num_tokens:], before[num_tokens:])


@pytest.mark.parametrize("size", [3, 16, 100])
@pytest.mark.parametrize("kind", Activation)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations(space: Workspace, dtype: torch.dtype, kind: Activation, size: int) -> None:
    x = (random(5, size + 1, dtype=dtype) * 3)[:, 1:]
    x[0, 0], x[1, 0], x[2, 0], x[3, 0] = -200.0, 200.0, torch.nan, 0.0
    before = random(5, size, dtype=dtype, seed=1)
    out, expected = before.clone(), torch.empty(5, size, dtype=torch.float64)
    activate(space, tokens_shape(4), x, kind, out)
    activate(Workspace(torch.device("cpu")), tokens_shape(5), x.double(), kind, expected)
    assert out[2, 0].isnan()
    out[2, 0] = expected[2, 0] = 0.0
    assert_near(out[:4], expected[:4])
    assert torch.equal(out[4], before[4])


def test_extreme_gates(space: Workspace) -> None:
    weight = packed_pair(torch.tensor([[1.0, 0.0]] * 3), torch.tensor([[0.0, 1.0]] * 3))
    x = torch.tensor([[-200.0, 3.0], [-1e30, 3.0], [200.0, 3.0], [0.0, 3.0], [torch.nan, 3.0]])
    out = torch.empty(5, 3)
    gate_up_silu(space, tokens_shape(5), x, weight, None, out)
    assert torch.equal(out[:4, 0], torch.tensor([0.0, 0.0, 600.0, 0.0]))
    assert out[4].isnan().all()


@pytest.mark.parametrize("num_tokens", [1, 2, 6, 40])
def test_the_largest_layers_fit_the_scratch_memory(space: Workspace, num_tokens: int) -> None:
    """Where they did not, the process would end."""
    x, weight = random(num_tokens, MAX_INNER_SIZE, dtype=BF16), unit(20, MAX_INNER_SIZE, BF16)
    out, gated = torch.empty(num_tokens, 20, dtype=BF16), torch.empty(num_tokens, 16, dtype=BF16)
    linear(space, tokens_shape(num_tokens), x, packed(weight), None, out)
    assert_near(out, x.double() @ weight.double().T)
    gate_up_silu(space, tokens_shape(num_tokens), x, packed_pair(weight[:16], weight[4:]), None, gated)
    assert gated.isfinite().all()


ROWS = torch.tensor([7, 2, 19, 0, 19, 3, 4, 5, 6, 8, 1, 11, 9, 10], dtype=torch.int32)


@pytest.mark.parametrize("num_rows", [0, 1, 4, 14])
@pytest.mark.parametrize("vocab_size", [300, 320, 7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_and_greedy_of_the_chosen_rows(
    space: Workspace, dtype: torch.dtype, vocab_size: int, num_rows: int
) -> None:
    hidden, weight = random(20, 16, dtype=dtype), unit(vocab_size, 16, dtype)
    expected = hidden.double()[ROWS.long()] @ weight.double().T
    out, ids = torch.full((14, vocab_size), 5.0), torch.full((14,), 77, dtype=torch.int32)
    logits(space, tokens_shape(20, num_rows), hidden, ROWS, packed(weight), out)
    greedy_head(space, tokens_shape(20, num_rows), hidden, ROWS, packed(weight), ids)
    assert_near(out[:num_rows], expected[:num_rows])
    assert (out[num_rows:] == 5.0).all()
    assert ids[:num_rows].tolist() == out[:num_rows].argmax(1).tolist()
    assert (ids[num_rows:] == 77).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_takes_the_lower_id_of_a_tie_and_no_filler(space: Workspace, dtype: torch.dtype) -> None:
    weight = torch.full((300, 16), -1.0, dtype=dtype)
    weight[[40, 41, 250, 299]] = -0.5
    ids = torch.empty(14, dtype=torch.int32)
    greedy_head(space, tokens_shape(20, 14), torch.ones(20, 16, dtype=dtype), ROWS, packed(weight), ids)
    assert (ids == 40).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [3, 14])
def test_greedy_row_that_is_not_finite_has_no_token(
    space: Workspace, dtype: torch.dtype, num_rows: int, bad: float
) -> None:
    hidden, weight = random(20, 16, dtype=dtype), random(300, 16, dtype=dtype, seed=1)
    hidden[2, 5] = bad
    ids = torch.empty(14, dtype=torch.int32)
    greedy_head(space, tokens_shape(20, num_rows), hidden, ROWS, packed(weight), ids)
    assert ids[1] == NO_TOKEN
    assert all(token >= 0 for token in ids[:num_rows].tolist()[:1] + ids[:num_rows].tolist()[2:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding(space: Workspace, dtype: torch.dtype) -> None:
    weight, ids = random(70, 34, dtype=dtype), torch.tensor([69, 0, 16, 15, 33, 7], dtype=torch.int32)
    out = torch.zeros(7, 34, dtype=dtype)
    embedding(space, tokens_shape(6), ids, packed(weight), out)
    assert torch.equal(out[:6], weight[ids.long()])
    assert (out[6] == 0).all()


@pytest.mark.parametrize("size", [5, 34, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_position_embedding(space: Workspace, dtype: torch.dtype, size: int) -> None:
    table, hidden = random(20, size, dtype=dtype), random(7, size, dtype=dtype, seed=1)
    before, positions = hidden.clone(), torch.tensor([17, 0, 16, 15, 3, 7], dtype=torch.int32)
    position_embedding(space, tokens_shape(6), positions, table[2:], hidden)
    assert torch.equal(hidden[:6], (before[:6].float() + table[positions.long() + 2].float()).to(dtype))
    assert torch.equal(hidden[6], before[6])


@pytest.mark.parametrize("size", [5, 16, 576])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(space: Workspace, dtype: torch.dtype, size: int) -> None:
    x, weight, bias = (random(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(5, size), (size,), (size,)]))
    x += 3
    out = torch.zeros(5, size, dtype=dtype)
    rms_norm(space, tokens_shape(4), x, weight, 1e-3, out)
    assert_near(out[:4], functional.rms_norm(x.double(), (size,), weight.double(), 1e-3)[:4])
    for given in (bias, None):
        layer_norm(space, tokens_shape(4), x, weight, given, 1e-3, out)
        wide = None if given is None else given.double()
        assert_near(out[:4], functional.layer_norm(x.double(), (size,), weight.double(), wide, 1e-3)[:4])
    assert (out[4] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_heads_in_place_inside_a_wider_tensor(space: Workspace, dtype: torch.dtype) -> None:
    qkv, weight = random(4, 7, 8, dtype=dtype), random(8, dtype=dtype, seed=1)
    before = qkv.clone()
    heads = qkv[:, 2:5]
    rms_norm(space, tokens_shape(3), heads, weight, 1e-6, heads)
    assert_near(qkv[:3, 2:5], functional.rms_norm(before.double(), (8,), weight.double(), 1e-6)[:3, 2:5])
    qkv[:3, 2:5] = before[:3, 2:5]
    assert torch.equal(qkv, before)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(8, 8), (64, 64), (20, 12)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary(space: Workspace, dtype: torch.dtype, head_dim: int, rotary_dim: int) -> None:
    qkv, angles = random(4, 6, head_dim, dtype=dtype), random(50, rotary_dim // 2, seed=1)
    before, positions = qkv.double(), torch.tensor([49, 0, 7], dtype=torch.int32)
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    rotary(space, tokens_shape(3), positions, table, qkv[:, 1:5])
    expected, half = before.clone(), rotary_dim // 2
    for t, position in enumerate(positions.tolist()):
        cos, sin = angles[position].double().cos(), angles[position].double().sin()
        first, second = before[t, 1:5, :half], before[t, 1:5, half:rotary_dim]
        expected[t, 1:5, :half] = first * cos - second * sin
        expected[t, 1:5, half:rotary_dim] = second * cos + first * sin
    assert_near(qkv, expected)


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cache_write_is_exact(space: Workspace, dtype: torch.dtype, block_size: int) -> None:
    qkv = random(60, 2 + 3 + 3, 6, dtype=dtype)
    key, value = qkv[:, 2:5], qkv[:, 5:]
    plain = [torch.full((10, 3, block_size, 6), 9.0, dtype=dtype) for _ in range(2)]
    caches = in_cache_order(*plain)
    slots = torch.randperm(10 * block_size, generator=torch.Generator().manual_seed(0))[:60].int()
    slots[[3, 17]] = -1
    write(space, tokens_shape(58), key, value, slots, *caches)
    for t, slot in enumerate(slots[:58].tolist()):
        if slot >= 0:
            plain[0][slot // block_size, :, slot % block_size] = key[t]
            plain[1][slot // block_size, :, slot % block_size] = value[t]
    for cache, expected in zip(caches, in_cache_order(*plain)):
        assert torch.equal(cache, expected)


def expected_attention(
    batch: Batch, scale: float, window: int | None, slopes: torch.Tensor | None, soft_cap: float | None
) -> torch.Tensor:
    """A sequence at a time, in float64; rows of empty contexts stay 0."""
    block_size = batch.key_cache.shape[2]
    group = batch.query.shape[1] // batch.key_cache.shape[1]
    out = torch.zeros(batch.query.shape, dtype=torch.float64)
    for s, length in enumerate(batch.context_lens[: batch.shape.num_seqs].tolist()):
        rows = slice(*batch.query_starts[s : s + 2].tolist())
        if length == 0:
            continue
        keys = torch.arange(length)
        blocks = batch.block_tables[s, keys // block_size].long()
        key, value = (
            cache[blocks, :, keys % block_size].double().repeat_interleave(group, dim=1)
            for cache in (batch.key_cache, batch.value_cache)
        )
        distance = keys[None, :] - torch.arange(length - (rows.stop - rows.start), length)[:, None]
        scores = torch.einsum("qhd,khd->hqk", batch.query[rows].double(), key) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if slopes is not None:
            scores = scores + slopes.double()[:, None, None] * distance
        is_hidden = (distance > 0) | (distance <= -(window or 2**30))
        weights = torch.softmax(scores.masked_fill(is_hidden, -torch.inf), dim=-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, value)
    return out


def attended(space: Workspace, batch: Batch, **options: Any) -> torch.Tensor:
    key, value = in_cache_order(batch.key_cache, batch.value_cache)
    out = torch.zeros(batch.query.shape[0], batch.query.shape[1] + 1, batch.query.shape[2], dtype=batch.query.dtype)
    scale = 0.7 / math.sqrt(batch.query.shape[2])
    values = (options.get("window"), options.get("slopes"), options.get("soft_cap"))
    tables = (batch.query_starts, batch.context_lens, batch.block_tables)
    attend(space, batch.shape, batch.query, key, value, *tables, scale, *values, out[:, 1:])
    assert_near(out[:, 1:], expected_attention(batch, scale, *values))
    assert (out[:, 0] == 0).all()
    return out[:, 1:]


# (new tokens, context): decodes first, then chunks; lengths around blocks, groups of 16 and partitions of 256.
RAGGED = [(1, 1), (1, 17), (1, 256), (1, 257), (1, 300), (7, 7), (16, 16), (5, 40), (33, 280), (2, 600), (49, 49)]


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 3), (9, 3), (8, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged_attention(
    space: Workspace, dtype: torch.dtype, num_heads: int, num_kv_heads: int, block_size: int
) -> None:
    sizes: dict[str, int] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "block_size": block_size}
    attended(space, make_batch(RAGGED, dtype=dtype, head_dim=16, num_blocks=300, **sizes))


@pytest.mark.parametrize("head_dim", [2, 20, 64, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_sizes(space: Workspace, dtype: torch.dtype, head_dim: int) -> None:
    batch = make_batch([(1, 40), (1, 270), (20, 33)], dtype=dtype, head_dim=head_dim, num_heads=2, num_kv_heads=1)
    attended(space, batch)


@pytest.mark.parametrize("window", [None, 1, 30, 300])
@pytest.mark.parametrize("has_slopes", [True, False])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scoring(
    space: Workspace, dtype: torch.dtype, window: int | None, has_slopes: bool, soft_cap: float | None
) -> None:
    slopes = torch.tensor([0.5, 0.25, 0.01, 0.0]) if has_slopes else None
    batch = make_batch([(1, 1), (1, 300), (5, 290), (40, 40)], dtype=dtype, head_dim=8)
    attended(space, batch, window=window, slopes=slopes, soft_cap=soft_cap)


@pytest.mark.parametrize("group", [48, 50, 100])
def test_more_query_heads_than_a_tile_has_rows(space: Workspace, group: int) -> None:
    attended(space, make_batch([(1, 20), (1, 300), (3, 5)], num_heads=group, num_kv_heads=1, head_dim=4))


def test_empty_context_is_left_alone(space: Workspace) -> None:
    batch = make_batch([(1, 5), (1, 9), (3, 3), (4, 4)])
    batch.context_lens[1] = batch.context_lens[2] = 0
    out = attended(space, batch)
    assert (out[1] == 0).all()
    assert (out[2:5] == 0).all()


def rows_of_a_sequence(path: str, dtype: torch.dtype, work: list[tuple[int, int]], num_threads: int) -> torch.Tensor:
    """What the last sequence's last token gets, whose query, keys and values are the same whatever the work is."""
    batch = make_batch(work, dtype=dtype, num_heads=6, num_kv_heads=2, head_dim=16, num_blocks=400)
    block_size = batch.key_cache.shape[2]
    for position in range(work[-1][1]):
        block = int(batch.block_tables[len(work) - 1, position // block_size])
        batch.key_cache[block, :, position % block_size] = random(2, 16, dtype=dtype, seed=position)
        batch.value_cache[block, :, position % block_size] = random(2, 16, dtype=dtype, seed=position + 10_000)
    last = batch.shape.num_tokens - 1
    batch.query[last] = random(6, 16, dtype=dtype, seed=77)
    return attended(cpu_space(path, num_threads), batch)[last].clone()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
def test_bits_of_attention_depend_on_nothing_but_the_sequence(path: str, dtype: torch.dtype) -> None:
    alone = [(1, 600)]
    others = [[(1, 30), (1, 600)], [(7, 600)], [(1, 300), (2, 2), (70, 600)], [(1, 1)] * 5 + [(600, 600)]]
    expected = rows_of_a_sequence(path, dtype, alone, 1)
    for work, num_threads in zip([alone, *others], (2, 3, 1, 2, 3)):
        assert torch.equal(rows_of_a_sequence(path, dtype, work, num_threads), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_attention_do_not_depend_on_how_decodes_are_cut(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = rows_of_a_sequence("native", dtype, [(1, 300), (1, 600)], 2)
    monkeypatch.setattr("vllm_lite.ops.cpu_attention.PARTIALS_SIZE", 10)
    assert torch.equal(rows_of_a_sequence("native", dtype, [(1, 300), (1, 600)], 2), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
def test_bits_of_a_product_do_not_depend_on_its_other_rows_or_the_threads(path: str, dtype: torch.dtype) -> None:
    x, weight = random(400, 576, dtype=dtype), unit(200, 576, dtype)
    first = torch.empty(400, 200, dtype=dtype)
    linear(cpu_space(path, 1), tokens_shape(1), x, packed(weight), None, first)
    for num_tokens, num_threads in zip((1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 25, 400), itertools.cycle((1, 2, 3))):
        out = torch.empty(400, 200, dtype=dtype)
        linear(cpu_space(path, num_threads), tokens_shape(num_tokens), x, packed(weight), None, out)
        assert torch.equal(out[0], first[0])


def test_wrong_arguments_are_refused() -> None:
    kernels = cpu_kernels()
    ids, weight, out = torch.zeros(3, dtype=torch.int32), torch.zeros(16, 4), torch.zeros(3, 4)
    with pytest.raises(TypeError, match="takes 4 arguments, 3 were given"):
        kernels.call("embedding_float32", tokens_shape(1), ids, weight, out)
    with pytest.raises(TypeError, match=r"argument 0 of embedding_float32 is torch\.int64, not torch\.int32"):
        kernels.call("embedding_float32", tokens_shape(1), ids.long(), weight, out, 4)
    with pytest.raises(TypeError, match="argument 3 of embedding_float32 is float, not i"):
        kernels.call("embedding_float32", tokens_shape(1), ids, weight, out, 4.0)
    with pytest.raises(ValueError, match="panels of 16 rows"):
        kernels.pack(torch.zeros(20, 4))
