"""activate and gate_up_silu."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional
from transformers.activations import ACT2FN

from tests.cuda.emulator import EmulatedKernels
from tests.ops.tensors import ALL_NATIVE, assert_close, assert_near, random, tokens_shape
from vllm_lite.ops.activation import Activation, activate, gate_up_silu
from vllm_lite.ops.workspace import Workspace

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MAX_TOKENS = 40


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 4, 30])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_up_silu(space: Workspace, dtype: torch.dtype, num_tokens: int, has_bias: bool) -> None:
    x, weight = random(MAX_TOKENS, 24, dtype=dtype), random(100, 24, dtype=dtype, seed=1)
    bias = random(100, dtype=dtype, seed=2) if has_bias else None
    gate, up = functional.linear(x.double(), weight.double(), None if bias is None else bias.double()).chunk(2, dim=1)
    expected = gate / (1 + torch.exp(-gate)) * up
    before = random(MAX_TOKENS, 50, dtype=dtype, seed=3)
    out = before.clone()
    gate_up_silu(space, tokens_shape(num_tokens), x, weight, bias, out)
    assert_close(out[:num_tokens], expected[:num_tokens])
    assert torch.equal(out[num_tokens:], before[num_tokens:])


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("size", [1, 48, 50, 3000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_gives_what_the_reference_gives(
    kernels: EmulatedKernels, dtype: torch.dtype, size: int, has_bias: bool
) -> None:
    x, weight = random(5, 4, dtype=dtype), random(2 * size, 4, dtype=dtype, seed=1)
    bias = random(2 * size, dtype=dtype, seed=2) if has_bias else None
    outs = []
    # Room for two of the five rows: three tiles.
    scratch_bytes = 2 * 2 * size * dtype.itemsize
    for kernels_or_none in (None, kernels):
        space = Workspace(torch.device("cpu"), ALL_NATIVE, scratch_bytes, kernels_or_none)
        outs.append(torch.empty(5, 3 * size, dtype=dtype)[:, :size])
        gate_up_silu(space, tokens_shape(5), x, weight, bias, outs[-1])
    assert torch.equal(outs[1], outs[0]) or dtype == torch.float32
    assert_near(outs[1], outs[0])


def test_extreme_gates(space: Workspace) -> None:
    weight = torch.eye(2)[[0, 0, 0, 1, 1, 1]]
    gates, ups = torch.tensor([-200.0, -1e30, 200.0, 0.0]), torch.tensor([3.0, 3.0, 3.0, 3.0])
    out = torch.empty(4, 3)
    gate_up_silu(space, tokens_shape(4), torch.stack([gates, ups], dim=1), weight, None, out)
    assert torch.equal(out[:, 0], torch.tensor([0.0, 0.0, 600.0, 0.0]))


def expected_of(kind: Activation, x: float) -> float:
    """By the definition, in float64."""
    if kind is Activation.RELU:
        return max(x, 0.0)
    if kind is Activation.GELU:
        return x * 0.5 * (1 + math.erf(x / math.sqrt(2)))
    if kind is Activation.GELU_TANH:
        return x * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x / (1 + math.exp(-1.702 * x))


@pytest.mark.parametrize("kind", Activation)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 48), (5, 50), (7, 1), (3, 3000), (0, 8)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations(space: Workspace, dtype: torch.dtype, num_tokens: int, size: int, kind: Activation) -> None:
    x = (3 * random(MAX_TOKENS, 2 * size, dtype=dtype))[:, size:]
    expected = torch.tensor([[expected_of(kind, float(v)) for v in row] for row in x[:num_tokens]]).view(-1, size)
    before = random(MAX_TOKENS, 3 * size, dtype=dtype, seed=3)[:, :size]
    out = before.clone()
    activate(space, tokens_shape(num_tokens), x, kind, out)
    assert_near(out[:num_tokens], expected.to(dtype))
    assert torch.equal(out[num_tokens:], before[num_tokens:])
    activate(space, tokens_shape(num_tokens), x, kind, x)
    assert torch.equal(x[:num_tokens], out[:num_tokens])


@pytest.mark.parametrize("kind", Activation)
def test_activations_of_extreme_numbers(space: Workspace, kind: Activation) -> None:
    x = torch.tensor([[-1e30, -200.0, 0.0, 200.0, 1e30, torch.inf, torch.nan]])
    out = torch.empty_like(x)
    activate(space, tokens_shape(1), x, kind, out)
    assert out[0, :-2].tolist() == [0.0, 0.0, 0.0, 200.0, x[0, 4]]
    # torch's own exact GELU makes NaN of infinity where it uses AVX-512, which ends a broken model's request as well.
    assert out[0, -2] == torch.inf or (space.cuda is None and kind is Activation.GELU and out[0, -2].isnan())
    assert out[0, -1].isnan()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("relu", Activation.RELU),
        ("gelu", Activation.GELU),
        ("gelu_new", Activation.GELU_TANH),
        ("gelu_fast", Activation.GELU_TANH),
        ("gelu_pytorch_tanh", Activation.GELU_TANH),
        ("quick_gelu", Activation.QUICK_GELU),
    ],
)
def test_activations_are_those_of_hugging_face(space: Workspace, name: str, kind: Activation) -> None:
    x = torch.linspace(-8, 8, 400).view(4, 100)
    out = torch.empty_like(x)
    activate(space, tokens_shape(4), x, kind, out)
    torch.testing.assert_close(out, ACT2FN[name](x), rtol=1e-5, atol=1e-5)
