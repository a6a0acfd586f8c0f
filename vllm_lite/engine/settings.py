"""What the control plane needs to know, as plain values. Knows neither the command line nor the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineSettings:
    """Sizes and limits of one engine, fixed for its life. Lengths are in tokens, `block_size` is tokens a block."""

    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_logprobs: int
    enable_prefix_caching: bool
    vocab_size: int
    """Rows of the model's embedding: every id below it can be computed and can be sampled."""
    eos_token_ids: frozenset[int]
    seed: int | None
    """Seeds the requests that bring no seed; None takes randomness from the operating system."""

    def max_sequence_len(self, num_sequences: int) -> int:
        """The most tokens, prompt and output together, of each sequence of a group: the context, or the whole cache.

        A group whose sequences share nothing still fits then, so that it can always be computed again.
        """
        return min(self.max_model_len, self.num_blocks // num_sequences * self.block_size)
