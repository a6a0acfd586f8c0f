"""Bodies that are parsed without a server: large ones, and those that cost more than they look."""

from __future__ import annotations

import json
import threading

import pytest

from vllm_lite.entrypoints.json_body import MAX_COMMAS_FOR_C, MAX_VALUES
from vllm_lite.entrypoints.native.request_body import parse_generate_request
from vllm_lite.errors import RequestError

MIB = 2**20


def test_fields_arrive_as_they_were_sent() -> None:
    request = parse_generate_request(
        b'{"prompt": "a\\u00e9\\ud83d\\ude00", "stream": 1, "max_tokens": null, "top_k": 5}'
    )
    assert (request.prompt, request.is_stream) == ("aé😀", True)
    assert (request.params.max_tokens, request.params.top_k) == (None, 5)


def test_last_of_equal_keys_wins_and_a_byte_order_mark_is_skipped() -> None:
    assert parse_generate_request(b'\xef\xbb\xbf{"prompt": "a", "prompt": "b"}').prompt == "b"


def test_prompt_of_many_commas_is_a_prompt() -> None:
    prompt = "1,2;" * MAX_COMMAS_FOR_C
    assert parse_generate_request(json.dumps({"prompt": prompt + ","}).encode()).prompt == prompt + ","


@pytest.mark.parametrize("item", [b"1", b"[]", b"{}", b'"a"', b"1.5"])
def test_other_threads_run_while_a_body_of_many_values_is_parsed(item: bytes) -> None:
    """A parser in C would hold the interpreter for the whole body, and the main thread would run once or twice."""
    body = b'{"prompt": [' + b",".join([item] * (MIB // (len(item) + 2))) + b"]}"
    failures: list[RequestError] = []

    def parse() -> None:
        try:
            parse_generate_request(body)
        except RequestError as error:
            failures.append(error)

    thread = threading.Thread(target=parse)
    num_turns = 0
    thread.start()
    while thread.is_alive():
        thread.join(0.001)
        num_turns += 1
    assert "lists of prompts" in str(failures[0])
    assert num_turns > 5


@pytest.mark.parametrize("item", [b"1", b"null", b"[]", b"[[1]]", b'{"a":1}', b'"a"', b"1.5"])
def test_body_of_too_many_values_is_refused_before_it_is_parsed_to_its_end(item: bytes) -> None:
    """Wherever the values are, and although the field could hold them."""
    items = b",".join([item] * MAX_VALUES)
    for body in (
        b'{"prompt": "a", "allowed_token_ids": [' + items + b"], not JSON",
        b'{"prompt": "a"' + b"".join([b', "n": ' + item] * MAX_VALUES) + b", not JSON",
    ):
        with pytest.raises(RequestError, match=f"at most {MAX_VALUES} values"):
            parse_generate_request(body)


def test_as_many_ids_as_a_vocabulary_has_are_allowed() -> None:
    ids = list(range(300_000))
    body = json.dumps({"prompt": "a", "allowed_token_ids": ids, "stop": ["x", "y"], "logit_bias": {"5": 1}}).encode()
    request = parse_generate_request(body)
    assert request.params.allowed_token_ids == ids
    assert (request.params.stop_strings, request.params.logit_bias) == (("x", "y"), {5: 1})
