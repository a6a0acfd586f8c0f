"""What goes over the wire: events to the byte, failures in mid-stream, shapes of errors, the document."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.helpers.checkpoints import cached_checkpoint
from tests.helpers.doors import OPENAI, events
from tests.helpers.fake_server import PIECES
from tests.helpers.json_schema import VALUES_OF_ALL_TYPES, allows, examples
from tests.helpers.server import (
    REAL,
    Response,
    Server,
    assert_refused,
    generate_bytes,
    read_response,
    request_bytes,
    running_server,
)
from tests.helpers.waiting import ENDLESS, wait_for_requests
from vllm_lite.chat_template import ChatTemplate
from vllm_lite.config import API_KEY_VARIABLE, EngineConfig, ServerConfig
from vllm_lite.entrypoints.docs_page import ORIGIN
from vllm_lite.entrypoints.openai.asked import Asked
from vllm_lite.entrypoints.openai.chat_request import parse_chat_request
from vllm_lite.entrypoints.openai.completion_request import parse_completion_request
from vllm_lite.entrypoints.openai.docs import openai_description
from vllm_lite.entrypoints.openai.openapi import openai_document
from vllm_lite.errors import RequestError

CHAT = "/v1/chat/completions"
STREAM: dict[str, Any] = {"prompt": "a", "max_tokens": 12, "stream": True}
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server whose engine plays back `PIECES`, so that every byte is known."""
    with running_server(door=OPENAI) as server:
        yield server


def ask_chat(server: Server, **fields: Any) -> Response:
    return server.exchange(generate_bytes({"messages": HELLO, "max_tokens": 12, **fields}, path=CHAT))


def without_head(chunk: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in chunk.items() if key not in ("id", "created")}


def test_a_stream_of_a_completion_to_the_byte(server: Server) -> None:
    response = server.post(STREAM, "X-Request-Id: mine")
    assert response.status == 200 and response.is_complete
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.body.isascii()  # U+2028 is the end of a line to some
    *data, done = events(response.body)
    assert done == b"[DONE]"
    shown = [(piece, "length" if k == 11 else None) for k, piece in enumerate(PIECES) if piece]
    chunks = [json.loads(one) for one in data]
    assert [without_head(chunk) for chunk in chunks] == [
        {
            "object": "text_completion",
            "model": "fake",
            "choices": [{"index": 0, "text": piece, "logprobs": None, "finish_reason": reason}],
        }
        for piece, reason in shown
    ]
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert [list(chunk) for chunk in chunks] == [["id", "object", "created", "model", "choices"]] * len(chunks)


def test_a_stream_of_a_chat_to_the_byte(server: Server) -> None:
    response = ask_chat(server, stream=True, n=2)
    *data, done = events(response.body)
    assert done == b"[DONE]"
    choices = [choice for one in data for choice in json.loads(one)["choices"] if choice["index"] == 1]
    deltas = [{"role": "assistant", "content": ""}, *({"content": piece} for piece in PIECES if piece), {}]
    assert [choice["delta"] for choice in choices] == deltas
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(deltas) - 1) + ["length"]


def test_an_answer_is_raw_utf8(server: Server) -> None:
    for response in (server.post({"prompt": "a", "max_tokens": 12}), ask_chat(server)):
        assert "你好".encode() in response.body
        assert response.headers["content-type"] == "application/json"
        answer = response.json()
        assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15}
    assert response.json()["choices"][0]["message"] == {
        "role": "assistant",
        "content": "".join(PIECES),
        "refusal": None,
    }


@pytest.mark.parametrize("fault", ["fail", "die"])
def test_a_failure_in_mid_stream_is_an_event_and_a_cut_connection(fault: str) -> None:
    with running_server(door=OPENAI) as server:
        prompt = [f"!{fault}=3 a"] if fault == "die" else ["!delay=0.05 b", f"!{fault}=3 a"]
        response = server.post({**STREAM, "prompt": prompt})
        assert response.status == 200 and not response.is_complete
        *chunks, last = events(response.body)
        assert chunks
        failure = json.loads(last)
        assert OPENAI.failure(failure)
        assert failure["error"]["type"] == "server_error"
        wait_for_requests(server, 0)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            if fault == "fail":
                stream = client.completions.create(model="fake", prompt="!fail=3 a", stream=True)
                with pytest.raises(openai.APIError, match="failed"):
                    list(stream)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_failure_before_the_first_token_has_its_status(server: Server, is_stream: bool) -> None:
    response = server.post({**STREAM, "prompt": "!fail=0 a", "stream": is_stream})
    assert_refused(response, 500, "failed")
    assert response.json()["error"]["type"] == "server_error"


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_ends_all_its_prompts(server: Server, is_stream: bool) -> None:
    before = server.metrics()["num_requests_aborted_total"]
    with server.connect() as connection:
        connection.sendall(server.request({**ENDLESS, "prompt": [ENDLESS["prompt"]] * 5, "stream": is_stream}))
        wait_for_requests(server, 5)
    wait_for_requests(server, 0)
    assert server.metrics()["num_requests_aborted_total"] == before + 5


def test_nothing_is_sent_before_all_prompts_are_known_to_be_valid(server: Server) -> None:
    """The first one has tokens long before the second is refused."""
    refused = server.post({"prompt": ["a", "!tokenise=0.3 !refuse"], "stream": True, "max_tokens": 3})
    assert refused.status == 400 and "prompt[1]" in refused.failure()
    stream = server.post({"prompt": ["a", "!tokenise=0.3 b"], "stream": True, "max_tokens": 3})
    assert stream.status == 200 and stream.is_complete
    wait_for_requests(server, 0)


SLOW_CHAT = [{"role": "user", "content": "!render=9"}]


def ask_slowly(server: Server) -> socket.socket:
    connection = server.connect()
    body = json.dumps({"messages": SLOW_CHAT}).encode()
    connection.sendall(request_bytes("POST", "/v1/chat/completions", body))
    return connection


def test_a_slow_template_delays_no_other_and_is_ended_in_time() -> None:
    with running_server("--request-timeout-s", "0.5", door=OPENAI) as server, ask_slowly(server) as slow:
        start = time.monotonic()
        while time.monotonic() < start + 0.3:
            asked = time.monotonic()
            assert server.get("/health").status == 200
            assert time.monotonic() - asked < 0.3
        response = read_response(slow, OPENAI)
        assert response.status == 504 and "--request-timeout-s" in response.failure()
        assert time.monotonic() - start < 2


def test_a_slow_template_does_not_hold_the_exit() -> None:
    with running_server("--shutdown-grace-s", "0.2", door=OPENAI) as server, ask_slowly(server):
        assert server.get("/health").status == 200  # the chat came first
        server.signal(signal.SIGTERM)
        start = time.monotonic()
        assert server.wait(20) == 0
        assert time.monotonic() - start < 7
        assert "while threads are at work: parse" in server.log


def test_a_list_that_does_not_fit_the_queue_is_refused_whole() -> None:
    flags = ["--max-num-seqs", "1", "--max-waiting-requests", "3"]
    with running_server(*flags, door=OPENAI) as server, server.connect() as connection:
        connection.sendall(server.request({**ENDLESS, "prompt": [ENDLESS["prompt"]] * 3}))
        wait_for_requests(server, 3)
        refused = server.post({"prompt": ["a", "b"]})
        assert_refused(refused, 503, "--max-waiting-requests")
        assert refused.headers["retry-after"] == "1"
        assert server.post({"prompt": ["a"] * 4}).status == 400
        wait_for_requests(server, 3)


def test_errors_of_http_have_the_shape_too(server: Server) -> None:
    missing = server.get("/v2/nothing")
    assert_refused(missing, 404, "/v1/completions")
    assert missing.json()["error"]["type"] == "invalid_request_error"
    assert_refused(server.get("/v1/completions"), 405, "POST")
    assert_refused(server.post(STREAM, "Origin: http://elsewhere"), 403, "--allowed-origins")
    assert_refused(server.exchange(request_bytes("POST", CHAT, b"", "Content-Length: 99999999")), 413, "--max-body-mib")
    assert_refused(server.exchange(b"nonsense\r\n\r\n"), 400, "HTTP")


def test_the_snippets_of_the_page_run() -> None:
    key = "k-1"
    with running_server("--api-key", key, door=OPENAI) as server:
        page = openai_description(DOCUMENT, "fake", ServerConfig(api_key=key))
        for snippet in page.snippets:
            code = snippet.code.replace(ORIGIN, server.url)
            command = ["bash", "-c", code] if snippet.title == "curl" else [sys.executable, "-W", "error", "-c", code]
            environment = {**os.environ, API_KEY_VARIABLE: key}
            result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
            assert (result.returncode, "你好" in result.stdout) == (0, True), result
        assert not [
            snippet for snippet in openai_description(DOCUMENT, "a", ServerConfig()).snippets if "KEY" in snippet.code
        ]


def apply(conversation: list[dict[str, str]], *, chat_template: str, tokenize: bool, **_: Any) -> str:
    return "x"


TEMPLATE = ChatTemplate("", apply, {})


def is_accepted(kind: str, fields: dict[str, Any]) -> bool:
    try:
        asked: Asked
        if kind == "ChatCompletionRequest":
            chat_request = parse_chat_request(json.dumps({"messages": HELLO, **fields}).encode())
            chat_request.chat.rendered(TEMPLATE)
            asked = chat_request
        else:
            asked = parse_completion_request(json.dumps({"prompt": "a", **fields}).encode(), 4)
        asked.params.check_limits(vocab_size=10**30, max_num_seqs=9, max_logprobs=8)
    except RequestError:
        return False
    return True


DOCUMENT = openai_document(EngineConfig(max_num_seqs=9, max_logprobs=8), ServerConfig(max_waiting_requests=4))
BEAMS = {"use_beam_search": True, "best_of": 2, "temperature": 0}
COMPANIONS: dict[str, dict[str, Any]] = {
    "length_penalty": BEAMS,
    "early_stopping": BEAMS,
    "min_tokens": {"max_tokens": 10**6},
    "stream_options": {"stream": True},
    "continue_final_message": {"add_generation_prompt": False},
    "top_logprobs": {"logprobs": True},
    "max_tokens": {"echo": True},
}
"""What the other fields must be where only rules between fields stand against a value."""


MESSAGES: list[Any] = [
    HELLO,
    [{"role": "user"}],
    [{"content": "a"}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": "a", "name": "b", "tool_calls": []}],
    [{"role": "user", "content": "a", "name": 5}],
    [{"role": "user", "content": "a", "tool_calls": [{}]}],
    [{"role": "user", "content": "a", "other": 1}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}]}, *HELLO],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "image_url", "text": "a"}]}],
]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        for kind in ("CompletionRequest", "ChatCompletionRequest")
        for name in DOCUMENT["components"]["schemas"][kind]["properties"]
    ],
)
def test_a_field_takes_what_its_schema_allows(kind: str, name: str) -> None:
    schema = DOCUMENT["components"]["schemas"][kind]["properties"][name]
    companions = COMPANIONS.get(name, {})
    if (kind, name) == ("ChatCompletionRequest", "max_tokens"):
        companions = {}
    values = [*VALUES_OF_ALL_TYPES, *(MESSAGES if name == "messages" else examples(schema))]
    for value in values:
        beams = BEAMS if name == "use_beam_search" and value is True else companions
        assert is_accepted(kind, {**beams, name: value}) == allows(schema, value), (name, value)


def test_the_document_names_every_path_and_answers_fit_it() -> None:
    flags = ["--model", str(cached_checkpoint()), "--chat-template", "{{ messages[0].content }}"]
    with running_server(*flags, module=REAL, door=OPENAI) as server:
        document = server.get("/openapi.json").json()
        assert document == openai_document(EngineConfig(), ServerConfig())
        schemas = document["components"]["schemas"]
        missing = server.get("/nothing")
        assert all(path in missing.failure() for path in document["paths"])
        assert allows(schemas["Failure"], missing.json())
        asked = {"logprobs": 2, "echo": True, "n": 2}
        assert allows(schemas["Completion"], server.post({"prompt": ["a", "b"], **asked}).json())
        assert allows(schemas["Completion"], server.post({"prompt": "a"}).json())
        assert allows(schemas["ChatCompletion"], ask_chat(server, logprobs=True, top_logprobs=2).json())
        assert allows(schemas["ChatCompletion"], ask_chat(server).json())
        page = server.get("/docs").body.decode()
        assert all(path in page for path in document["paths"])
        [model] = server.get("/v1/models").json()["data"]
        assert allows(schemas["Model"], model)
