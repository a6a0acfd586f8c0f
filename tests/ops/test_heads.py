"""The two ops at the end of a model: logits and greedy_head."""

from __future__ import annotations

import pytest
import torch

from tests.ops.tensors import ALL_NATIVE, assert_close, random, tokens_shape, workspace
from vllm_lite.engine.step import NO_TOKEN
from vllm_lite.ops import linear as linear_module
from vllm_lite.ops.greedy_head import greedy_head
from vllm_lite.ops.logits import logits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = torch.tensor([7, 2, 19, 0, 19, 3, 4, 5, 6, 8, 1, 11], dtype=torch.int32)


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "WEIGHT_SLICE_BYTES", 2048)


@pytest.mark.parametrize("num_rows", [1, 4, 11])
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_and_greedy_of_the_chosen_rows(dtype: torch.dtype, num_rows: int) -> None:
    hidden, weight = random(20, 16, dtype=dtype), random(300, 16, dtype=dtype, seed=1)
    expected = hidden.double()[ROWS.long()] @ weight.double().T
    out = torch.full((12, 300), 5.0)
    ids = torch.full((12,), 77, dtype=torch.int32)
    logits(workspace(), tokens_shape(20, num_rows), hidden, ROWS, weight, out)
    greedy_head(workspace(), tokens_shape(20, num_rows), hidden, ROWS, weight, ids)
    assert_close(out[:num_rows], expected[:num_rows], 3e-2 if dtype != torch.float32 else None)
    assert (out[num_rows:] == 5.0).all()
    if dtype == torch.float32:
        assert ids[:num_rows].tolist() == expected[:num_rows].argmax(1).tolist()
    assert (ids[num_rows:] == 77).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_do_not_fit_the_scratch_buffer_at_once(dtype: torch.dtype) -> None:
    hidden, weight = random(20, 16, dtype=dtype), random(300, 16, dtype=dtype, seed=1)
    out, ids = torch.empty(12, 300), torch.empty(12, dtype=torch.int32)
    space = workspace(scratch_bytes=3000, native_dtypes=ALL_NATIVE)
    logits(space, tokens_shape(20, 12), hidden, ROWS, weight, out)
    greedy_head(space, tokens_shape(20, 12), hidden, ROWS, weight, ids)
    assert_close(out, hidden.double()[ROWS.long()] @ weight.double().T, None if dtype == torch.float32 else 3e-2)
    assert ids.tolist() == out.argmax(1).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [2, 12])
def test_greedy_takes_the_lower_id_of_a_tie(dtype: torch.dtype, num_rows: int) -> None:
    weight = torch.zeros(300, 16, dtype=dtype)
    weight[[40, 41, 250], 0] = 2.0
    ids = torch.empty(12, dtype=torch.int32)
    greedy_head(workspace(), tokens_shape(20, num_rows), torch.ones(20, 16, dtype=dtype), ROWS, weight, ids)
    assert (ids[:num_rows] == 40).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [3, 12])
def test_greedy_row_that_is_not_finite_has_no_token(dtype: torch.dtype, num_rows: int, bad: float) -> None:
    hidden, weight = random(20, 16, dtype=dtype), random(300, 16, dtype=dtype, seed=1)
    hidden[2, 5] = bad
    ids = torch.empty(12, dtype=torch.int32)
    greedy_head(workspace(), tokens_shape(20, num_rows), hidden, ROWS, weight, ids)
    assert ids[1] == NO_TOKEN
    assert all(token >= 0 for token in ids[:num_rows].tolist()[:1] + ids[:num_rows].tolist()[2:])
