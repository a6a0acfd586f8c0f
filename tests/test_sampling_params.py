from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

import pytest

from vllm_lite import SamplingParams
from vllm_lite.errors import RequestError

REFUSED = [
    ({"n": 0}, "n must be at least 1, got 0."),
    ({"n": -3}, "n must be at least 1, got -3."),
    ({"n": True}, "n must be an integer, got True."),
    ({"n": 1.0}, "n must be an integer, got 1.0."),
    ({"n": float("inf")}, "n must be an integer, got inf."),
    ({"n": 3, "best_of": 2}, "best_of must be greater than or equal to n, got n=3 and best_of=2."),
    ({"presence_penalty": 2.1}, "presence_penalty must be in [-2, 2], got 2.1."),
    ({"frequency_penalty": -3}, "frequency_penalty must be in [-2, 2], got -3."),
    ({"repetition_penalty": 0}, "repetition_penalty must be greater than zero, got 0."),
    ({"temperature": -1}, "temperature must be non-negative, got -1."),
    ({"temperature": "hot"}, "temperature must be a finite number, got 'hot'."),
    ({"temperature": float("nan")}, "temperature must be a finite number, got nan."),
    ({"temperature": False}, "temperature must be a finite number, got False."),
    ({"temperature": 10**400}, "temperature must be a finite number, got 1"),
    ({"top_p": 0}, "top_p must be in (0, 1], got 0."),
    ({"top_p": 1.5}, "top_p must be in (0, 1], got 1.5."),
    ({"top_k": -2}, "top_k must be -1 or 0 (off), or at least 1, got -2."),
    ({"top_k": 2.0}, "top_k must be an integer, got 2.0."),
    ({"min_p": 1.1}, "min_p must be in [0, 1], got 1.1."),
    ({"use_beam_search": "yes"}, "use_beam_search must be true or false, got 'yes'."),
    ({"use_beam_search": True, "temperature": 0}, "best_of must be greater than 1 when using beam search, got 1."),
    ({"use_beam_search": True, "n": 2}, "temperature must be 0 when using beam search, got 1.0."),
    (
        {"use_beam_search": True, "n": 2, "temperature": 0, "top_p": 0.5},
        "top_p must be 1 when using beam search, got 0.5.",
    ),
    (
        {"use_beam_search": True, "n": 2, "temperature": 0, "top_k": 5},
        "top_k must be -1 when using beam search, got 5.",
    ),
    ({"early_stopping": True}, "early_stopping only works with beam search"),
    ({"early_stopping": "never"}, "early_stopping only works with beam search"),
    ({"early_stopping": 1}, 'early_stopping must be true, false or "never", got 1.'),
    ({"early_stopping": 1.0, "use_beam_search": True, "best_of": 2, "temperature": 0}, "early_stopping must be true"),
    ({"early_stopping": "x"}, "early_stopping must be true, false or \"never\", got 'x'."),
    ({"early_stopping": []}, 'early_stopping must be true, false or "never", got [].'),
    ({"length_penalty": 2}, "length_penalty only works with beam search"),
    ({"temperature": 0, "n": 2}, "best_of must be 1 when using greedy sampling (n and best_of alike), got 2."),
    ({"temperature": 0, "best_of": 2}, "best_of must be 1 when using greedy sampling (n and best_of alike), got 2."),
    ({"stop": ""}, "stop must be strings of 1 to 1024 characters, got ''."),
    ({"stop": ["a", ""]}, "stop must be strings of 1 to 1024 characters, got ''."),
    ({"stop": ["", 1]}, "stop must be a list of strings, got 1 in it."),
    ({"stop": 5}, "stop must be a list of strings, got 5."),
    ({"stop": {"a": 1}}, "stop must be a list of strings, got {'a': 1}."),
    ({"stop": ["x"] * 65}, "stop must have at most 64 entries, got 65."),
    ({"stop": "x" * 1025}, "stop must be strings of 1 to 1024 characters, got 'xxx"),
    ({"stop_token_ids": "12"}, "stop_token_ids must be a list of token ids, got '12'."),
    ({"stop_token_ids": [1, "2"]}, "stop_token_ids must be a list of token ids, got '2' in it."),
    ({"stop_token_ids": [True]}, "stop_token_ids must be a list of token ids, got True in it."),
    ({"stop_token_ids": list(range(1025))}, "stop_token_ids must have at most 1024 entries, got 1025."),
    ({"ignore_eos": 1}, "ignore_eos must be true or false, got 1."),
    ({"max_tokens": 0}, "max_tokens must be at least 1, got 0."),
    ({"max_tokens": -1}, "max_tokens must be at least 1, got -1."),
    ({"max_tokens": 1.5}, "max_tokens must be an integer, got 1.5."),
    ({"min_tokens": -1}, "min_tokens must be at least 0, got -1."),
    ({"min_tokens": 17}, "min_tokens must be at most max_tokens=16, got 17."),
    ({"logprobs": -1}, "logprobs must be at least 0, got -1."),
    ({"prompt_logprobs": 0.5}, "prompt_logprobs must be an integer, got 0.5."),
    ({"seed": 2**63}, "seed must be within int64, got 9223372036854775808."),
    ({"seed": "x"}, "seed must be an integer, got 'x'."),
    ({"logit_bias": [1]}, "logit_bias must be an object of token ids and numbers, got [1]."),
    ({"logit_bias": {"a": 1}}, "logit_bias must have token ids as keys, got 'a'."),
    ({"logit_bias": {"-1": 1}}, "logit_bias must have token ids as keys, got '-1'."),
    ({"logit_bias": {"٣": 1}}, "logit_bias must have token ids as keys, got '٣'."),
    ({"logit_bias": {"5": "x"}}, "logit_bias must have values in [-100, 100], got 'x'."),
    ({"logit_bias": {"5": 101}}, "logit_bias must have values in [-100, 100], got 101."),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias must have at most 1024 entries, got 1025."),
    ({"allowed_token_ids": []}, "allowed_token_ids must hold at least one id, got an empty list."),
    ({"allowed_token_ids": 7}, "allowed_token_ids must be a list of token ids, got 7."),
    ({"bad_words": [""]}, "bad_words must be strings of 1 to 1024 characters, got ''."),
    ({"bad_words": [3]}, "bad_words must be a list of strings, got 3 in it."),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be at least 1, got 0."),
    ({"do_sample": True}, "'do_sample' is not a known field."),
    ({"max_token": 3}, "'max_token' is not a known field; did you mean max_tokens?"),
    ({"x" * 5000: 3}, "'xxx"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[str(fields)[:60] for fields, _ in REFUSED])
def test_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams.from_request(fields)
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 900


ACCEPTED: list[dict[str, Any]] = [
    {"n": 4, "use_beam_search": True, "temperature": 0.0},
    {"n": 4, "use_beam_search": True, "temperature": 0, "early_stopping": "never", "length_penalty": 0},
    {"temperature": 0, "top_p": 0.1, "top_k": 5, "min_p": 0.5},
    {"temperature": 2, "top_k": 10**9, "repetition_penalty": 50},
    {"top_k": 0},
    {"max_tokens": None, "min_tokens": 99},
    {"max_tokens": 10**30},
    {"seed": -(2**63)},
    {"stop": "x"},
    {"stop": []},
    {"logit_bias": {"5": -100}},
    {"logprobs": 0},
    {"truncate_prompt_tokens": 5},
]


@pytest.mark.parametrize("fields", ACCEPTED, ids=str)
def test_accepted(fields: dict[str, Any]) -> None:
    SamplingParams.from_request(json.loads(json.dumps(fields)))


def test_a_large_value_of_a_wrong_type_is_refused_at_once() -> None:
    large_list = list(range(2_000_000))
    for value in ("x" * 10_000_000, large_list, [[large_list]], dict.fromkeys(large_list), 10**4000):
        start = time.process_time()
        with pytest.raises(RequestError) as caught:
            SamplingParams.from_request({"temperature": value})
        assert len(str(caught.value)) < 300
        assert time.process_time() - start < 0.05


def test_null_means_the_default_but_for_max_tokens() -> None:
    names = [f.name for f in dataclasses.fields(SamplingParams)]
    params = SamplingParams.from_request(dict.fromkeys(names))
    assert params.max_tokens is None
    assert dataclasses.replace(params, max_tokens=16) == SamplingParams()


def test_order_of_the_fields_is_that_of_0_2_7() -> None:
    params = SamplingParams(2, 3, 0.5, 0.25, 1.5, 0.7, 0.9, 40, 0.1, False, 1.0, False, "x", [7], True, True, 9)
    assert (params.n, params.best_of, params.temperature, params.top_k, params.stop) == (2, 3, 0.7, 40, "x")
    assert (params.stop_token_ids, params.ignore_eos, params.max_tokens) == ([7], True, 9)


def test_derived_values() -> None:
    assert SamplingParams().num_candidates == 1
    assert SamplingParams(n=2, best_of=5).num_candidates == 5
    assert [SamplingParams(top_k=k).effective_top_k for k in (-1, 0, 1, 10**12)] == [0, 0, 1, 2**31 - 1]
    assert [SamplingParams(temperature=t).is_greedy for t in (0, 9e-6, 1e-5, 1)] == [True, True, False, False]
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams(stop_token_ids=[3, 3]).stop_ids == {3}
    assert SamplingParams.from_request({"logit_bias": {"12": 1}}).logit_bias == {12: 1}
    needs = [SamplingParams(), SamplingParams(presence_penalty=1), SamplingParams(repetition_penalty=2)]
    assert [params.needs_history for params in needs] == [False, True, True]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 5}, "n must be at most 4 (--max-num-seqs), got 5."),
        ({"best_of": 5}, "best_of must be at most 4 (--max-num-seqs), got 5."),
        ({"logprobs": 21}, "logprobs must be at most 20 (--max-logprobs), got 21."),
        ({"prompt_logprobs": 10**9}, "prompt_logprobs must be at most 20 (--max-logprobs), got 1000000000."),
        ({"stop_token_ids": [258]}, "stop_token_ids must hold ids from 0 to 257, got 258."),
        ({"stop_token_ids": [-1]}, "stop_token_ids must hold ids from 0 to 257, got -1."),
        ({"logit_bias": {"999999": 1}}, "logit_bias must hold ids from 0 to 257, got 999999."),
        ({"allowed_token_ids": [3, 999]}, "allowed_token_ids must hold ids from 0 to 257, got 999."),
    ],
)
def test_limits_of_the_server(fields: dict[str, Any], message: str) -> None:
    params = SamplingParams.from_request(fields)
    with pytest.raises(RequestError) as caught:
        params.check_limits(vocab_size=258, max_num_seqs=4, max_logprobs=20)
    assert str(caught.value) == message


def test_is_a_value_error_for_python_callers() -> None:
    with pytest.raises(ValueError, match="temperature"):
        SamplingParams(temperature=-1)
