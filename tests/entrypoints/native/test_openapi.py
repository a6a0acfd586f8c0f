"""`/openapi.json` says what the checks do: value by value for each field, status by status on a real server."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.checkpoints import cached_checkpoint
from tests.helpers.json_schema import VALUES_OF_ALL_TYPES, allows, examples
from tests.helpers.server import REAL, Response, Server, running_server
from vllm_lite.config import EngineConfig, ServerConfig
from vllm_lite.entrypoints.native.openapi import openapi_document, request_schema
from vllm_lite.entrypoints.native.request_body import parse_generate_request
from vllm_lite.entrypoints.openapi_parts import params_schemas
from vllm_lite.errors import RequestError
from vllm_lite.sampling_params import FIELDS_OF_REQUESTS, SamplingParams

FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]
BEAMS = {"use_beam_search": True, "best_of": 2, "temperature": 0}
COMPANIONS: dict[str, dict[str, Any]] = {
    "length_penalty": BEAMS,
    "early_stopping": BEAMS,
    "min_tokens": {"max_tokens": None},
}
"""What the other fields must be where only rules between fields stand against a value."""


def is_accepted(fields: dict[str, Any]) -> bool:
    try:
        SamplingParams.from_request(fields)
    except RequestError:
        return False
    return True


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_takes_what_its_schema_allows(name: str) -> None:
    schema = params_schemas()[name]
    values = [*VALUES_OF_ALL_TYPES, schema["default"], *examples(schema)]
    for value in values:
        companions = BEAMS if name == "use_beam_search" and value is True else COMPANIONS.get(name, {})
        assert is_accepted({**companions, name: value}) == allows(schema, value), value
    assert {allows(schema, value) for value in values} == {True, False}


def test_a_bound_of_a_field_cannot_be_tightened_unseen() -> None:
    """The test above finds a schema that differs from the checks."""
    looser = {**params_schemas()["top_p"], "maximum": 2}
    assert any(is_accepted({"top_p": value}) != allows(looser, value) for value in examples(looser))


def test_defaults_are_those_of_an_empty_request() -> None:
    defaults = SamplingParams.from_request({})
    schemas = params_schemas()
    assert list(schemas) == FIELDS
    assert {name: getattr(defaults, name) for name in FIELDS} == {name: schemas[name]["default"] for name in FIELDS}


def test_every_field_of_a_request_is_there_and_no_other_is_allowed() -> None:
    schema = request_schema(EngineConfig())
    assert set(schema["properties"]) == {*FIELDS, *FIELDS_OF_REQUESTS, "prefix_pos"}
    for name, body in [("prefix_pos", b'{"prompt":"a","prefix_pos":[1]}'), ("stream", b'{"prompt":"a","stream":"x"}')]:
        parse_generate_request(body)
        assert allows(schema["properties"][name], "x")
    assert not allows(schema, {"prompt": "a", "max_token": 1})
    assert not allows(schema, {"stream": True})


def test_limits_of_the_server_are_those_of_its_command_line() -> None:
    config = EngineConfig(max_num_seqs=3, max_logprobs=5)
    properties = request_schema(config)["properties"]
    for name, most in (("n", 3), ("best_of", 3), ("logprobs", 5), ("prompt_logprobs", 5)):
        for value in (most, most + 1):
            params = SamplingParams.from_request({name: value})
            try:
                params.check_limits(vocab_size=10, max_num_seqs=3, max_logprobs=5)
                accepted = True
            except RequestError:
                accepted = False
            assert accepted == (value <= most) == allows(properties[name], value)


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        yield from ([node["$ref"]] if "$ref" in node else [])
    for value in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from references(value)


def test_structure() -> None:
    """Of OpenAPI 3.1: what must be there is there, and references lead somewhere."""
    document = openapi_document(EngineConfig(), ServerConfig())
    assert re.fullmatch(r"3\.1\.\d+", document["openapi"])
    assert {"title", "version"} <= set(document["info"])
    names = [f"#/components/schemas/{name}" for name in document["components"]["schemas"]]
    assert set(references(document)) == set(names)
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations) == 5
    for operation in operations:
        for status, response in operation["responses"].items():
            assert re.fullmatch(r"[1-5]\d\d", status)
            assert response["description"]
            assert all(set(media) == {"schema"} for media in response.get("content", {}).values())


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = f"--model {cached_checkpoint()} --max-num-seqs 4 --max-logprobs 3 --max-body-mib 1"
    with running_server(*flags.split(), module=REAL) as server:
        yield server


def assert_documented(document: dict[str, Any], response: Response, path: str, method: str = "post") -> None:
    content = document["paths"][path][method]["responses"][str(response.status)].get("content", {})
    if not content:
        assert response.body == b""
        return
    content_type = response.headers["content-type"].partition(";")[0]
    reference = content[content_type]["schema"].get("$ref")
    if reference is not None:
        schema = document["components"]["schemas"][reference.rpartition("/")[2]]
        assert allows(schema, response.json()), response.raw


def test_a_server_serves_it_and_keeps_to_it(server: Server) -> None:
    response = server.get("/openapi.json")
    assert response.status == 200
    document = response.json()
    assert document == openapi_document(EngineConfig(max_num_seqs=4, max_logprobs=3), ServerConfig(max_body_mib=1))
    for path, methods in document["paths"].items():
        assert list(methods) == ["post" if path == "/generate" else "get"]
        wrong = "DELETE"
        refused = server.exchange(f"{wrong} {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
        assert refused.status == 405
        assert set(refused.headers["allow"].split(", ")) - {"HEAD"} == {method.upper() for method in methods}
        assert path in server.get("/nothing").json()["detail"]
    for path in ("/docs", "/health", "/metrics", "/openapi.json"):
        assert_documented(document, server.get(path), path, "get")
        foreign = server.get(path, "Origin: http://elsewhere")
        assert foreign.status == 403
        assert_documented(document, foreign, path, "get")


def test_answers_are_as_documented(server: Server) -> None:
    document = server.get("/openapi.json").json()
    details = {"details": True, "logprobs": 2, "prompt_logprobs": 1, "stop": "a", "stop_token_ids": [70, 71, 72, 73]}
    cases: list[tuple[dict[str, Any], int]] = [
        ({}, 200),
        (details, 200),
        ({"details": True, "n": 2}, 200),
        ({"n": 4}, 200),
        ({"n": 5}, 400),
        ({"logprobs": 4}, 400),
    ]
    for fields, status in cases:
        response = server.post({"prompt": "a", **fields})
        assert response.status == status
        assert_documented(document, response, "/generate")
    large = server.post(b'"' + b"x" * 2**20 + b'"')
    assert large.status == 413
    assert_documented(document, large, "/generate")
    stream = server.post({"prompt": "a", "stream": True, **details})
    content = document["paths"]["/generate"]["post"]["responses"]["200"]["content"]
    assert stream.headers["content-type"] in content
    for message in stream.body.split(b"\0")[:-1]:
        assert allows(document["components"]["schemas"]["Answer"], json.loads(message))
