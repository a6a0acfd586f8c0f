"""Linear layers: plain, fused from the checkpoint's projections, with an activation, or ending a residual branch."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vllm_lite.layers.context import ForwardContext, LayerOptions
from vllm_lite.ops.activation import Activation, activate, gate_up_silu
from vllm_lite.ops.linear import linear, linear_accumulate


class Linear:
    """out = x @ weight.T + bias.

    `is_transposed`: the checkpoint holds the weight as [in_features, out_features], like the Conv1D layers of GPT-2.
    """

    def __init__(
        self,
        options: LayerOptions,
        in_features: int,
        out_features: int,
        has_bias: bool = False,
        *,
        is_transposed: bool = False,
    ) -> None:
        self.weight = options.matrix(out_features, in_features)
        self.bias = torch.empty(out_features, dtype=options.dtype, device=options.device) if has_bias else None
        self._is_transposed = is_transposed

    def weight_targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """`<prefix>weight`, and `<prefix>bias` where there is one."""
        targets = {f"{prefix}weight": self.weight.t() if self._is_transposed else self.weight}
        return targets if self.bias is None else {**targets, f"{prefix}bias": self.bias}

    def __call__(self, context: ForwardContext, x: torch.Tensor, out: torch.Tensor) -> None:
        """x [max_tokens, in_features], out [max_tokens, out_features]."""
        linear(context.workspace, context.shape, x, self.weight, self.bias, out)


class ResidualLinear(Linear):
    """The projection that ends a branch: adds its output to the residual stream in place.

    Tensor parallelism would give each rank its share of the inputs.
    """

    def __call__(self, context: ForwardContext, x: torch.Tensor, residual: torch.Tensor) -> None:
        """x [max_tokens, in_features]; residual [max_tokens, out_features] is added to."""
        linear_accumulate(context.workspace, context.shape, x, self.weight, self.bias, residual)


class ActivatedLinear(Linear):
    """The projection that begins an MLP without a gate, with the activation of its output."""

    def __init__(
        self,
        options: LayerOptions,
        in_features: int,
        out_features: int,
        has_bias: bool,
        activation: Activation,
        *,
        is_transposed: bool = False,
    ) -> None:
        super().__init__(options, in_features, out_features, has_bias, is_transposed=is_transposed)
        self.activation = activation

    def __call__(self, context: ForwardContext, x: torch.Tensor, out: torch.Tensor) -> None:
        """x [max_tokens, in_features], out [max_tokens, out_features]."""
        super().__call__(context, x, out)
        activate(context.workspace, context.shape, out, self.activation, out)


class FusedLinear(Linear):
    """Several projections of the same input as one product; `blocks` names them with their output sizes, in order.

    Tensor parallelism would give each rank its share of every block.
    """

    def __init__(
        self, options: LayerOptions, in_features: int, blocks: Mapping[str, int], has_bias: bool = False
    ) -> None:
        super().__init__(options, in_features, sum(blocks.values()), has_bias)
        self.blocks = dict(blocks)

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


class HeadwiseQKVLinear(Linear):
    """Queries, keys and values as one product, which the checkpoint holds head by head: a head's query, key and value.

    Here their rows lie as everywhere else: all queries, then all keys, then all values.
    """

    def __init__(
        self, options: LayerOptions, in_features: int, num_heads: int, head_dim: int, has_bias: bool = False
    ) -> None:
        super().__init__(options, in_features, 3 * num_heads * head_dim, has_bias)
        self._rows = (3, num_heads, head_dim)

    def weight_targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """`<prefix>weight` as [num_heads, 3, head_dim, in_features], and `<prefix>bias` likewise."""
        return {
            name: target.view(*self._rows, *target.shape[1:]).transpose(0, 1)
            for name, target in super().weight_targets(prefix).items()
        }


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
