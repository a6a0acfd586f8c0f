"""`/v1/chat/completions` through OpenAI's own client: ids as transformers makes them, texts as completions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from tests.helpers.checkpoints import cached_checkpoint, copy_checkpoint
from tests.helpers.doors import OPENAI
from tests.helpers.server import REAL, Server, running_server

MODEL = "tiny"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if tone is defined %}({{ tone }}){% endif %}{% endif %}"
)
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
CHATS: list[list[Any]] = [
    HELLO,
    [{"role": "system", "content": "Be brief."}, *HELLO, {"role": "assistant", "content": "Hé!"}, *HELLO],
    [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}],
]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose tokenizer adds a BOS to a prompt by itself, as Llama's does, and so does its template."""
    folder = copy_checkpoint(cached_checkpoint(), tmp_path_factory.mktemp("chat") / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    bos = tokenizer.convert_ids_to_tokens(1)
    tokenizer.bos_token = bos
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, 1)])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    flags = ["--model", str(folder), "--served-model-name", MODEL, "--max-num-seqs", "4"]
    with running_server(*flags, module=REAL, door=OPENAI) as server:
        yield server
        assert "Traceback" not in server.log


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with client_of(server) as client:
        yield client


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def chat(client: openai.OpenAI, messages: list[Any], **fields: Any) -> ChatCompletion:
    answer: ChatCompletion = client.chat.completions.create(messages=messages, **{**GREEDY, **fields})
    return answer


def stream(client: openai.OpenAI, messages: list[Any], **fields: Any) -> list[ChatCompletionChunk]:
    return list(client.chat.completions.create(messages=messages, stream=True, **{**GREEDY, **fields}))


@pytest.mark.parametrize("messages", CHATS, ids=["one", "several", "parts"])
def test_ids_are_those_of_transformers(client: openai.OpenAI, folder: Path, messages: list[Any]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    flat = [{**one, "content": one["content"] if isinstance(one["content"], str) else "one\ntwo"} for one in messages]
    ids = list(tokenizer.apply_chat_template(flat, add_generation_prompt=True, return_dict=False))
    assert ids.count(1) == 1  # the template's
    assert tokenizer("a").input_ids[0] == 1  # the tokenizer's own
    answer = chat(client, messages)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids)
    expected = client.completions.create(prompt=ids, **GREEDY)
    assert answer.choices[0].message.content == expected.choices[0].text


def test_an_answer(client: openai.OpenAI) -> None:
    answer = chat(client, HELLO)
    [choice] = answer.choices
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion" and answer.model == MODEL
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
    assert choice.logprobs is None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_a_stream_begins_with_the_role_and_ends_with_the_reason(client: openai.OpenAI) -> None:
    answer = chat(client, HELLO)
    *chunks, usage = stream(client, HELLO, stream_options={"include_usage": True})
    first, *middle, last = [chunk.choices[0] for chunk in chunks]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert (first.delta.role, first.delta.content, first.finish_reason) == ("assistant", "", None)
    assert "".join(choice.delta.content or "" for choice in middle) == answer.choices[0].message.content
    assert {choice.finish_reason for choice in middle} == {None}
    assert (last.delta.to_dict(), last.finish_reason) == ({}, "length")
    assert usage.choices == [] and usage.usage == answer.usage


def test_candidates(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"n": 2, "temperature": 1, "seed": 1}
    texts = [choice.message.content for choice in chat(client, HELLO, **fields).choices]
    assert len(set(texts)) == 2
    chunks = stream(client, HELLO, **fields)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    pieces = [[choice.delta.content or "" for choice in choices if choice.index == index] for index in (0, 1)]
    assert sorted(map("".join, pieces)) == sorted(text or "" for text in texts)
    roles = [choice.index for choice in choices if choice.delta.role]
    assert roles == [0, 1]


@pytest.mark.parametrize("num_top", [0, 3])
def test_logprobs(client: openai.OpenAI, num_top: int) -> None:
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": num_top}
    [choice] = chat(client, HELLO, **fields).choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    content = choice.logprobs.content
    assert len(content) == 12
    for one in content:
        assert len(one.top_logprobs) == num_top
        assert one.bytes == (None if "\ufffd" in one.token else list(one.token.encode()))
        if num_top:  # greedy
            assert one.top_logprobs[0].model_dump(include={"token", "logprob"}) == {
                "token": one.token,
                "logprob": one.logprob,
            }
            values = [top.logprob for top in one.top_logprobs]
            assert values == sorted(values, reverse=True)
    parts = [chunk.choices[0].logprobs for chunk in stream(client, HELLO, **fields)]
    streamed = itertools.chain.from_iterable(part.content or () for part in parts if part is not None)
    assert list(streamed) == content


def test_without_a_limit_an_answer_ends_where_the_context_does(client: openai.OpenAI) -> None:
    fields = {name: value for name, value in GREEDY.items() if name != "max_tokens"}
    answer = client.chat.completions.create(messages=HELLO, **fields)
    assert answer.usage is not None
    assert answer.usage.total_tokens == 128
    assert len(stream(client, HELLO, max_completion_tokens=1)) == 3
    shorter = chat(client, HELLO, max_completion_tokens=3)
    assert shorter.usage is not None
    assert shorter.usage.completion_tokens == 3


def test_the_template_gets_what_the_client_sends(client: openai.OpenAI) -> None:
    def num_prompt_tokens(**extra: Any) -> int:
        messages = [*HELLO, {"role": "assistant", "content": "No"}]
        answer = chat(client, messages, extra_body={"ignore_eos": True, **extra})
        assert answer.usage is not None
        return answer.usage.prompt_tokens

    whole = num_prompt_tokens()
    assert num_prompt_tokens(add_generation_prompt=False) == whole - len("[assistant]")
    assert num_prompt_tokens(chat_template_kwargs={"tone": "warm"}) == whole + len("(warm)")
    continued = num_prompt_tokens(add_generation_prompt=False, continue_final_message=True)
    assert continued == whole - len("[assistant]")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": "Hello"}, "messages", "a string"),
        ({"messages": [{"role": "user"}]}, "messages", "messages[0].content is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "'image_url'"),
        ({"messages": [{"role": "user", "content": "x" * 200}]}, "messages", "the context holds 128"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "tools are not supported"),
        ({"tool_choice": "auto"}, "tool_choice", "tools are not supported"),
        ({"functions": [{"name": "f"}]}, "functions", "tools are not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "enforced"),
        ({"modalities": ["text", "audio"]}, "modalities", "audio"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "chat_template_kwargs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "chats"),
        ({"top_logprobs": 2}, "top_logprobs", '"logprobs": true'),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
        ({"logprobs": 1}, "logprobs", "true or false"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"n": 5, "temperature": 1}, "n", "at most 4"),
        ({"n": 2, "best_of": 3, "temperature": 1, "stream": True}, "best_of", "in a stream"),
        ({"continue_final_message": True}, "continue_final_message", "add_generation_prompt"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs", "an object"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "must not set"),
        ({"echo": True}, "echo", "not a known field"),
        ({"top_logprob": 2}, "top_logprob", "did you mean top_logprobs"),
        ({"model": "gpt-4"}, "model", "does not exist"),
    ],
    ids=str,
)
def test_a_mistake_names_its_field(client: openai.OpenAI, fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as caught:
        chat(client, HELLO, extra_body=fields)
    assert caught.value.param == param
    assert words in caught.value.message
    assert caught.value.status_code == (404 if param == "model" else 400)


def test_harmless_fields_change_nothing(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "user": "u",
        "logprobs": False,
        "reasoning_effort": None,
    }
    plain, other = chat(client, HELLO), chat(client, HELLO, extra_body={"ignore_eos": True, **fields})
    assert plain.choices == other.choices


def test_a_model_without_a_template_says_how_to_get_one() -> None:
    flags = ["--model", str(cached_checkpoint()), "--served-model-name", MODEL]
    with running_server(*flags, module=REAL, door=OPENAI) as server, client_of(server) as client:
        with pytest.raises(openai.BadRequestError, match="--chat-template"):
            chat(client, HELLO)
        assert client.completions.create(model=MODEL, prompt="a").choices


def test_the_default_model_chats() -> None:
    """Its own template, its own end of a turn."""
    question: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    flags = ["--served-model-name", MODEL]
    with running_server(*flags, module=REAL, door=OPENAI) as server, client_of(server) as client:
        answer = client.chat.completions.create(model=MODEL, messages=question, temperature=0, max_tokens=60)
    [choice] = answer.choices
    assert choice.finish_reason == "stop"
    assert "Paris" in (choice.message.content or "")
    assert "<|im_" not in (choice.message.content or "")
