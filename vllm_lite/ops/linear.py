"""Matrix products with a weight, overwriting their output or adding to it.

The reference multiplies in float32 where the CPU has no instructions for the weight's dtype: the weight is converted
in slices of rows that stay in the cache. Measured with two threads of a CPU with AVX2 alone: torch's own bf16 and fp16
products run at 20 GFLOP/s at any size, float32 at 100 and more, converting the weight costs as much as 8 rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from vllm_lite.engine.step import StepShape
from vllm_lite.kernels.cpu import CpuKernels, type_name
from vllm_lite.ops.workspace import Workspace

MAX_ROWS_IN_16_BITS = 8
"""Up to here torch's own 16-bit product is faster than converting the weight."""
LONG_WEIGHT = 16384
WEIGHT_SLICE_BYTES = 2 * 2**20
MAX_ROWS_OF_TILE = 1024
"""Bounds the scratch memory; beyond it the cost of converting the weight again does not show."""


def linear(
    workspace: Workspace,
    shape: StepShape,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """out[t] = x[t] @ weight.T + bias.

    x [max_tokens, in_features]; weight [out_features, in_features]; bias [out_features]; out
    [max_tokens, out_features]; all of one dtype. With CPU kernels the weight is packed.
    """
    if workspace.cpu is not None:
        _call(workspace.cpu, "linear", shape, x, weight, bias, out)
        return
    n = shape.num_tokens
    _multiply(workspace, x[:n], weight, bias, out[:n], accumulate=False)


def linear_accumulate(
    workspace: Workspace,
    shape: StepShape,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    accumulate_into: torch.Tensor,
) -> None:
    """accumulate_into[t] += x[t] @ weight.T + bias: how a branch ends in the residual stream. Sizes as in `linear`."""
    if workspace.cpu is not None:
        _call(workspace.cpu, "linear_accumulate", shape, x, weight, bias, accumulate_into)
        return
    n = shape.num_tokens
    _multiply(workspace, x[:n], weight, bias, accumulate_into[:n], accumulate=True)


def _call(
    kernels: CpuKernels,
    name: str,
    shape: StepShape,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    sizes = (out.stride(0), out.shape[1], x.shape[1])
    kernels.call(f"{name}_{type_name(x.dtype)}", shape, x, x.stride(0), weight, bias, out, *sizes)


def products(
    workspace: Workspace, x: torch.Tensor, weight: torch.Tensor
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """x @ weight.T piece by piece: which rows, which columns, and the product in float32, valid until the next piece.

    x [num_rows, in_features] and weight [out_features, in_features] in the same dtype, any.
    """
    num_features = weight.shape[1]
    columns = max(1, min(weight.shape[0], WEIGHT_SLICE_BYTES // (num_features * 4)))
    for row in range(0, x.shape[0], MAX_ROWS_OF_TILE):
        rows = slice(row, min(row + MAX_ROWS_OF_TILE, x.shape[0]))
        num_rows = rows.stop - rows.start
        wide_x, wide_weight, product = workspace.scratch(
            torch.float32, (num_rows, num_features), (columns, num_features), (num_rows, columns)
        )
        wide_x.copy_(x[rows])
        for column in range(0, weight.shape[0], columns):
            part = slice(column, min(column + columns, weight.shape[0]))
            num_columns = part.stop - part.start
            wide_part = wide_weight[:num_columns].copy_(weight[part])
            piece = product.view(-1)[: num_rows * num_columns].view(num_rows, num_columns)
            yield rows, part, torch.mm(wide_x, wide_part.t(), out=piece)


def multiplies_directly(workspace: Workspace, x: torch.Tensor) -> bool:
    """Whether one torch product in x's own dtype is the fastest way."""
    return x.dtype in workspace.native_dtypes or x.shape[0] <= MAX_ROWS_IN_16_BITS


def multiply(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, accumulate: bool = False) -> torch.Tensor:
    """out = x @ weight.T, or out += it, in one product in x's own dtype; out is contiguous.

    Measured in float32: one row is 1.4 times as fast with two threads as a batch of products, one for each thread,
    since torch multiplies a vector on one thread only; two to five rows (sixteen with a weight as long as a vocabulary)
    are up to four times as fast the other way round; with more of them MKL's packing of the weight pays off.
    """
    if x.dtype == torch.float32 and x.is_cpu:
        if x.shape[0] == 1:
            return _multiply_by_threads(x, weight, out, accumulate=accumulate)
        if 1 < x.shape[0] <= (16 if weight.shape[0] > LONG_WEIGHT else 5):
            product = torch.mm(weight, x.t()).t()
            return out.add_(product) if accumulate else out.copy_(product)
    return out.addmm_(x, weight.t()) if accumulate else torch.mm(x, weight.t(), out=out)


def _multiply_by_threads(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, accumulate: bool) -> torch.Tensor:
    """x [1, in_features]: each thread takes the same share of the weight's rows, as far as they divide."""
    out_features, in_features = weight.shape
    num_parts = math.gcd(out_features, torch.get_num_threads())
    vector = x.expand(num_parts, 1, in_features)
    parts = weight.view(num_parts, -1, in_features).transpose(1, 2)
    outs = out.view(num_parts, 1, -1)
    if accumulate:
        outs.baddbmm_(vector, parts)
    else:
        torch.bmm(vector, parts, out=outs)
    return out


def _multiply(
    workspace: Workspace,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    accumulate: bool,
) -> None:
    if multiplies_directly(workspace, x):
        multiply(x, weight, out, accumulate=accumulate)
        if bias is not None:
            out.add_(bias)
        return
    for rows, columns, product in products(workspace, x, weight):
        if bias is not None:
            product.add_(bias[columns])
        if accumulate:
            # Rounded before it is added, as a linear layer of its own would do.
            out[rows, columns] += product.to(out.dtype)
        else:
            out[rows, columns] = product
