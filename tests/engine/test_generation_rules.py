"""What a request's parameters mean in ids, and what is refused at the door."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from tests.helpers.byte_tokenizer import ByteTokenizer
from tests.helpers.engine_fakes import EOS, SETTINGS, STOP, VOCAB_SIZE
from vllm_lite.engine.generation_rules import GenerationRules, candidate_seed, make_rules
from vllm_lite.engine.llm_engine import LLMEngine
from vllm_lite.engine.settings import EngineSettings
from vllm_lite.errors import RequestError
from vllm_lite.sampling_params import SamplingParams


class WordTokenizer(ByteTokenizer):
    """Knows some words and writes a word after a space otherwise, as byte-level BPE does."""

    WORDS: ClassVar[dict[str, list[int]]] = {
        "bad": [40],
        " bad": [41],
        "worse": [42, 43],
        " worse": [44],
        "huge": [999],
        " huge": [43, 999],
    }

    def encode_plain(self, text: str) -> list[int]:
        return self.WORDS[text] if text in self.WORDS else super().encode_plain(text)


def rules(params: SamplingParams, settings: EngineSettings = SETTINGS) -> GenerationRules:
    return make_rules(params, 10, settings, WordTokenizer())


def banned_after(rule: GenerationRules, output: list[int]) -> list[int]:
    return sorted(rule.currently_banned_ids([42] * 10 + output, len(output)))


def test_bad_words_are_banned_at_the_start_of_a_text_and_after_a_space() -> None:
    rule = rules(SamplingParams(bad_words=["bad", " worse"]))
    assert banned_after(rule, []) == [40, 41, 44]
    assert banned_after(rule, [50, 42]) == [40, 41, 43, 44]
    assert banned_after(rule, [42, 50]) == [40, 41, 44]


def test_a_bad_word_that_began_in_the_prompt_is_not_banned() -> None:
    rule = rules(SamplingParams(bad_words=["xyz"]))
    x, y, z = ByteTokenizer().encode_plain("xyz")
    assert list(rule.currently_banned_ids([x, y], 1)) == []
    assert list(rule.currently_banned_ids([x, y], 2)) == [z]


def test_bad_words_beyond_the_model_are_dropped() -> None:
    assert banned_after(rules(SamplingParams(bad_words=["huge"])), [43]) == []


def test_a_bad_word_of_blanks_is_banned_as_it_is() -> None:
    (space,) = ByteTokenizer().encode_plain(" ")
    assert banned_after(rules(SamplingParams(bad_words=[" "])), []) == [space]


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(RequestError, match="bad_words must be valid Unicode"):
        rules(SamplingParams(bad_words=["a\ud800"]))


def test_a_bad_word_without_a_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WordTokenizer.WORDS, "nothing", [])
    with pytest.raises(RequestError, match="bad_words must hold words of at least one token, got 'nothing'"):
        rules(SamplingParams(bad_words=["nothing"]))


def test_ends_are_banned_until_min_tokens() -> None:
    settings = replace(SETTINGS, eos_token_ids=frozenset({EOS, 7, VOCAB_SIZE + 5}))
    rule = rules(SamplingParams(min_tokens=2, stop_token_ids=[STOP]), settings)
    assert banned_after(rule, [50]) == [EOS, STOP, 7]
    assert banned_after(rule, [50, 50]) == []


def test_ends_outside_of_the_vocabulary_are_never_banned() -> None:
    settings = replace(SETTINGS, eos_token_ids=frozenset({EOS, -1, VOCAB_SIZE, 10**30}))
    assert set(rules(SamplingParams(min_tokens=2), settings).banned_until_min_tokens_ids) == {EOS}


def test_ignored_ends_still_do_not_come_before_min_tokens() -> None:
    rule = rules(SamplingParams(min_tokens=1, ignore_eos=True))
    assert (banned_after(rule, []), rule.eos_ids) == ([EOS], frozenset())


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(allowed_token_ids=[EOS, STOP], min_tokens=1, stop_token_ids=[STOP]), "allowed_token_ids"),
        (SamplingParams(allowed_token_ids=[40, 41, 40], bad_words=["bad"]), "allowed_token_ids"),
    ],
)
def test_a_request_that_can_never_pick_a_token_is_refused(params: SamplingParams, field: str) -> None:
    with pytest.raises(RequestError, match=f"{field} leaves no token to pick"):
        rules(params)


def test_a_vocabulary_of_bad_words_is_refused() -> None:
    every_id = [chr(i) for i in range(128)]
    tiny = replace(SETTINGS, vocab_size=96)
    with pytest.raises(RequestError, match="bad_words leaves no token to pick"):
        rules(SamplingParams(bad_words=every_id, min_tokens=1, stop_token_ids=[STOP]), tiny)


def test_greedy_resets_what_only_sampling_reads() -> None:
    params = SamplingParams(temperature=1e-6, top_p=0.5, top_k=3, min_p=0.2, presence_penalty=0.5)
    assert (rules(params).sampling_row, rules(params).top_k) == ((0.0, 1.0, 0.0, 0.5, 0.0, 1.0), 0)


def test_sampling_keeps_every_number() -> None:
    params = SamplingParams(
        temperature=0.7, top_p=0.5, top_k=3, min_p=0.2, frequency_penalty=-1, repetition_penalty=1.5, logit_bias={5: -2}
    )
    rule = rules(params)
    assert (rule.sampling_row, rule.top_k, rule.needs_history) == ((0.7, 0.5, 0.2, 0.0, -1, 1.5), 3, True)
    assert (rule.bias_ids.tolist(), rule.bias_values.tolist(), rule.allowed_ids) == ([5], [-2.0], None)


def test_numbers_beyond_float32_are_its_largest() -> None:
    row = rules(SamplingParams(temperature=1e300, repetition_penalty=1e300)).sampling_row
    assert np.isfinite(np.array(row, np.float32)).all()  # a warning of numpy is an error here


def test_the_allowed_ids_are_sorted_and_single() -> None:
    allowed = rules(SamplingParams(allowed_token_ids=[9, 3, 9])).allowed_ids
    assert allowed is not None and allowed.tolist() == [3, 9]


@pytest.mark.parametrize(
    ("max_tokens", "changes", "expected"),
    [
        (16, {}, 26),
        (None, {}, 512),
        (10**9, {}, 512),
        (None, {"num_blocks": 3}, 24),
        (5, {"num_blocks": 3}, 15),
    ],
)
def test_the_longest_sequence_is_the_least_of_all_limits(
    max_tokens: int | None, changes: dict[str, int], expected: int
) -> None:
    params = SamplingParams(max_tokens=max_tokens)
    assert rules(params, replace(SETTINGS, **changes)).max_sequence_len == expected  # type: ignore[arg-type]


def test_a_group_has_room_for_each_of_its_sequences() -> None:
    assert replace(SETTINGS, num_blocks=11).max_sequence_len(3) == 24


def test_candidates_have_seeds_of_their_own() -> None:
    assert candidate_seed(42, 0) == 42 and candidate_seed(-1, 0) == 2**64 - 1
    seeds = {candidate_seed(seed, index) for seed in (0, 1, 42, -1) for index in range(100)}
    assert len(seeds) == 400 and all(0 <= seed < 2**64 for seed in seeds)


def test_prompts_with_the_same_parameters_share_what_their_lists_cost() -> None:
    tokenised: list[str] = []

    class Tokenizer(WordTokenizer):
        def encode_plain(self, text: str) -> list[int]:
            tokenised.append(text)
            return super().encode_plain(text)

    engine = LLMEngine(SETTINGS, Tokenizer())
    params = SamplingParams(bad_words=["bad", "xyz"], allowed_token_ids=[40, 41, 42], max_tokens=5)
    prepared = [engine.prepare(str(length), None, [42] * length, params) for length in (3, 4, 2)]
    first, *others = (request.sequences[0].rules for request in prepared)
    assert sorted(tokenised) == [" bad", " xyz", "bad", "xyz"]
    assert all(rule.bad_words is first.bad_words and rule.allowed_ids is first.allowed_ids for rule in others)
    assert [rule.max_sequence_len for rule in (first, *others)] == [8, 9, 7]

    engine.prepare("other", None, [42], SamplingParams(bad_words=["huge"]))
    again = engine.prepare("again", None, [42], params).sequences[0].rules
    assert again.bad_words.completed_by([42], 1) == first.bad_words.completed_by([42], 1)
    assert len(tokenised) == 4 + 2 + 4
