"""Linear layers whose outputs are fused from the checkpoint's projections, or end a branch of the residual stream."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vllm_lite.layers.context import ForwardContext, LayerOptions
from vllm_lite.ops.activation import gate_up_silu
from vllm_lite.ops.linear import linear, linear_accumulate


class FusedLinear:
    """Several projections of the same input as one product; `blocks` names them with their output sizes, in order.

    Tensor parallelism would give each rank its share of every block.
    """

    def __init__(
        self, options: LayerOptions, in_features: int, blocks: Mapping[str, int], has_bias: bool = False
    ) -> None:
        self.blocks = dict(blocks)
        self.out_features = sum(blocks.values())
        self.weight = options.matrix(self.out_features, in_features)
        self.bias = torch.empty(self.out_features, dtype=options.dtype, device=options.device) if has_bias else None

    def weight_targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """Each projection's rows of the fused weight, named `<prefix><block>.weight` and `.bias`."""
        targets = {}
        sizes = list(self.blocks.values())
        for name, rows in zip(self.blocks, torch.split(self.weight, sizes)):
            targets[f"{prefix}{name}.weight"] = rows
        if self.bias is not None:
            for name, part in zip(self.blocks, torch.split(self.bias, sizes)):
                targets[f"{prefix}{name}.bias"] = part
        return targets

    def __call__(self, context: ForwardContext, x: torch.Tensor, out: torch.Tensor) -> None:
        """x [max_tokens, in_features], out [max_tokens, out_features]."""
        linear(context.workspace, context.shape, x, self.weight, self.bias, out)


class GateUpLinear:
    """Gate and up projection of an MLP with what combines them: out = silu(gate(x)) * up(x).

    The two halves of weight and bias begin at panels of their own.
    """

    def __init__(self, options: LayerOptions, in_features: int, size: int, has_bias: bool = False) -> None:
        self.size = size
        half = options.panelled(size)
        self.weight = options.matrix(2 * half, in_features)
        self.bias = torch.zeros(2 * half, dtype=options.dtype, device=options.device) if has_bias else None
        self.weight.view(2, half, in_features)[:, size:] = 0

    def weight_targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """`<prefix>gate_proj.weight`, `<prefix>up_proj.weight` and the biases."""
        targets = {}
        for kind, parameter in (("weight", self.weight), ("bias", self.bias)):
            if parameter is not None:
                gate, up = parameter.chunk(2)
                targets[f"{prefix}gate_proj.{kind}"] = gate[: self.size]
                targets[f"{prefix}up_proj.{kind}"] = up[: self.size]
        return targets

    def __call__(self, context: ForwardContext, x: torch.Tensor, out: torch.Tensor) -> None:
        """x [max_tokens, in_features], out [max_tokens, size]."""
        gate_up_silu(context.workspace, context.shape, x, self.weight, self.bias, out)


class ResidualLinear:
    """The projection that ends a branch: adds its output to the residual stream in place.

    Tensor parallelism would give each rank its share of the inputs.
    """

    def __init__(self, options: LayerOptions, in_features: int, out_features: int, has_bias: bool = False) -> None:
        self.weight = options.matrix(out_features, in_features)
        self.bias = torch.empty(out_features, dtype=options.dtype, device=options.device) if has_bias else None

    def weight_targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """`<prefix>weight`, and `<prefix>bias` where there is one."""
        targets = {f"{prefix}weight": self.weight}
        return targets if self.bias is None else {**targets, f"{prefix}bias": self.bias}

    def __call__(self, context: ForwardContext, x: torch.Tensor, residual: torch.Tensor) -> None:
        """x [max_tokens, in_features]; residual [max_tokens, out_features] is added to."""
        linear_accumulate(context.workspace, context.shape, x, self.weight, self.bias, residual)
