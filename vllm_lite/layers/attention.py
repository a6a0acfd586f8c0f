"""Causal self-attention over the paged cache, between the projections."""

from __future__ import annotations

import torch

from vllm_lite.layers.context import ForwardContext, LayerCache
from vllm_lite.ops.attention import attend
from vllm_lite.ops.kv_cache import write


class Attention:
    """Writes the new keys and values into the cache, then lets each query attend to its sequence."""

    def __init__(
        self,
        scale: float,
        window: int | None = None,
        alibi_slopes: torch.Tensor | None = None,
        soft_cap: float | None = None,
    ) -> None:
        self.scale = scale
        self.window = window
        self.alibi_slopes = alibi_slopes
        self.soft_cap = soft_cap

    def __call__(
        self,
        context: ForwardContext,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        out: torch.Tensor,
    ) -> None:
        """query and out [max_tokens, num_heads, head_dim]; key and value [max_tokens, num_kv_heads, head_dim]."""
        tensors = context.tensors
        write(context.workspace, context.shape, key, value, tensors.slot_mapping, cache.key, cache.value)
        attend(
            context.workspace,
            context.shape,
            query,
            cache.key,
            cache.value,
            tensors.query_starts,
            tensors.context_lens,
            tensors.block_tables,
            self.scale,
            self.window,
            self.alibi_slopes,
            self.soft_cap,
            out,
        )
