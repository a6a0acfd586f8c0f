"""A request's parameters turned into the ids and numbers that each step needs. Knows the limits, not the scheduler.

This happens once, when the request comes in: what can never work is refused here, with a `RequestError`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_lite.engine.bad_words import BadWords
from vllm_lite.engine.beam_search import num_continuations_of_beam
from vllm_lite.engine.settings import EngineSettings
from vllm_lite.engine.tokenizer_protocol import Tokenizer
from vllm_lite.errors import RequestError
from vllm_lite.sampling_params import SamplingParams

UINT64_RANGE = 2**64
FLOAT32_MAX = 3.4e38


@dataclass(frozen=True)
class GenerationRules:
    """How one request picks its tokens and when it ends, in ids of the model."""

    sampling_row: tuple[float, ...]
    """temperature (0 is greedy), top_p, min_p, presence, frequency and repetition penalty."""
    top_k: int
    needs_history: bool
    bias_ids: array[int]
    bias_values: array[float]
    allowed_ids: array[int] | None
    banned_ids: array[int]
    """Never picked: the bad words of a single token."""
    banned_until_min_tokens_ids: array[int]
    """`banned_ids`, and everything that would end the sequence too early."""
    bad_words: BadWords
    """Those of two tokens or more: their last id is banned after the others."""
    eos_ids: frozenset[int]
    """End the sequence: empty where the request ignores them."""
    stop_ids: frozenset[int]
    min_tokens: int
    max_sequence_len: int
    """Prompt and output together, in tokens."""
    num_logprobs: int | None
    """How many of the best tokens are wanted beside each picked one; None where not even its own logprob is."""
    shows_logprobs: bool
    """Whether the caller gets to see them."""
    num_continuations: int
    """How many next tokens of each beam a beam search looks at; 0 for sampling."""

    def currently_banned_ids(self, token_ids: Sequence[int], num_output_tokens: int) -> array[int]:
        """The ids that may not follow `token_ids`, of which the last `num_output_tokens` are output."""
        banned = self.banned_until_min_tokens_ids if num_output_tokens < self.min_tokens else self.banned_ids
        completing = self.bad_words.completed_by(token_ids, num_output_tokens)
        return banned + array("i", completing) if completing else banned


def check_unicode(name: str, text: str) -> None:
    """Refuses half a surrogate pair, which JSON can spell and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} must be valid Unicode, got half a surrogate pair at {error.start}.", name
        ) from error


def make_rules(
    params: SamplingParams, num_prompt_tokens: int, settings: EngineSettings, tokenizer: Tokenizer
) -> GenerationRules:
    """Raises RequestError where no token could ever be picked, or a bad word is nothing."""
    bad_words = _bad_word_ids(params, settings.vocab_size, tokenizer)
    banned = {word[0] for word in bad_words if len(word) == 1}
    ends = {token_id for token_id in settings.eos_token_ids if 0 <= token_id < settings.vocab_size} | params.stop_ids
    banned_early = banned | ends if params.min_tokens > 0 else banned
    _check_something_is_left(params, banned_early, settings.vocab_size)
    bias = params.logit_bias or {}
    eos_ids = frozenset() if params.ignore_eos else settings.eos_token_ids
    return GenerationRules(
        sampling_row=_sampling_row(params),
        top_k=0 if params.is_greedy else params.effective_top_k,
        needs_history=params.needs_history,
        bias_ids=array("i", bias.keys()),
        bias_values=array("f", bias.values()),
        allowed_ids=None if params.allowed_token_ids is None else array("i", sorted(set(params.allowed_token_ids))),
        banned_ids=array("i", sorted(banned)),
        banned_until_min_tokens_ids=array("i", sorted(banned_early)),
        bad_words=BadWords(word for word in bad_words if len(word) > 1),
        eos_ids=eos_ids,
        stop_ids=params.stop_ids,
        min_tokens=params.min_tokens,
        max_sequence_len=max_sequence_len(params, num_prompt_tokens, settings),
        num_logprobs=_num_logprobs(params),
        shows_logprobs=params.logprobs is not None,
        num_continuations=num_continuations_of_beam(params.num_candidates, len(eos_ids | params.stop_ids))
        if params.use_beam_search
        else 0,
    )


def max_sequence_len(params: SamplingParams, num_prompt_tokens: int, settings: EngineSettings) -> int:
    """Prompt and output together, in tokens: what alone of the rules depends on the prompt."""
    most = settings.max_sequence_len(params.num_candidates)
    return most if params.max_tokens is None else min(most, num_prompt_tokens + params.max_tokens)


def candidate_seed(seed: int, index: int) -> int:
    """The seed of a request's candidate as a uint64. Candidate 0 has the request's own; SplitMix64 makes the others."""
    seed %= UINT64_RANGE
    if index == 0:
        return seed
    mixed = (seed + index * 0x9E3779B97F4A7C15) % UINT64_RANGE
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) % UINT64_RANGE
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % UINT64_RANGE
    return mixed ^ (mixed >> 31)


def _num_logprobs(params: SamplingParams) -> int | None:
    """Candidates are ordered by the logprobs of their tokens, so these are needed where there are several."""
    if params.logprobs is None and params.num_candidates > 1 and not params.use_beam_search:
        return 0
    return params.logprobs


def _sampling_row(params: SamplingParams) -> tuple[float, ...]:
    penalties = (params.presence_penalty, params.frequency_penalty, min(params.repetition_penalty, FLOAT32_MAX))
    if params.is_greedy:
        return (0.0, 1.0, 0.0, *penalties)
    return (min(params.temperature, FLOAT32_MAX), params.top_p, params.min_p, *penalties)


def _bad_word_ids(params: SamplingParams, vocab_size: int, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Each bad word as it is tokenised at the start of a text and after a space, but those the model cannot write."""
    words: set[tuple[int, ...]] = set()
    for text in params.bad_words or ():
        check_unicode("bad_words", text)
        word = text.lstrip() or text
        for variant in (word, " " + word):
            ids = tuple(tokenizer.encode_plain(variant))
            if not ids:
                raise RequestError(f"bad_words must hold words of at least one token, got {text!r}.", "bad_words")
            if max(ids) < vocab_size:
                words.add(ids)
    return sorted(words)


def _check_something_is_left(params: SamplingParams, banned: set[int], vocab_size: int) -> None:
    if params.allowed_token_ids is None:
        is_anything_left = len(banned) < vocab_size
    else:
        is_anything_left = not banned.issuperset(params.allowed_token_ids)
    if not is_anything_left:
        field = "bad_words" if params.allowed_token_ids is None else "allowed_token_ids"
        raise RequestError(
            f"{field} leaves no token to pick: every allowed id is a bad word, or ends the text before min_tokens, "
            f"which is {params.min_tokens}.",
            field,
        )
