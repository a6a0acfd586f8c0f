"""The arguments of `LLM.generate`, whichever way they were given, as one value for each prompt. Knows no engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_lite.errors import RequestError
from vllm_lite.sampling_params import SamplingParams


@dataclass(frozen=True)
class OfflinePrompt:
    """One prompt of a call."""

    name: str
    """As the caller knows it, for errors: `prompts[3]`."""
    text: str | None
    token_ids: list[int] | None
    params: SamplingParams


def check_prompts(
    texts: str | Sequence[str] | None,
    params: SamplingParams | Sequence[SamplingParams] | None,
    token_ids: Sequence[Sequence[int]] | None,
) -> list[OfflinePrompt]:
    """One for each prompt of a call; what only the engine can tell is not checked yet. Raises RequestError."""
    if isinstance(texts, str):
        texts = [texts]
    if texts is None and token_ids is None:
        raise RequestError("prompts or prompt_token_ids must be given, got neither.")
    for name, values in (("prompts", texts), ("prompt_token_ids", token_ids)):
        if values is not None and not isinstance(values, (list, tuple)):
            raise RequestError(f"{name} must be a list, got {type(values).__name__}.")
    for index, text in enumerate(texts or ()):
        if not isinstance(text, str):
            raise RequestError(f"prompts[{index}] must be a string, got {type(text).__name__}.")
    for index, ids in enumerate(token_ids or ()):
        if not isinstance(ids, (list, tuple)) or not all(type(token_id) is int for token_id in ids):
            raise RequestError(f"prompt_token_ids[{index}] must be a list of integers, got {ids!r:.100}.")
    name = "prompts" if token_ids is None else "prompt_token_ids"
    count = len(texts or ()) if token_ids is None else len(token_ids)
    if texts is not None and len(texts) != count:
        raise RequestError(f"prompt_token_ids must have one list for each of {len(texts)} prompts, got {count}.")
    return [
        OfflinePrompt(
            name=f"{name}[{index}]",
            text=None if texts is None else texts[index],
            token_ids=None if token_ids is None else list(token_ids[index]),
            params=one,
        )
        for index, one in enumerate(_checked_params(params, count))
    ]


def _checked_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, (list, tuple)):
        raise RequestError(f"sampling_params must be SamplingParams or a list of them, got {type(params).__name__}.")
    if len(params) != count:
        raise RequestError(f"sampling_params must have one entry for each of {count} prompts, got {len(params)}.")
    for index, one in enumerate(params):
        if not isinstance(one, SamplingParams):
            raise RequestError(f"sampling_params[{index}] must be SamplingParams, got {type(one).__name__}.")
    return params
