"""BLOOM: a normalised embedding, and positions that lower attention scores by their distance (ALiBi)."""

from __future__ import annotations

import math

import torch

from vllm_lite.config import ModelConfig
from vllm_lite.layers.attention import Attention
from vllm_lite.layers.context import ForwardContext, LayerCache, LayerOptions
from vllm_lite.layers.linear import HeadwiseQKVLinear
from vllm_lite.layers.norm import LayerNorm
from vllm_lite.models.causal_lm import Activations
from vllm_lite.models.layer_norm_decoder import DecoderLayer, LayerNames, LayerNormDecoder

NAMES = LayerNames(
    attention_norm="input_layernorm",
    qkv="self_attention.query_key_value",
    output="self_attention.dense",
    mlp_norm="post_attention_layernorm",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)


class NormedResidualLayer(DecoderLayer):
    """A layer that replaces the residual stream by its norm before attention, and again before the MLP."""

    def __call__(self, context: ForwardContext, activations: Activations, cache: LayerCache) -> None:
        """Changes `hidden`."""
        hidden = activations.hidden
        self.attention_norm(context, hidden, hidden)
        self.attend(context, hidden, activations, cache)
        self.end_attention(context, activations)
        self.mlp_norm(context, hidden, hidden)
        self.feed_forward(context, hidden, activations)


class BloomForCausalLM(LayerNormDecoder):
    """The model with its parameters, uninitialised until the weight targets are filled."""

    base_prefix = "transformer."
    embedding_name = "transformer.word_embeddings.weight"
    layers_name = "h"
    norm_name = "ln_f"

    def __init__(self, config: ModelConfig, options: LayerOptions, max_model_len: int) -> None:
        super().__init__(config, options, max_model_len)
        self.embedding_norm = LayerNorm(options, config.hidden_size, config.norm_eps)
        slopes = torch.tensor(alibi_slopes(config.num_heads), dtype=torch.float32, device=options.device)
        attention = Attention(config.head_dim**-0.5, alibi_slopes=slopes)
        layer_class = NormedResidualLayer if config.norm_is_residual else DecoderLayer
        self.layers = []
        for _ in range(config.num_layers):
            qkv_proj = HeadwiseQKVLinear(
                options, config.hidden_size, config.num_heads, config.head_dim, config.qkv_bias
            )
            self.layers.append(layer_class(options, config, NAMES, qkv_proj, attention))

    def body_targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """All tensors of the checkpoint below `prefix` but the embedding's."""
        norm = self.embedding_norm.weight_targets(f"{prefix}word_embeddings_layernorm.")
        return {**norm, **super().body_targets(prefix)}

    def embed(self, context: ForwardContext, activations: Activations) -> None:
        """Fills `hidden` with the normalised embedding."""
        super().embed(context, activations)
        self.embedding_norm(context, activations.hidden, activations.hidden)


def alibi_slopes(num_heads: int) -> list[float]:
    """A geometric series that ends at 2^-8 for a power of two.

    Where the number of heads is none, the series of the power of two below, then every other slope of the one above.
    """
    power = 2 ** math.floor(math.log2(num_heads))

    def series(count: int) -> list[float]:
        return [2.0 ** (-8 * (i + 1) / count) for i in range(count)]

    return series(power) + series(2 * power)[::2][: num_heads - power]
