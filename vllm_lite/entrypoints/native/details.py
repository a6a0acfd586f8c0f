"""What `"details": true` adds to an answer: the keys beside `text`. Knows neither HTTP nor the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_lite.outputs import CompletionDelta, RequestDelta

CANDIDATE_KEYS = ("finish_reason", "stop_reason", "token_ids", "logprobs", "cumulative_logprob")
"""Lists with one entry for each candidate, in the order of `text`."""


def candidate_details(deltas: Sequence[CompletionDelta]) -> dict[str, list[Any]]:
    """Of what is new of each candidate."""
    return {key: [getattr(delta, key) for delta in deltas] for key in CANDIDATE_KEYS}


def prompt_details(prompt_token_ids: Sequence[int], first: RequestDelta) -> dict[str, Any]:
    """What is known of the prompt, with the first delta of its request."""
    return {
        "prompt_token_ids": list(prompt_token_ids),
        "prompt_logprobs": first.prompt_logprobs,
        "num_prompt_tokens": len(prompt_token_ids),
    }
