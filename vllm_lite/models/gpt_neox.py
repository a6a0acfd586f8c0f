"""GPT-NeoX and Pythia: rotary positions on part of each head; attention and MLP may read the same residual stream."""

from __future__ import annotations

from vllm_lite.config import ModelConfig
from vllm_lite.layers.attention import Attention
from vllm_lite.layers.context import ForwardContext, LayerCache, LayerOptions
from vllm_lite.layers.linear import HeadwiseQKVLinear
from vllm_lite.layers.rotary import RotaryEmbedding
from vllm_lite.models.causal_lm import Activations
from vllm_lite.models.layer_norm_decoder import DecoderLayer, LayerNames, LayerNormDecoder

NAMES = LayerNames(
    attention_norm="input_layernorm",
    qkv="attention.query_key_value",
    output="attention.dense",
    mlp_norm="post_attention_layernorm",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)


class ParallelResidualLayer(DecoderLayer):
    """A layer whose MLP reads what its attention reads, normalised on its own."""

    def __call__(self, context: ForwardContext, activations: Activations, cache: LayerCache) -> None:
        """Adds to `hidden`, once both norms have read it."""
        self.attention_norm(context, activations.hidden, activations.normed)
        self.attend(context, activations.normed, activations, cache)
        self.mlp_norm(context, activations.hidden, activations.normed)
        self.end_attention(context, activations)
        self.feed_forward(context, activations.normed, activations)


class GPTNeoXForCausalLM(LayerNormDecoder):
    """The model with its parameters, uninitialised until the weight targets are filled."""

    base_prefix = "gpt_neox."
    embedding_name = "gpt_neox.embed_in.weight"
    head_name = "embed_out.weight"
    layers_name = "layers"
    norm_name = "final_layer_norm"

    def __init__(self, config: ModelConfig, options: LayerOptions, max_model_len: int) -> None:
        super().__init__(config, options, max_model_len)
        rotary = RotaryEmbedding(config.rope, config.head_dim, max_model_len, options.device)
        attention = Attention(config.head_dim**-0.5)
        layer_class = ParallelResidualLayer if config.has_parallel_residual else DecoderLayer
        self.layers = []
        for _ in range(config.num_layers):
            qkv_proj = HeadwiseQKVLinear(
                options, config.hidden_size, config.num_heads, config.head_dim, config.qkv_bias
            )
            self.layers.append(layer_class(options, config, NAMES, qkv_proj, attention, rotary))
