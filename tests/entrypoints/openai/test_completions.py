"""`/v1/completions` and `/v1/models` through OpenAI's own client, on a tiny model next to the native server."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest

from tests.helpers.checkpoints import cached_checkpoint
from tests.helpers.doors import OPENAI
from tests.helpers.server import REAL, Server, running_server
from tests.helpers.waiting import wait_for_requests
from vllm_lite.entrypoints.openai.completion_request import parse_completion_request
from vllm_lite.errors import RequestError

MODEL = "tiny"
FLAGS = ["--model", str(cached_checkpoint()), "--served-model-name", f"{MODEL},alias/of it", "--max-num-seqs", "4"]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
EXTRA = {"ignore_eos": True}
IDS = [41, 70, 77, 77, 80]


@pytest.fixture(scope="module")
def native() -> Iterator[Server]:
    with running_server(*FLAGS, module=REAL) as server:
        yield server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(*FLAGS, "--max-waiting-requests", "6", module=REAL, door=OPENAI) as server:
        yield server
        assert "Traceback" not in server.log


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def reference(native: Server, prompt: str, **fields: Any) -> dict[str, Any]:
    """What the native server answers, with all that it tells."""
    answer: dict[str, Any] = native.post({"prompt": prompt, "details": True, **GREEDY, **EXTRA, **fields}).json()
    return answer


def complete(client: openai.OpenAI, prompt: Any, **fields: Any) -> openai.types.Completion:
    answer: openai.types.Completion = client.completions.create(
        model=MODEL, prompt=prompt, **{**GREEDY, "extra_body": EXTRA, **fields}
    )
    return answer


def stream(client: openai.OpenAI, prompt: Any, **fields: Any) -> list[openai.types.Completion]:
    events = client.completions.create(
        model=MODEL, prompt=prompt, stream=True, **{**GREEDY, "extra_body": EXTRA, **fields}
    )
    return list(events)


def joined(chunks: list[openai.types.Completion], index: int = 0) -> str:
    return "".join(choice.text for chunk in chunks for choice in chunk.choices if choice.index == index)


def test_the_text_is_the_native_servers(client: openai.OpenAI, native: Server) -> None:
    expected = reference(native, "Hello")
    answer = complete(client, "Hello")
    [choice] = answer.choices
    assert "Hello" + choice.text == expected["text"][0]
    assert choice.finish_reason == expected["finish_reason"][0] == "length"
    assert choice.logprobs is None and choice.index == 0
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion" and answer.model == MODEL
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 12, 17)
    assert joined(stream(client, "Hello")) == choice.text


async def test_the_asynchronous_client_gets_the_same(async_client: openai.AsyncOpenAI, client: openai.OpenAI) -> None:
    fields = {"model": MODEL, **GREEDY, "extra_body": EXTRA}
    prompts = ["one", "two", "three"]
    answers = await asyncio.gather(*(async_client.completions.create(prompt=prompt, **fields) for prompt in prompts))
    assert [answer.choices[0].text for answer in answers] == [complete(client, one).choices[0].text for one in prompts]
    events = await async_client.completions.create(prompt="two", stream=True, **fields)
    assert "".join([chunk.choices[0].text async for chunk in events]) == answers[1].choices[0].text


def test_a_model_has_each_of_its_names_and_no_other(client: openai.OpenAI, server: Server) -> None:
    models = list(client.models.list())
    assert [model.id for model in models] == [MODEL, "alias/of it"]
    assert {model.owned_by for model in models} == {"vllm_lite"}
    assert client.models.retrieve("alias/of it").id == "alias/of it"
    assert client.completions.create(model="alias/of it", prompt="a").model == "alias/of it"
    assert server.post({"prompt": "a"}).json()["model"] == MODEL
    assert 'model_name="tiny"' in server.get("/metrics").body.decode()
    for ask in (client.models.retrieve, lambda name: client.completions.create(model=name, prompt="a")):
        with pytest.raises(openai.NotFoundError, match="--served-model-name") as caught:
            ask("gpt-4")
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert "refused: \"the model 'gpt-4' does not exist" in server.log


@pytest.mark.parametrize("is_stream", [False, True])
def test_every_kind_of_prompt(client: openai.OpenAI, native: Server, is_stream: bool) -> None:
    texts = ["Hello", "a b", "Hello"]
    expected = [reference(native, text) for text in texts]
    ids = [one["prompt_token_ids"] for one in expected]
    assert ids[0] == IDS
    for prompt in (texts, ids, texts[:1], ids[0]):
        count = 1 if prompt in (texts[:1], ids[0]) else 3
        if is_stream:
            chunks = stream(client, prompt, stream_options={"include_usage": True})
            outputs = [joined(chunks, index) for index in range(count)]
            usage = chunks[-1].usage
        else:
            answer = complete(client, prompt)
            assert [choice.index for choice in answer.choices] == list(range(count))
            outputs, usage = [choice.text for choice in answer.choices], answer.usage
        assert outputs == [one["text"][0].removeprefix(text) for one, text in zip(expected[:count], texts)]
        assert usage is not None
        assert usage.prompt_tokens == sum(map(len, ids[:count]))
        assert usage.completion_tokens == 12 * count


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (["a", "b", "x" * 200], "prompt[2] must leave room"),
        (["a", ""], "prompt[1] must have at least one token"),
        ([[5], [6, 100_000]], "prompt[1] must have token ids from 0 to 255"),
        ([[5], [6, "x"]], "prompt[1] must be a list of token ids, got a string in it"),
        (["a", [5], None], "prompt[2] must be a string or a list of token ids, got null"),
        ([5, True], "prompt must be a list of token ids, got true in it"),
        ([], "prompt must be a string, a list of strings"),
        (5, "prompt must be a string, a list of strings"),
        (["a"] * 7, "at most 6 prompts (--max-waiting-requests), got 7"),
    ],
    ids=str,
)
def test_a_prompt_that_is_no_good_is_named_and_none_is_answered(
    client: openai.OpenAI, server: Server, prompt: Any, words: str, is_stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, prompt, stream=is_stream)
    assert words in caught.value.message
    assert caught.value.param == "prompt"
    wait_for_requests(server, 0)


def test_candidates_have_their_indices_and_usage_counts_all(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"temperature": 1, "seed": 5, "n": 2}
    answer = complete(client, ["Hello", "a b"], **fields)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (8, 48)
    chunks = stream(client, ["Hello", "a b"], **fields)
    streamed = [joined(chunks, index) for index in range(4)]
    # A whole answer has the best first, a stream has each as it comes.
    assert sorted(streamed[:2]) == sorted(choice.text for choice in answer.choices[:2])
    assert sorted(streamed[2:]) == sorted(choice.text for choice in answer.choices[2:])
    best = complete(client, "Hello", best_of=3, **{**fields, "n": 1})
    assert best.usage is not None
    assert (len(best.choices), best.usage.completion_tokens) == (1, 36)


def test_beams_are_the_native_servers(client: openai.OpenAI, native: Server) -> None:
    beams = {"use_beam_search": True, "n": 2, "logprobs": 1}
    expected = reference(native, "Hello", **beams)
    extra = {**EXTRA, "use_beam_search": True}
    answer = complete(client, "Hello", n=2, logprobs=1, extra_body=extra)
    assert ["Hello" + choice.text for choice in answer.choices] == expected["text"]
    for choice, ids, logprobs in zip(answer.choices, expected["token_ids"], expected["logprobs"]):
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == [one[str(token_id)] for token_id, one in zip(ids, logprobs)]
    with pytest.raises(openai.BadRequestError, match="beams change their minds") as caught:
        stream(client, "Hello", n=2, extra_body=extra)
    assert caught.value.param == "use_beam_search"


@pytest.mark.parametrize("num_top", [0, 3])
def test_logprobs_are_the_native_servers(client: openai.OpenAI, native: Server, num_top: int) -> None:
    expected = reference(native, "Hello", logprobs=num_top)
    [choice] = complete(client, "Hello", logprobs=num_top).choices
    logprobs = choice.logprobs
    assert logprobs is not None
    pairs = list(zip(expected["token_ids"][0], expected["logprobs"][0]))
    assert logprobs.token_logprobs == [one[str(token_id)] for token_id, one in pairs]
    assert logprobs.tokens is not None and logprobs.top_logprobs is not None and logprobs.text_offset is not None
    for (token_id, one), token, top in zip(pairs, logprobs.tokens, logprobs.top_logprobs):
        assert max(top.values()) == max(one.values())
        assert set(top.values()) <= set(one.values())
        assert one[str(token_id)] <= top[token]  # of several parts of a character, the likeliest has the name
        assert list(top.values()) == sorted(top.values(), reverse=True)
    assert_offsets_fit(choice.text, logprobs.tokens, logprobs.text_offset)
    chunks = stream(client, "Hello", logprobs=num_top)
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        pieces = itertools.chain.from_iterable(getattr(part, name) for part in parts if part is not None)
        assert list(pieces) == getattr(logprobs, name)


def assert_offsets_fit(text: str, tokens: list[str], offsets: list[int]) -> None:
    for token, offset in zip(tokens, offsets):
        assert text.startswith(token, offset) or "\ufffd" in token
    assert sum("\ufffd" not in token for token in tokens) > 2


def test_echo_gives_the_prompt_back(client: openai.OpenAI) -> None:
    prompt = "Hé 你"
    text = complete(client, prompt).choices[0].text
    assert complete(client, prompt, echo=True).choices[0].text == prompt + text
    assert joined(stream(client, prompt, echo=True)) == prompt + text
    ids = [[5, 6, 7], [8]]
    echoed = complete(client, ids, echo=True, max_tokens=0)
    assert [choice.text for choice in echoed.choices] == ["$%&", "'"]
    assert {choice.finish_reason for choice in echoed.choices} == {"length"}
    assert echoed.usage is not None
    assert (echoed.usage.prompt_tokens, echoed.usage.completion_tokens) == (4, 0)
    assert joined(stream(client, ids, echo=True, max_tokens=0), 1) == "'"
    with pytest.raises(openai.BadRequestError, match="max_tokens must be at least 1"):
        complete(client, "a", max_tokens=0)
    extra = {**EXTRA, "truncate_prompt_tokens": 2}
    assert complete(client, "Hello", echo=True, extra_body=extra).choices[0].text.startswith("lo")


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_echo_with_logprobs_tells_those_of_the_prompt(client: openai.OpenAI, native: Server, max_tokens: int) -> None:
    expected = reference(native, "Hello", logprobs=2, prompt_logprobs=2, max_tokens=max(max_tokens, 1))
    fields: dict[str, Any] = {"echo": True, "logprobs": 2, "max_tokens": max_tokens}
    [choice] = complete(client, "Hello", **fields).choices
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None and logprobs.text_offset is not None and logprobs.token_logprobs is not None
    of_prompt = [one and one[str(token_id)] for token_id, one in zip(IDS, expected["prompt_logprobs"])]
    pairs = list(zip(expected["token_ids"][0], expected["logprobs"][0]))[:max_tokens]
    assert logprobs.token_logprobs == of_prompt + [one[str(token_id)] for token_id, one in pairs]
    assert of_prompt[0] is None
    assert_offsets_fit(choice.text, logprobs.tokens, logprobs.text_offset)
    assert "".join(logprobs.tokens[:5]) == "Hello"
    [first, *_] = stream(client, "Hello", **fields)
    assert first.choices[0].logprobs is not None
    assert first.choices[0].logprobs.tokens == list("Hello")


def test_long_echoes_are_bounded(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="n must be at most") as caught:
        complete(client, "x" * 300_000, echo=True, n=4, temperature=1)
    assert caught.value.param == "n"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": ["x" * 300] * 2000, "echo": True}, "with echo, times 2 plus logprobs, got 1200000"),
        ({"prompt": ["x"] * 1025, "n": 4}, "at most 1024 prompts"),
        ({"prompt": ["x"] * 1025, "best_of": 4}, "with 4 candidates for each, got 1025"),
        ({"prompt": ["x"] * 4097}, "at most 4096 prompts"),
    ],
)
def test_lists_are_bounded_by_all_that_they_make(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        parse_completion_request(json.dumps(fields).encode(), 4096)
    assert caught.value.param == "prompt"


def test_usage_in_a_stream(client: openai.OpenAI) -> None:
    plain = stream(client, "Hello")
    assert all(chunk.usage is None and chunk.choices for chunk in plain)
    assert all("usage" not in chunk.model_fields_set for chunk in plain)
    *chunks, last = stream(client, "Hello", stream_options={"include_usage": True})
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in chunks)
    assert last.choices == [] and last.usage is not None
    assert last.usage.to_dict() == {"prompt_tokens": 5, "completion_tokens": 12, "total_tokens": 17}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = stream(client, "Hello", stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert len(counts) == len(chunks) and counts == sorted(counts) and counts[-1] == 12


def test_stop_and_what_clients_pass_through(client: openai.OpenAI, native: Server) -> None:
    whole = reference(native, "Hello")["text"][0].removeprefix("Hello")
    stop = next(character for character in whole[3:] if character != "\ufffd")
    [choice] = complete(client, "Hello", stop=[stop]).choices
    assert choice.text == whole.partition(stop)[0]
    assert choice.finish_reason == "stop"
    extra = {**EXTRA, "top_k": 1, "include_stop_str_in_output": True}
    assert complete(client, "Hello", stop=stop, temperature=1, extra_body=extra).choices[0].text == (
        whole.partition(stop)[0] + stop
    )
    ignored = {"user": "u", "metadata": {"a": "b"}, "store": True, "suffix": ""}
    assert complete(client, "Hello", extra_body={**EXTRA, **ignored}).choices[0].text == whole


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": -1, "echo": True}, "logprobs"),
        ({"n": 2}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 2, "temperature": 1, "stream": True}, "best_of"),
        ({"n": 2, "best_of": 1, "temperature": 1}, "best_of"),
        ({"n": 5, "temperature": 1}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"stream": 1}, "stream"),
        ({"echo": "yes"}, "echo"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options"),
        ({"stream": True, "stream_options": True}, "stream_options"),
        ({"model": 5}, "model"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"details": True}, "details"),
        ({"add_special_tokens": 0}, "add_special_tokens"),
    ],
    ids=str,
)
def test_a_mistake_names_its_field(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="a", extra_body={"temperature": 0, **fields})
    assert caught.value.param == param
    assert param in caught.value.message
    assert caught.value.type == "invalid_request_error"


def test_an_unknown_field_is_told_the_nearest_known_one(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="did you mean temperature") as caught:
        client.completions.create(model=MODEL, prompt="a", extra_body={"temprature": 1})
    assert "prompt_logprobs" not in caught.value.message


def test_bodies_that_are_no_request(server: Server) -> None:
    for body, words in [
        (b"{", "valid JSON"),
        (b"[]", "object"),
        (b"{}", "prompt is missing"),
        (b'{"prompt":null}', "null"),
    ]:
        response = server.post(body)
        assert response.status == 400
        assert words in response.failure()
    assert json.loads(server.post(b"{").body)["error"]["param"] is None
