"""Embeddings of token ids and of positions, and the head that gives logits or the greedy token."""

from __future__ import annotations

import torch

from vllm_lite.layers.context import ForwardContext, LayerOptions
from vllm_lite.ops.embedding import embedding
from vllm_lite.ops.greedy_head import greedy_head
from vllm_lite.ops.logits import logits
from vllm_lite.ops.position_embedding import position_embedding


class Embedding:
    """A row for each token id."""

    def __init__(self, options: LayerOptions, vocab_size: int, size: int) -> None:
        self.weight = options.matrix(vocab_size, size)

    def weight_targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """`<prefix>weight`."""
        return {f"{prefix}weight": self.weight}

    def __call__(self, context: ForwardContext, out: torch.Tensor) -> None:
        """out [max_tokens, size]."""
        embedding(context.workspace, context.shape, context.tensors.token_ids, self.weight, out)


class PositionEmbedding:
    """A learnt row for each position, added to what is there; the first `offset` rows of the table belong to none."""

    def __init__(self, options: LayerOptions, num_positions: int, size: int, offset: int = 0) -> None:
        self.weight = torch.empty(num_positions + offset, size, dtype=options.dtype, device=options.device)
        self._offset = offset

    def weight_targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """`<prefix>weight`."""
        return {f"{prefix}weight": self.weight}

    def __call__(self, context: ForwardContext, hidden: torch.Tensor) -> None:
        """hidden [max_tokens, size] is added to."""
        table = self.weight[self._offset :]
        position_embedding(context.workspace, context.shape, context.tensors.positions, table, hidden)


class LMHead:
    """Scores of the whole vocabulary for the sampled rows; shares the embedding's weight where that is tied."""

    def __init__(self, options: LayerOptions, vocab_size: int, size: int, tied_to: Embedding | None) -> None:
        self.is_tied = tied_to is not None
        self.weight = options.matrix(vocab_size, size) if tied_to is None else tied_to.weight

    def weight_targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """`<prefix>weight`, or nothing where the embedding's weight serves."""
        return {} if self.is_tied else {f"{prefix}weight": self.weight}

    def logits(self, context: ForwardContext, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """hidden [max_tokens, size]; out [max_seqs, vocab_size] float32."""
        logits(context.workspace, context.shape, hidden, context.tensors.token_indices, self.weight, out)

    def greedy(self, context: ForwardContext, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """hidden [max_tokens, size]; out [max_seqs] int32, the most likely ids or NO_TOKEN."""
        greedy_head(context.workspace, context.shape, hidden, context.tensors.token_indices, self.weight, out)
