"""What a runner and a loader need of a model, whatever its architecture."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_lite.config import ModelConfig
from vllm_lite.layers.context import ForwardContext, LayerCache, LayerOptions
from vllm_lite.layers.embedding import Embedding, LMHead


@dataclass(frozen=True)
class Activations:
    """What the layers write into, one set for all of them. Sizes are those of the largest step."""

    embedded: torch.Tensor
    """[max_tokens, embedding_size]; `hidden` itself where the two sizes are the same"""
    hidden: torch.Tensor
    """[max_tokens, hidden_size], the residual stream"""
    normed: torch.Tensor
    """[max_tokens, hidden_size]"""
    qkv: torch.Tensor
    """[max_tokens, num_heads + 2 * num_kv_heads, head_dim]"""
    attended: torch.Tensor
    """[max_tokens, num_heads, head_dim]"""
    inner: torch.Tensor
    """[max_tokens, intermediate_size], inside the MLP"""


class CausalLM(ABC):
    """A model with its parameters, uninitialised until the weight targets are filled."""

    base_prefix: ClassVar[str] = "model."
    """What begins the names of all tensors but the head's; a checkpoint of the model without a head lacks it."""
    embedding_name: ClassVar[str] = "model.embed_tokens.weight"
    head_name: ClassVar[str] = "lm_head.weight"
    hidden_acts: ClassVar[Sequence[str]]
    """The activations that it runs with, by Hugging Face's names."""

    def __init__(self, config: ModelConfig, options: LayerOptions, max_model_len: int) -> None:
        """`max_model_len`: how far tables of positions have to reach."""
        self.config, self.options, self.max_model_len = config, options, max_model_len
        self.embed_tokens = Embedding(options, config.vocab_size, config.embedding_size)
        tied_to = self.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = LMHead(options, config.vocab_size, config.embedding_size, tied_to)

    def weight_targets(self) -> dict[str, torch.Tensor]:
        """What each tensor of a Hugging Face checkpoint fills, by name.

        Views of the parameters, as `load_weights` takes them.
        """
        return {
            **self.embed_tokens.weight_targets(self.embedding_name.removesuffix("weight")),
            **self.body_targets(self.base_prefix),
            **self.lm_head.weight_targets(self.head_name.removesuffix("weight")),
        }

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor may stand in the checkpoint without use."""
        return name.endswith("rotary_emb.inv_freq") or (name == self.head_name and self.lm_head.is_tied)

    def new_activations(self, max_num_tokens: int) -> Activations:
        """Memory for steps of up to so many tokens."""
        config = self.config

        def empty(*sizes: int) -> torch.Tensor:
            return torch.empty(max_num_tokens, *sizes, dtype=self.options.dtype, device=self.options.device)

        hidden = empty(config.hidden_size)
        return Activations(
            embedded=hidden if config.embedding_size == config.hidden_size else empty(config.embedding_size),
            hidden=hidden,
            normed=empty(config.hidden_size),
            qkv=empty(config.num_heads + 2 * config.num_kv_heads, config.head_dim),
            attended=empty(config.num_heads, config.head_dim),
            inner=empty(config.intermediate_size),
        )

    def logits(self, context: ForwardContext, activations: Activations, out: torch.Tensor) -> None:
        """After `forward`: out [max_seqs, vocab_size] float32 takes the logits of the sampled rows."""
        self.lm_head.logits(context, self.head_input(activations), out)

    def greedy(self, context: ForwardContext, activations: Activations, out: torch.Tensor) -> None:
        """After `forward`: out [max_seqs] int32 takes the most likely ids of the sampled rows."""
        self.lm_head.greedy(context, self.head_input(activations), out)

    def head_input(self, activations: Activations) -> torch.Tensor:
        """[max_tokens, embedding_size], where `forward` leaves what the head reads."""
        return activations.normed

    @abstractmethod
    def body_targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """As `weight_targets`, of all that lies between embedding and head."""

    @abstractmethod
    def forward(self, context: ForwardContext, activations: Activations, caches: Sequence[LayerCache]) -> None:
        """Computes the step's tokens, fills the caches with their keys and values, leaves the head its input."""
