"""GPT-2: learnt positions, and linear layers whose weights the checkpoint holds transposed."""

from __future__ import annotations

import torch

from vllm_lite.config import ModelConfig
from vllm_lite.layers.attention import Attention
from vllm_lite.layers.context import ForwardContext, LayerOptions
from vllm_lite.layers.embedding import PositionEmbedding
from vllm_lite.layers.linear import Linear
from vllm_lite.models.causal_lm import Activations
from vllm_lite.models.layer_norm_decoder import DecoderLayer, LayerNames, LayerNormDecoder

NAMES = LayerNames(
    attention_norm="ln_1",
    qkv="attn.c_attn",
    output="attn.c_proj",
    mlp_norm="ln_2",
    up="mlp.c_fc",
    down="mlp.c_proj",
)


class GPT2LMHeadModel(LayerNormDecoder):
    """The class is called what checkpoints call the architecture."""

    base_prefix = "transformer."
    embedding_name = "transformer.wte.weight"
    layers_name = "h"
    norm_name = "ln_f"

    def __init__(self, config: ModelConfig, options: LayerOptions, max_model_len: int) -> None:
        super().__init__(config, options, max_model_len)
        size = config.hidden_size
        self.positions = PositionEmbedding(options, config.max_position_embeddings, size)
        self.layers = []
        for layer in range(config.num_layers):
            scale = config.head_dim**-0.5 if config.scale_attention else 1.0
            attention = Attention(scale / (layer + 1) if config.scale_attention_by_layer else scale)
            qkv_proj = Linear(options, size, 3 * size, config.qkv_bias, is_transposed=True)
            self.layers.append(DecoderLayer(options, config, NAMES, qkv_proj, attention, is_transposed=True))

    def body_targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """All tensors of the checkpoint below `prefix` but the embedding's."""
        return {**self.positions.weight_targets(f"{prefix}wpe."), **super().body_targets(prefix)}

    def embed(self, context: ForwardContext, activations: Activations) -> None:
        """Fills `hidden` with the sum of token and position embedding."""
        super().embed(context, activations)
        self.positions(context, activations.hidden)
