"""What `"details": true` adds to an answer: the keys beside `text`. Knows neither HTTP nor the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_lite.outputs import CompletionOutput, RequestOutput


def candidate_details(outputs: Sequence[CompletionOutput]) -> dict[str, list[Any]]:
    """Lists with one entry for each candidate, in the order of `text`."""
    return {
        "finish_reason": [output.finish_reason for output in outputs],
        "stop_reason": [output.stop_reason for output in outputs],
        "token_ids": [list(output.token_ids) for output in outputs],
        "logprobs": [output.logprobs for output in outputs],
        "cumulative_logprob": [output.cumulative_logprob for output in outputs],
    }


def prompt_details(output: RequestOutput) -> dict[str, Any]:
    """What is known of the prompt."""
    return {
        "prompt_token_ids": list(output.prompt_token_ids),
        "prompt_logprobs": output.prompt_logprobs,
        "num_prompt_tokens": len(output.prompt_token_ids),
    }


def all_details(output: RequestOutput) -> dict[str, Any]:
    """Of a request as far as it has come."""
    num_tokens = sum(len(candidate.token_ids) for candidate in output.outputs)
    return {**candidate_details(output.outputs), **prompt_details(output), "num_generated_tokens": num_tokens}
