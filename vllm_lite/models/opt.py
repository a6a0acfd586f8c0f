"""OPT: learnt positions that begin at row 2; in some sizes norms after each branch, or a smaller embedding."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_lite.config import ModelConfig
from vllm_lite.layers.attention import Attention
from vllm_lite.layers.context import ForwardContext, LayerCache, LayerOptions
from vllm_lite.layers.embedding import PositionEmbedding
from vllm_lite.layers.linear import FusedLinear, Linear
from vllm_lite.models.causal_lm import Activations
from vllm_lite.models.layer_norm_decoder import DecoderLayer, LayerNames, LayerNormDecoder

POSITION_OFFSET = 2
NAMES = LayerNames(
    attention_norm="self_attn_layer_norm",
    qkv="self_attn",
    output="self_attn.out_proj",
    mlp_norm="final_layer_norm",
    up="fc1",
    down="fc2",
)


class PostNormLayer(DecoderLayer):
    """A layer that normalises the residual stream after each branch."""

    def __call__(self, context: ForwardContext, activations: Activations, cache: LayerCache) -> None:
        """Changes `hidden`."""
        hidden = activations.hidden
        self.attend(context, hidden, activations, cache)
        self.end_attention(context, activations)
        self.attention_norm(context, hidden, hidden)
        self.feed_forward(context, hidden, activations)
        self.mlp_norm(context, hidden, hidden)


class OPTForCausalLM(LayerNormDecoder):
    """The model with its parameters, uninitialised until the weight targets are filled."""

    base_prefix = "model."
    embedding_name = "model.decoder.embed_tokens.weight"
    layers_name = "decoder.layers"
    norm_name = "decoder.final_layer_norm"

    def __init__(self, config: ModelConfig, options: LayerOptions, max_model_len: int) -> None:
        super().__init__(config, options, max_model_len)
        size = config.hidden_size
        self.positions = PositionEmbedding(options, config.max_position_embeddings, size, POSITION_OFFSET)
        self.project_in = self.project_out = None
        if config.embedding_size != size:
            self.project_in = Linear(options, config.embedding_size, size)
            self.project_out = Linear(options, size, config.embedding_size)
        attention = Attention(config.head_dim**-0.5)
        layer_class = DecoderLayer if config.norm_is_first else PostNormLayer
        self.layers = []
        for _ in range(config.num_layers):
            qkv_proj = FusedLinear(options, size, dict.fromkeys(("q_proj", "k_proj", "v_proj"), size), config.qkv_bias)
            self.layers.append(layer_class(options, config, NAMES, qkv_proj, attention))

    def body_targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """All tensors of the checkpoint below `prefix` but the embedding's."""
        targets = {**self.positions.weight_targets(f"{prefix}decoder.embed_positions."), **super().body_targets(prefix)}
        if self.project_in is not None and self.project_out is not None:
            targets |= self.project_in.weight_targets(f"{prefix}decoder.project_in.")
            targets |= self.project_out.weight_targets(f"{prefix}decoder.project_out.")
        return targets

    def embed(self, context: ForwardContext, activations: Activations) -> None:
        """Fills `hidden` with token and position embedding."""
        self.embed_tokens(context, activations.embedded)
        if self.project_in is not None:
            self.project_in(context, activations.embedded, activations.hidden)
        self.positions(context, activations.hidden)

    def forward(self, context: ForwardContext, activations: Activations, caches: Sequence[LayerCache]) -> None:
        """As every model's; the result is as large as the embedding again."""
        super().forward(context, activations, caches)
        if self.project_out is not None:
            self.project_out(context, super().head_input(activations), activations.embedded)

    def head_input(self, activations: Activations) -> torch.Tensor:
        """[max_tokens, embedding_size]"""
        return super().head_input(activations) if self.project_out is None else activations.embedded
