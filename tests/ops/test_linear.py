from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.ops.tensors import ALL_NATIVE, assert_close, random, tokens_shape, workspace
from vllm_lite.ops import linear as linear_module
from vllm_lite.ops.linear import linear, linear_accumulate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MAX_TOKENS = 40


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small products already take several tiles both ways."""
    monkeypatch.setattr(linear_module, "WEIGHT_SLICE_BYTES", 4096)
    monkeypatch.setattr(linear_module, "MAX_ROWS_OF_TILE", 13)


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 5, 9, 14, MAX_TOKENS])
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_and_accumulate(dtype: torch.dtype, num_tokens: int, has_bias: bool, is_native: bool) -> None:
    space = workspace(native_dtypes=ALL_NATIVE if is_native else frozenset({torch.float32}))
    x, weight = random(MAX_TOKENS, 33, dtype=dtype), random(70, 33, dtype=dtype, seed=1)
    bias = random(70, dtype=dtype, seed=2) if has_bias else None
    expected = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    before = random(MAX_TOKENS, 70, dtype=dtype, seed=3)
    out, residual = before.clone(), before.clone()
    linear(space, tokens_shape(num_tokens), x, weight, bias, out)
    linear_accumulate(space, tokens_shape(num_tokens), x, weight, bias, residual)
    assert_close(out[:num_tokens], expected[:num_tokens])
    assert_close(residual[:num_tokens], (before.double() + expected)[:num_tokens])
    for written in (out, residual):
        assert torch.equal(written[num_tokens:], before[num_tokens:])


@pytest.mark.parametrize("out_features", [70, 33, 8])
def test_one_row_on_several_threads(out_features: int) -> None:
    x, weight, before = random(3, 20), random(out_features, 20, seed=1), random(3, out_features, seed=2)
    expected = x.double() @ weight.double().T
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        out, residual = before.clone(), before.clone()
        linear(workspace(), tokens_shape(1), x, weight, None, out)
        linear_accumulate(workspace(), tokens_shape(1), x, weight, None, residual)
    finally:
        torch.set_num_threads(num_threads)
    assert_close(out[:1], expected[:1])
    assert_close(residual[:1], (before.double() + expected)[:1])
    assert torch.equal(out[1:], before[1:])


def test_long_weight_with_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "LONG_WEIGHT", 50)
    x, weight, out = random(12, 8), random(64, 8, seed=1), torch.empty(12, 64)
    linear(workspace(), tokens_shape(12), x, weight, None, out)
    assert_close(out, x.double() @ weight.double().T)
