"""The clients that tutorials and load tests for vLLM's old server use, as they are, against a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from tests.helpers.checkpoints import byte_tokenizer, cached_checkpoint
from tests.helpers.server import REAL, ROOT, Server, running_server

CHUNK_TOKENS = 512
NUM_CHUNKS = 32
NUM_THREADS = 16


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    model = str(cached_checkpoint(max_position_embeddings=1024))
    with running_server("--model", model, "--dtype", "float32", module=REAL) as server:
        yield server


def post(server: Server, fields: dict[str, Any], *, stream: bool = False) -> requests.Response:
    headers = {"User-Agent": "Test Client"}
    return requests.post(f"{server.url}/generate", headers=headers, json=fields, stream=stream, timeout=60)


def test_a_plain_post(server: Server) -> None:
    fields = {"prompt": "San Francisco is a", "n": 1, "temperature": 0.0, "max_tokens": 16}
    output = json.loads(post(server, fields).content)["text"]
    assert len(output) == 1
    assert output[0].startswith("San Francisco is a")
    assert post(server, fields).json() == {"text": output}


def test_a_stream_whose_new_text_is_found_by_replacing_the_old(server: Server) -> None:
    fields = {"prompt": "San Francisco is a", "temperature": 0.0, "max_tokens": 40, "stream": True}
    printed, previous, num_messages = "", "", 0
    with post(server, fields, stream=True) as response:
        for chunk in response.iter_lines(chunk_size=8192, decode_unicode=False, delimiter=b"\0"):
            if chunk:
                text = json.loads(chunk.decode("utf-8"))["text"][0]
                printed += text.replace(previous, "")
                previous = text
                num_messages += 1
    assert printed == previous == server.text(prompt="San Francisco is a", temperature=0, max_tokens=40)
    assert num_messages == 40


def test_a_stop_list_with_temperature_top_k_and_top_p(server: Server) -> None:
    prompt = "A chat between a curious user and an assistant. USER: Hi! ASSISTANT:"
    fields = {"prompt": prompt, "max_tokens": 200, "temperature": 0.7, "top_k": 40, "top_p": 0.9, "seed": 1}
    whole = post(server, fields).json()["text"][0]
    assert whole.startswith(prompt)
    stop = whole[-100:-97]
    text = post(server, {**fields, "stop": ["</s>", stop]}).json()["text"][0]
    assert text == prompt + whole.removeprefix(prompt).partition(stop)[0]
    assert len(text) < len(whole)


@pytest.mark.parametrize("use_beam_search", [False, True])
def test_a_load_test_that_sends_best_of(server: Server, use_beam_search: bool) -> None:
    """The body of vLLM 0.2.7's own load test, eight at a time: one text each, of as many tokens as asked for."""

    def ask(index: int) -> list[str]:
        fields = {
            "prompt": f"{index} times around the world",
            "n": 1,
            "best_of": 4,
            "use_beam_search": use_beam_search,
            "temperature": 0.0 if use_beam_search else 1.0,
            "top_p": 1.0,
            "max_tokens": 10,
            "ignore_eos": True,
            "stream": False,
        }
        output = post(server, fields).json()
        assert list(output) == ["text"], "a key of the name error would make it ask again"
        details = post(server, {**fields, "details": True}).json()
        assert [len(ids) for ids in details["token_ids"]] == [10] and details["finish_reason"] == ["length"]
        if use_beam_search:
            assert details["text"] == output["text"]
        return list(output["text"])

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(ask, range(16)))
    assert all(len(text) == 1 and text[0].startswith(f"{index} times") for index, text in enumerate(texts))
    assert server.metrics()["num_requests_running"] == 0


def test_16_threads_over_chunks_of_512_tokens(server: Server) -> None:
    """All at once, end of sequence ignored: no request fails, and each gets what it gets alone."""
    tokenizer = byte_tokenizer()
    text = "".join(path.read_text() for path in sorted((ROOT / "vllm_lite" / "engine").glob("*.py")))
    ids = tokenizer(text).input_ids[: CHUNK_TOKENS * NUM_CHUNKS]
    chunks = [tokenizer.decode(ids[start : start + CHUNK_TOKENS]) for start in range(0, len(ids), CHUNK_TOKENS)]
    assert len(chunks) == NUM_CHUNKS

    def ask(chunk: str) -> str:
        fields = {"prompt": chunk, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        response = post(server, fields)
        response.raise_for_status()
        answer: str = response.json()["text"][0]
        return answer

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        answers = list(pool.map(ask, chunks))
    assert all(answer.startswith(chunk) and answer != chunk for answer, chunk in zip(answers, chunks))
    assert answers[::8] == [ask(chunk) for chunk in chunks[::8]]
