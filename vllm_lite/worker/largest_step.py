"""The step that takes the most memory, to be computed before the KV cache is sized. Knows sizes, no request."""

from __future__ import annotations

import numpy as np

from vllm_lite.engine.step import NO_INTS, Int32Array, SamplingInput, StepInput, StepShape


def largest_step(*, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int) -> StepInput:
    """All tokens and all sequences: decodes, and a chunk with the tokens that are left; every row is sampled.

    It is for any cache of at least one block, since it has the launches of the longest contexts but reads and writes
    none.
    """
    num_seqs = min(max_num_seqs, max_num_batched_tokens)
    num_decodes = num_seqs if num_seqs == max_num_batched_tokens else num_seqs - 1
    query_starts = np.arange(num_seqs + 1, dtype=np.int32)
    query_starts[-1] = max_num_batched_tokens
    return StepInput(
        shape=StepShape(
            num_tokens=max_num_batched_tokens,
            num_seqs=num_seqs,
            num_decodes=num_decodes,
            max_query_len=max_num_batched_tokens - num_seqs + 1,
            max_context_len=max_model_len,
            num_rows=num_seqs,
        ),
        token_ids=np.zeros(max_num_batched_tokens, np.int32),
        positions=np.zeros(max_num_batched_tokens, np.int32),
        slot_mapping=np.full(max_num_batched_tokens, -1, np.int32),
        query_starts=query_starts,
        context_lens=np.zeros(num_seqs, np.int32),
        block_tables=np.zeros((num_seqs, 1), np.int32),
        copy_sources=np.zeros(0, np.int32),
        copy_destinations=np.zeros(0, np.int32),
        sampling=_most_expensive_sampling(query_starts[1:] - 1),
    )


def _most_expensive_sampling(token_indices: Int32Array) -> SamplingInput:
    """Greedy rows and rows with top_k and top_p in turn: each kind is copied out of the logits, and so are beams."""
    num_rows = len(token_indices)
    is_greedy = np.arange(num_rows) % 2 == 0
    zeros = np.zeros(num_rows, np.float32)
    return SamplingInput(
        token_indices=token_indices,
        temperatures=np.where(is_greedy, 0, 1).astype(np.float32),
        top_ks=np.where(is_greedy, 0, 50).astype(np.int32),
        top_ps=np.where(is_greedy, 1, 0.9).astype(np.float32),
        min_ps=zeros,
        presence_penalties=zeros,
        frequency_penalties=zeros,
        repetition_penalties=zeros + 1,
        seeds=np.arange(num_rows, dtype=np.uint64),
        positions=np.zeros(num_rows, np.int32),
        history_ids=NO_INTS,
        history_starts=np.zeros(num_rows + 1, np.int32),
        history_prompt_lens=np.zeros(num_rows, np.int32),
        logprob_rows=np.arange(num_rows, dtype=np.int32),
        num_logprobs=np.full(num_rows, 1, np.int32),
        beam_rows=np.arange(num_rows, dtype=np.int32),
        num_continuations=np.full(num_rows, 2 * num_rows, np.int32),
    )
