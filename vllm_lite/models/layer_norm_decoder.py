"""What GPT-2, OPT, BLOOM and GPT-NeoX share: layer norms, as many key heads as query heads, an MLP without a gate.

They differ in how positions come in, where a layer's norms stand, and what the checkpoint calls its tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_lite.config import ModelConfig
from vllm_lite.layers.attention import Attention
from vllm_lite.layers.context import ForwardContext, LayerCache, LayerOptions
from vllm_lite.layers.linear import ActivatedLinear, Linear, ResidualLinear
from vllm_lite.layers.norm import LayerNorm
from vllm_lite.layers.rotary import RotaryEmbedding
from vllm_lite.models.causal_lm import Activations, CausalLM
from vllm_lite.ops.activation import ACTIVATIONS

CAUSAL_MASKS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")


@dataclass(frozen=True)
class LayerNames:
    """What a checkpoint calls the parts of a layer."""

    attention_norm: str
    qkv: str
    """The product, or what holds its three projections."""
    output: str
    mlp_norm: str
    up: str
    down: str


class DecoderLayer:
    """Attention and MLP, each on the normalised residual stream. Relatives call the parts in another order."""

    def __init__(
        self,
        options: LayerOptions,
        config: ModelConfig,
        names: LayerNames,
        qkv_proj: Linear,
        attention: Attention,
        rotary: RotaryEmbedding | None = None,
        *,
        is_transposed: bool = False,
    ) -> None:
        size = config.hidden_size
        self.names = names
        self.attention_norm = LayerNorm(options, size, config.norm_eps, is_affine=config.norm_is_affine)
        self.qkv_proj, self.rotary, self.attention = qkv_proj, rotary, attention
        self.o_proj = ResidualLinear(options, size, size, config.o_bias, is_transposed=is_transposed)
        self.mlp_norm = LayerNorm(options, size, config.norm_eps, is_affine=config.norm_is_affine)
        inner, activation = config.intermediate_size, ACTIVATIONS[config.hidden_act]
        self.up_proj = ActivatedLinear(options, size, inner, config.mlp_bias, activation, is_transposed=is_transposed)
        self.down_proj = ResidualLinear(options, inner, size, config.mlp_bias, is_transposed=is_transposed)

    def weight_targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """All tensors of the checkpoint below `prefix`."""
        names = self.names
        return {
            **self.attention_norm.weight_targets(f"{prefix}{names.attention_norm}."),
            **self.qkv_proj.weight_targets(f"{prefix}{names.qkv}."),
            **self.o_proj.weight_targets(f"{prefix}{names.output}."),
            **self.mlp_norm.weight_targets(f"{prefix}{names.mlp_norm}."),
            **self.up_proj.weight_targets(f"{prefix}{names.up}."),
            **self.down_proj.weight_targets(f"{prefix}{names.down}."),
        }

    def __call__(self, context: ForwardContext, activations: Activations, cache: LayerCache) -> None:
        """Adds to `hidden`."""
        self.attention_norm(context, activations.hidden, activations.normed)
        self.attend(context, activations.normed, activations, cache)
        self.end_attention(context, activations)
        self.mlp_norm(context, activations.hidden, activations.normed)
        self.feed_forward(context, activations.normed, activations)

    def attend(self, context: ForwardContext, x: torch.Tensor, activations: Activations, cache: LayerCache) -> None:
        """x [max_tokens, hidden_size]; leaves `attended`."""
        qkv = activations.qkv
        self.qkv_proj(context, x, qkv.flatten(1))
        query, key, value = qkv.chunk(3, dim=1)
        if self.rotary is not None:
            self.rotary(context, qkv[:, : 2 * query.shape[1]])
        self.attention(context, query, key, value, cache, activations.attended)

    def end_attention(self, context: ForwardContext, activations: Activations) -> None:
        """Reads `attended`, adds to `hidden`."""
        self.o_proj(context, activations.attended.flatten(1), activations.hidden)

    def feed_forward(self, context: ForwardContext, x: torch.Tensor, activations: Activations) -> None:
        """x [max_tokens, hidden_size], be it `hidden` itself; adds to `hidden`."""
        self.up_proj(context, x, activations.inner)
        self.down_proj(context, activations.inner, activations.hidden)


class LayerNormDecoder(CausalLM):
    """Embedding, layers, a last norm and the head. Relatives make the layers, and may embed in their own way."""

    hidden_acts = tuple(ACTIVATIONS)
    layers_name: ClassVar[str]
    norm_name: ClassVar[str]
    layers: list[DecoderLayer]

    def __init__(self, config: ModelConfig, options: LayerOptions, max_model_len: int) -> None:
        super().__init__(config, options, max_model_len)
        self.norm: LayerNorm | None = None
        if config.has_final_norm:
            self.norm = LayerNorm(options, config.hidden_size, config.norm_eps, is_affine=config.norm_is_affine)

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor may stand in the checkpoint without use: older files hold the causal mask of each layer."""
        return name.endswith(CAUSAL_MASKS) or super().is_ignored(name)

    def body_targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """All tensors of the checkpoint below `prefix` but the embedding's."""
        targets = {} if self.norm is None else self.norm.weight_targets(f"{prefix}{self.norm_name}.")
        for index, layer in enumerate(self.layers):
            targets |= layer.weight_targets(f"{prefix}{self.layers_name}.{index}.")
        return targets

    def embed(self, context: ForwardContext, activations: Activations) -> None:
        """Fills `hidden` with what the first layer reads."""
        self.embed_tokens(context, activations.hidden)

    def forward(self, context: ForwardContext, activations: Activations, caches: Sequence[LayerCache]) -> None:
        """Computes the step's tokens, fills the caches with their keys and values, leaves the head its input."""
        self.embed(context, activations)
        for layer, cache in zip(self.layers, caches, strict=True):
            layer(context, activations, cache)
        if self.norm is not None:
            self.norm(context, activations.hidden, activations.normed)

    def head_input(self, activations: Activations) -> torch.Tensor:
        """[max_tokens, hidden_size]"""
        return activations.hidden if self.norm is None else activations.normed
