"""Llama: the whole of a decoder with RMS norms, rotary positions, grouped queries and a gated MLP.

Biases, norms of queries and keys, and windows are what its relatives differ by, and `ModelConfig` states them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_lite.config import ModelConfig
from vllm_lite.layers.attention import Attention
from vllm_lite.layers.context import ForwardContext, LayerCache, LayerOptions
from vllm_lite.layers.linear import FusedLinear, GateUpLinear, ResidualLinear
from vllm_lite.layers.norm import RMSNorm
from vllm_lite.layers.rotary import RotaryEmbedding
from vllm_lite.models.causal_lm import Activations, CausalLM


class LlamaAttention:
    """Queries, keys and values from one product; heads turned; the output added to the residual stream."""

    def __init__(self, options: LayerOptions, config: ModelConfig, layer: int, rotary: RotaryEmbedding) -> None:
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        blocks = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = FusedLinear(options, config.hidden_size, blocks, config.qkv_bias)
        self.q_norm = RMSNorm(options, config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(options, config.head_dim, config.norm_eps) if config.qk_norm else None
        self.rotary = rotary
        self.attention = Attention(config.head_dim**-0.5, config.sliding_windows[layer])
        self.o_proj = ResidualLinear(options, query_size, config.hidden_size, config.o_bias)

    def weight_targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """All tensors of the checkpoint below `prefix`."""
        targets = {**self.qkv_proj.weight_targets(prefix), **self.o_proj.weight_targets(f"{prefix}o_proj.")}
        if self.q_norm is not None and self.k_norm is not None:
            targets |= self.q_norm.weight_targets(f"{prefix}q_norm.")
            targets |= self.k_norm.weight_targets(f"{prefix}k_norm.")
        return targets

    def __call__(self, context: ForwardContext, activations: Activations, cache: LayerCache) -> None:
        """Reads `normed`, adds to `hidden`."""
        qkv = activations.qkv
        self.qkv_proj(context, activations.normed, qkv.flatten(1))
        query, key, value = torch.split(qkv, [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            self.q_norm(context, query, query)
            self.k_norm(context, key, key)
        self.rotary(context, qkv[:, : self.num_heads + self.num_kv_heads])
        self.attention(context, query, key, value, cache, activations.attended)
        self.o_proj(context, activations.attended.flatten(1), activations.hidden)


class LlamaMLP:
    """down(silu(gate(x)) * up(x)), added to the residual stream."""

    def __init__(self, options: LayerOptions, config: ModelConfig) -> None:
        size = config.intermediate_size
        self.gate_up_proj = GateUpLinear(options, config.hidden_size, size, config.mlp_bias)
        self.down_proj = ResidualLinear(options, size, config.hidden_size, config.mlp_bias)

    def weight_targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """All tensors of the checkpoint below `prefix`."""
        return {**self.gate_up_proj.weight_targets(prefix), **self.down_proj.weight_targets(f"{prefix}down_proj.")}

    def __call__(self, context: ForwardContext, activations: Activations) -> None:
        """Reads `normed`, adds to `hidden`."""
        self.gate_up_proj(context, activations.normed, activations.inner)
        self.down_proj(context, activations.inner, activations.hidden)


class LlamaLayer:
    """Attention and MLP, each on the normalised residual stream."""

    def __init__(self, options: LayerOptions, config: ModelConfig, layer: int, rotary: RotaryEmbedding) -> None:
        self.input_layernorm = RMSNorm(options, config.hidden_size, config.norm_eps)
        self.self_attn = LlamaAttention(options, config, layer, rotary)
        self.post_attention_layernorm = RMSNorm(options, config.hidden_size, config.norm_eps)
        self.mlp = LlamaMLP(options, config)

    def weight_targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """All tensors of the checkpoint below `prefix`."""
        return {
            **self.input_layernorm.weight_targets(f"{prefix}input_layernorm."),
            **self.self_attn.weight_targets(f"{prefix}self_attn."),
            **self.post_attention_layernorm.weight_targets(f"{prefix}post_attention_layernorm."),
            **self.mlp.weight_targets(f"{prefix}mlp."),
        }

    def __call__(self, context: ForwardContext, activations: Activations, cache: LayerCache) -> None:
        """Adds to `hidden`."""
        self.input_layernorm(context, activations.hidden, activations.normed)
        self.self_attn(context, activations, cache)
        self.post_attention_layernorm(context, activations.hidden, activations.normed)
        self.mlp(context, activations)


class LlamaForCausalLM(CausalLM):
    """The model with its parameters, uninitialised until the weight targets are filled."""

    hidden_acts = ("silu", "swish")

    def __init__(self, config: ModelConfig, options: LayerOptions, max_model_len: int) -> None:
        super().__init__(config, options, max_model_len)
        rotary = RotaryEmbedding(config.rope, config.head_dim, max_model_len, options.device)
        self.layers = [LlamaLayer(options, config, layer, rotary) for layer in range(config.num_layers)]
        self.norm = RMSNorm(options, config.hidden_size, config.norm_eps)

    def body_targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """All tensors of the checkpoint below `prefix` but the embedding's."""
        targets = self.norm.weight_targets(f"{prefix}norm.")
        for index, layer in enumerate(self.layers):
            targets |= layer.weight_targets(f"{prefix}layers.{index}.")
        return targets

    def forward(self, context: ForwardContext, activations: Activations, caches: Sequence[LayerCache]) -> None:
        """Computes the step's tokens, fills the caches with their keys and values, leaves `normed` for the head."""
        self.embed_tokens(context, activations.hidden)
        for layer, cache in zip(self.layers, caches, strict=True):
            layer(context, activations, cache)
        self.norm(context, activations.hidden, activations.normed)
