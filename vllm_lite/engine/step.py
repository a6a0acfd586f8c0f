"""One step of the engine as flat numpy arrays: the only thing that crosses to the data plane, and to other ranks.

`StepInput` says what to compute, `StepOutput` what came out. Both are immutable by contract: who builds an array hands
it over and never writes to it again. Nothing here knows a request, a tokenizer or torch.

S sequences take part in a step, T tokens are computed (a decode brings one, a prompt chunk several) and R of the
sequences have a token sampled (a chunk that does not reach the end of its prompt has none). Sequences that bring
exactly one token come first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int32Array: TypeAlias = npt.NDArray[np.int32]
UInt64Array: TypeAlias = npt.NDArray[np.uint64]
Float32Array: TypeAlias = npt.NDArray[np.float32]

NO_TOKEN = -1
"""`StepOutput.token_ids` holds this where a row had no finite logit to choose from: that request fails, no other."""


@dataclass(frozen=True)
class StepShape:
    """The sizes of a step as Python ints: what an op slices its tensors of maximal size by.

    `num_decodes` sequences bring one token each and come first; `max_query_len` is the most tokens that any sequence
    brings and `max_context_len` the longest context (cached and new tokens together).
    """

    num_tokens: int
    num_seqs: int
    num_decodes: int
    max_query_len: int
    max_context_len: int


@dataclass(frozen=True)
class SamplingInput:
    """How each of the R sampled rows picks its token. Arrays of length R unless a shape is given.

    `history_*` serve the penalties: row r has seen `history_ids[history_starts[r]:history_starts[r + 1]]`, of which the
    first `history_prompt_lens[r]` are its prompt; rows without a penalty have an empty history. `bias_*` add to single
    logits, `banned_*` take single tokens out; both are lists of (row, id) pairs of any length. `allowed_*` restrict
    rows: row `allowed_rows[i]` may only pick from `allowed_ids[allowed_starts[i]:allowed_starts[i + 1]]`.
    """

    token_indices: Int32Array
    """Where in the T tokens the row's logits are computed."""
    temperatures: Float32Array
    """0 is greedy."""
    top_ks: Int32Array
    """0 is off."""
    top_ps: Float32Array
    """1 is off."""
    min_ps: Float32Array
    """0 is off."""
    presence_penalties: Float32Array
    frequency_penalties: Float32Array
    repetition_penalties: Float32Array
    seeds: UInt64Array
    positions: Int32Array
    """How many output tokens the sequence has: with the seed, it names the random number that the row uses."""
    history_ids: Int32Array
    history_starts: Int32Array
    """[R + 1]"""
    history_prompt_lens: Int32Array
    bias_rows: Int32Array
    bias_ids: Int32Array
    bias_values: Float32Array
    banned_rows: Int32Array
    banned_ids: Int32Array
    allowed_rows: Int32Array
    allowed_starts: Int32Array
    """[len(allowed_rows) + 1]"""
    allowed_ids: Int32Array

    @property
    def num_rows(self) -> int:
        """R, how many tokens are sampled."""
        return len(self.token_indices)


@dataclass(frozen=True)
class StepInput:
    """What one step computes.

    A slot is `block_id * block_size + offset`. The copies of blocks (copy-on-write) come before anything is written.
    """

    shape: StepShape
    token_ids: Int32Array
    """[T]"""
    positions: Int32Array
    """[T], in tokens from the start of each sequence."""
    slot_mapping: Int32Array
    """[T], where each token's key and value go."""
    query_starts: Int32Array
    """[S + 1], sequence s brings tokens `query_starts[s]:query_starts[s + 1]`."""
    context_lens: Int32Array
    """[S], tokens in the cache once this step has written its own."""
    block_tables: Int32Array
    """[S, max blocks of any sequence in the step], padded with 0."""
    copy_sources: Int32Array
    """[C], block ids."""
    copy_destinations: Int32Array
    """[C], block ids."""
    sampling: SamplingInput


@dataclass(frozen=True)
class StepOutput:
    """The tokens of the R sampled rows, in the order of `SamplingInput`."""

    token_ids: Int32Array
