"""Several candidates, beams, details and deltas over HTTP, from a real server process on a tiny model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.checkpoints import cached_checkpoint
from tests.helpers.scripted_models import const_model, save_scripted
from tests.helpers.server import REAL, Server, running_server
from tests.helpers.tokenizers import make_tokenizer

SAMPLED: dict[str, Any] = {"prompt": "Hé", "n": 3, "best_of": 5, "seed": 1, "max_tokens": 12, "ignore_eos": True}
BEAMS: dict[str, Any] = {"prompt": "Hé", "n": 2, "best_of": 4, "use_beam_search": True, "temperature": 0.0}
"""`use_beam_search` and `temperature` as the example client of vLLM 0.2.7 sends them."""
ONE: dict[str, Any] = {"prompt": "Hé", "temperature": 0, "max_tokens": 8, "ignore_eos": True, "logprobs": 2}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ["--model", str(cached_checkpoint()), "--num-kv-blocks", "64", "--dtype", "float32"]
    with running_server(*flags, module=REAL) as server:
        yield server


def strict(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def answer(server: Server, **fields: Any) -> dict[str, Any]:
    response = server.post(fields)
    assert response.status == 200, response.raw
    parsed: dict[str, Any] = json.loads(response.body, parse_constant=strict)
    return parsed


def stream(server: Server, **fields: Any) -> list[dict[str, Any]]:
    response = server.post({**fields, "stream": True})
    assert response.status == 200 and response.is_complete, response.raw
    return [json.loads(message, parse_constant=strict) for message in response.body.split(b"\0")[:-1]]


def without_prompt(whole: dict[str, Any]) -> dict[str, Any]:
    keys = ("prompt_token_ids", "prompt_logprobs", "num_prompt_tokens")
    return {key: value for key, value in whole.items() if key not in keys}


@pytest.mark.parametrize("fields", [SAMPLED, BEAMS, {**BEAMS, "early_stopping": "never", "length_penalty": 2}])
def test_a_stream_ends_in_the_answer(server: Server, fields: dict[str, Any]) -> None:
    whole = answer(server, **fields)
    assert list(whole) == ["text"] and len(whole["text"]) == fields["n"]
    assert all(text.startswith("Hé") for text in whole["text"])
    messages = stream(server, **fields)
    assert messages[-1] == whole
    assert all(len(message["text"]) == fields["n"] for message in messages[1:])
    assert answer(server, **fields) == whole


def test_old_beam_client_without_best_of(server: Server) -> None:
    body = {"prompt": "San Francisco is a", "n": 4, "use_beam_search": True, "temperature": 0.0, "max_tokens": 16}
    messages = stream(server, **body)
    assert len(messages[-1]["text"]) == 4
    ids = answer(server, **body, details=True)["token_ids"]
    assert len({tuple(beam) for beam in ids}) == 4


def test_details(server: Server) -> None:
    whole = answer(server, **SAMPLED, details=True, logprobs=2, prompt_logprobs=1)
    assert whole["finish_reason"] == ["length"] * 3 and whole["stop_reason"] == [None] * 3
    assert [len(ids) for ids in whole["token_ids"]] == [12] * 3
    assert [len(entries) for entries in whole["logprobs"]] == [12] * 3
    for ids, entries, total in zip(whole["token_ids"], whole["logprobs"], whole["cumulative_logprob"]):
        assert sum(entry[str(id_)] for id_, entry in zip(ids, entries)) == pytest.approx(total)
    assert whole["cumulative_logprob"] == sorted(whole["cumulative_logprob"], reverse=True)
    assert len(whole["prompt_token_ids"]) == whole["num_prompt_tokens"] == len(whole["prompt_logprobs"])
    assert whole["prompt_logprobs"][0] is None and len(whole["prompt_logprobs"][1]) in (1, 2)
    assert whole["num_generated_tokens"] == 36
    messages = stream(server, **SAMPLED, details=True, logprobs=2, prompt_logprobs=1)
    assert messages[-1] == without_prompt(whole)
    assert messages[0]["prompt_logprobs"] == whole["prompt_logprobs"]
    assert messages[1] == without_prompt(messages[1])
    assert answer(server, **SAMPLED)["text"] == whole["text"]


def test_details_of_beams(server: Server) -> None:
    whole = answer(server, **BEAMS, details=True, logprobs=0, stop=["e", "a"], max_tokens=30)
    assert set(whole["finish_reason"]) <= {"stop", "length"}
    for ids, entries, total in zip(whole["token_ids"], whole["logprobs"], whole["cumulative_logprob"]):
        assert [len(entry) for entry in entries] == [1] * len(ids)
        assert sum(entry[str(id_)] for id_, entry in zip(ids, entries)) == pytest.approx(total, abs=1e-4)
    messages = stream(server, **BEAMS, details=True, logprobs=0, stop=["e", "a"], max_tokens=30)
    assert messages[-1] == without_prompt(whole)


def test_details_where_nothing_else_is_asked_for(server: Server) -> None:
    whole = answer(server, prompt="a", temperature=0, details=True)
    assert (whole["logprobs"], whole["cumulative_logprob"], whole["prompt_logprobs"]) == ([None], [None], None)


def test_deltas_add_up(server: Server) -> None:
    whole = answer(server, **ONE, details=True, prompt_logprobs=0)
    messages = stream(server, **ONE, details=True, prompt_logprobs=0, stream_deltas=True)
    assert len(messages) == 8
    assert "Hé" + "".join(message["text"][0] for message in messages) == whole["text"][0]
    assert [id_ for message in messages for id_ in message["token_ids"][0]] == whole["token_ids"][0]
    assert [entry for message in messages for entry in message["logprobs"][0]] == whole["logprobs"][0]
    assert messages[-1]["finish_reason"] == ["length"] and messages[0]["finish_reason"] == [None]
    assert messages[0]["prompt_logprobs"] == whole["prompt_logprobs"]
    assert messages[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not any(key.startswith("prompt") for message in messages[1:] for key in message)


def test_deltas_of_several_candidates_keep_their_places(server: Server) -> None:
    fields = {**SAMPLED, "best_of": 3}
    messages = stream(server, **fields, stream_deltas=True)
    assert list(messages[0]) == ["text"]
    texts = ["Hé" + "".join(message["text"][index] for message in messages) for index in range(3)]
    assert sorted(texts) == sorted(answer(server, **fields)["text"])


def test_a_long_stream_of_deltas_costs_linear_bytes(server: Server) -> None:
    fields = {**ONE, "logprobs": None, "max_tokens": 100}
    deltas = server.post({**fields, "stream": True, "stream_deltas": True})
    assert len(deltas.body) < 100 * 40 < len(server.post({**fields, "stream": True}).body)


def test_prompts_that_would_be_repeated_too_often_are_refused(server: Server) -> None:
    response = server.post({"prompt": "x" * 600_000, "n": 2, "truncate_prompt_tokens": 1})
    assert response.status == 400
    assert "n must be at most 1 for a prompt of 600000 characters, got 2" in response.json()["detail"]


@pytest.mark.parametrize("field", ["detail", "stream_delta"])
def test_misspelt_fields_of_the_request_are_guessed(server: Server, field: str) -> None:
    detail = server.post({"prompt": "a", field: True}).json()["detail"]
    assert f"did you mean {field}s?" in detail


FLAT = range(34, 134)
VOCAB_SIZE = 258


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Takes the ids of `FLAT` alike, whatever went before; all others are as good as impossible."""
    model = const_model(dict.fromkeys(FLAT, 0.0), VOCAB_SIZE, other=-3e38)
    folder = save_scripted(tmp_path_factory.mktemp("flat"), model, make_tokenizer())
    flags = ["--model", str(folder), "--num-kv-blocks", "64", "--dtype", "float32", "--max-logprobs", str(VOCAB_SIZE)]
    with running_server(*flags, module=REAL) as server:
        yield server


def test_case_p5_candidates_differ_and_keep_their_order(flat: Server) -> None:
    fields = {"prompt": "abc", "n": 4, "temperature": 1, "seed": 7, "max_tokens": 20, "details": True}
    whole = answer(flat, **fields)
    assert len({tuple(ids) for ids in whole["token_ids"]}) == 4
    assert answer(flat, **fields) == whole
    messages = stream(flat, **fields)
    assert messages[-1] == without_prompt(whole)
    for message in messages:  # equally good at every step, so that no candidate changes its place
        assert [ids[: len(message["token_ids"][0])] for ids in whole["token_ids"]] == message["token_ids"]
    assert answer(flat, **{**fields, "n": 1})["token_ids"] == whole["token_ids"][:1]


@pytest.mark.parametrize("top_k", [1, -1])
@pytest.mark.parametrize("count", [5, VOCAB_SIZE])
def test_case_p7_impossible_tokens_are_numbers_in_json(flat: Server, top_k: int, count: int) -> None:
    """The model's own distribution, before `top_k`; every answer goes through a strict parser."""
    fields = {"prompt": "a1!", "top_k": top_k, "temperature": 1, "max_tokens": 3, "seed": 1, "details": True}
    whole = answer(flat, **fields, logprobs=count, prompt_logprobs=count)
    messages = stream(flat, **fields, logprobs=count, prompt_logprobs=count)
    assert messages[-1] == without_prompt(whole)
    prompt_entries = whole["prompt_logprobs"][1:]
    impossible = [entry[str(id_)] for id_, entry in zip(whole["prompt_token_ids"][1:], prompt_entries)]
    assert impossible == [-9999.0] * 2, "as upstream has it"
    for entry in [*whole["logprobs"][0], *prompt_entries]:
        assert count <= len(entry) <= count + 1
        if count == VOCAB_SIZE:
            assert sum(map(math.exp, entry.values())) == pytest.approx(1, abs=1e-5)
    for id_, entry in zip(whole["token_ids"][0], whole["logprobs"][0]):
        assert entry[str(id_)] == pytest.approx(-math.log(100), abs=1e-5)


def test_case_p7_beams_over_impossible_tokens(flat: Server) -> None:
    fields = {"prompt": "abc", "n": 3, "use_beam_search": True, "temperature": 0, "max_tokens": 3, "details": True}
    whole = answer(flat, **fields, logprobs=VOCAB_SIZE)
    assert {len(entry) for entries in whole["logprobs"] for entry in entries} == {VOCAB_SIZE}
    assert whole["cumulative_logprob"] == pytest.approx([-3 * math.log(100)] * 3, abs=1e-4)
    only = answer(flat, **fields, allowed_token_ids=[2, 3, 34])
    assert len({tuple(ids) for ids in only["token_ids"]}) == 3
    assert all(map(math.isfinite, only["cumulative_logprob"]))
