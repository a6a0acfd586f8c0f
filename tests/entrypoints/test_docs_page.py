"""What `GET /docs` answers with: it shows what the OpenAPI document says, asks nothing of others and is legible."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
from base64 import b64encode
from html.parser import HTMLParser
from typing import Any

import pytest

from tests.helpers.server import running_server
from vllm_lite.config import EngineConfig, ServerConfig
from vllm_lite.entrypoints.docs_page import DocsPage, PageDescription, Snippet, docs_page, limits_of, type_of
from vllm_lite.entrypoints.native.docs import native_description
from vllm_lite.entrypoints.native.openapi import openapi_document, request_schema
from vllm_lite.sampling_params import FIELDS_OF_REQUESTS, SamplingParams

KEY = "s3cret-key"
EVIL = "</style></script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&$title\udcff"


def native_page(model_name: str = "tiny", engine: EngineConfig | None = None, **server: Any) -> DocsPage:
    config = ServerConfig(**server)
    return docs_page(native_description(openapi_document(engine or EngineConfig(), config), model_name, config))


class Page(HTMLParser):
    """The elements of a page, and the rows of its tables as text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.rows: dict[str, list[list[str]]] = {}
        self.texts: dict[str, list[str]] = {}
        self._table = ""
        self._open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        self._open.append(tag)
        self.texts.setdefault(tag, []).append("")
        if tag == "table":
            self._table = attributes["aria-label"] or ""
            self.rows[self._table] = []
        elif tag == "tr":
            self.rows[self._table].append([])
        elif tag in ("th", "td"):
            self.rows[self._table][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts[self._open[-1]][-1] += data
        if {"th", "td"} & set(self._open):
            self.rows[self._table][-1][-1] += data

    def fields(self, operation: str = "POST /generate") -> dict[str, list[str]]:
        """Type, default, limits and note of each field."""
        return {name: rest for name, *rest in self.rows[f"Fields of {operation}"][1:]}


def test_every_field_is_in_the_table() -> None:
    fields = Page(native_page().html).fields()
    schema = request_schema(EngineConfig())
    assert list(fields) == list(schema["properties"])
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(fields) == {*names, *FIELDS_OF_REQUESTS, "prefix_pos"}
    for name, (kind, default, limits, note) in fields.items():
        one = schema["properties"][name]
        assert kind == type_of(one) != ""
        assert limits == limits_of(one)
        assert note.removeprefix("Deprecated. ") == one["description"].replace("`", "")
        assert note != ""
        if name == "prompt":
            assert default == "required"
        elif name != "prefix_pos":
            assert json.loads(default) == one["default"]


@pytest.mark.parametrize(
    ("name", "kind", "default", "limits"),
    [
        ("temperature", "number", "1.0", "at least 0"),
        ("top_p", "number", "1.0", "above 0, at most 1"),
        ("repetition_penalty", "number", "1.0", "above 0"),
        ("n", "integer", "1", "1 to 3"),
        ("logprobs", "integer", "null", "0 to 5"),
        ("max_tokens", "integer", "16", "at least 1"),
        ("seed", "integer", "null", "-2^63 to 2^63 - 1"),
        ("early_stopping", 'false, true or "never"', "false", ""),
        (
            "stop",
            "string or array of strings",
            "null",
            "1 to 1024 characters or at most 64 entries, each 1 to 1024 characters",
        ),
        ("logit_bias", "object of numbers", "null", "at most 1024 entries, each -100 to 100"),
        ("allowed_token_ids", "array of integers", "null", "not empty"),
        ("stream", "any", "false", ""),
    ],
)
def test_types_defaults_and_limits_are_in_words(name: str, kind: str, default: str, limits: str) -> None:
    page = Page(native_page(engine=EngineConfig(max_num_seqs=3, max_logprobs=5)).html)
    assert page.fields()[name][:3] == [kind, default, limits]


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": ["array", "null"], "items": {"type": "string"}}, "array of strings"),
        (
            {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "integer"}]}},
            "array of (string or integer)",
        ),
        ({"enum": ["none", None]}, '"none"'),
        ({"enum": [None]}, "null"),
        ({"type": ["object", "null"], "properties": {}, "additionalProperties": False}, "object"),
        ({}, "any"),
    ],
)
def test_types_that_other_documents_have(schema: dict[str, Any], words: str) -> None:
    assert type_of(schema) == words


def test_routes_and_statuses_are_those_of_the_document() -> None:
    document = openapi_document(EngineConfig(), ServerConfig())
    page = Page(native_page().html)
    routes = [row[0] for row in page.rows["Routes of this server"][1:]]
    assert routes == [f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods]
    statuses = [row[0] for row in page.rows["Answers of POST /generate"][1:]]
    assert statuses == sorted(document["paths"]["/generate"]["post"]["responses"])
    links = [str(attributes["href"]) for tag, attributes in page.elements if tag == "a"]
    assert {"openapi.json", "metrics", "health"} <= set(links)
    anchors = {f"#{attributes['id']}" for _, attributes in page.elements if "id" in attributes}
    assert {link for link in links if link.startswith("#")} <= anchors


def test_several_operations_have_a_table_each() -> None:
    """As an OpenAI-compatible server has."""
    schemas = {
        "Chat": {"type": "object", "required": ["model"], "properties": {"model": {"type": "string"}}},
        "Text": {"type": "object", "properties": {"echo": {"type": "boolean", "default": False}}},
    }
    operations = {
        f"/v1/{name.lower()}": {
            "post": {
                "summary": name,
                "requestBody": {"content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}},
                "responses": {"200": {"description": "An answer."}},
            }
        }
        for name in schemas
    }
    operations["/v1/models/{name}"] = {"get": {"summary": "One.", "responses": {"200": {"description": "It."}}}}
    info = {"title": "other", "version": "1"}
    document = {"info": info, "paths": operations, "components": {"schemas": schemas}}
    description = PageDescription(document, "m", "http://a", False, [Snippet("sh", "curl {origin}/v1")], "native")
    page = Page(docs_page(description).html)
    assert page.fields("POST /v1/chat") == {"model": ["string", "required", "", ""]}
    assert page.fields("POST /v1/text") == {"echo": ["boolean", "false", "", ""]}
    assert ["GET /v1/models/{name}", "One."] in page.rows["Routes of this server"]
    assert not any("{" in str(attributes.get("href")) for _, attributes in page.elements)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_everything_is_escaped() -> None:
    """A folder's name is anybody's text, and so may be what a document says."""
    info = {"title": EVIL, "version": EVIL, "description": EVIL}
    schema = {"type": EVIL, "default": EVIL, "enum": [EVIL], "description": EVIL}
    operation = {
        "summary": EVIL,
        "requestBody": {"content": {"application/json": {"schema": {"properties": {EVIL: schema}}}}},
        "responses": {EVIL: {"description": EVIL}},
    }
    document = {"info": info, "paths": {f"/{EVIL}": {"post": operation, "get": operation}}}
    snippets = [Snippet(EVIL, EVIL + "{origin}")]
    html = docs_page(PageDescription(document, EVIL, EVIL, False, snippets, "native", {"delimiter": EVIL})).html
    plain = Page(docs_page(PageDescription({**document, "paths": {}}, "m", "o", False, [], "native")).html)
    page = Page(html)
    for tag in ("script", "style", "img"):
        assert [tag for tag, _ in page.elements].count(tag) == [tag for tag, _ in plain.elements].count(tag)
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    html.encode(errors="surrogateescape")


def test_nothing_is_asked_of_others() -> None:
    page = Page(native_page().html)
    for tag, attributes in page.elements:
        assert tag not in ("img", "iframe", "object", "embed", "base")
        assert not {"style", "srcset", "action", "formaction", "background"} & set(attributes)
        for name in ("href", "src"):
            assert re.fullmatch(r"#[\w-]+|data:,|\w+(\.json)?", attributes.get(name) or "#a"), (tag, attributes)
    (style,), (script,) = page.texts["style"], page.texts["script"]
    assert not re.search(r"url\(|@import|https?:|//\w+\.", style)
    assert not re.search(r"https?:|\bimport\b|\beval\b|innerHTML|outerHTML|insertAdjacentHTML|Storage|cookie", script)


def test_the_policy_allows_what_is_inlined_and_no_more() -> None:
    page = native_page()
    parsed = Page(page.html)
    directives = dict(part.split(" ", 1) for part in page.headers["Content-Security-Policy"].split("; "))
    for tag in ("style", "script"):
        (content,) = parsed.texts[tag]
        assert len(content) > 1000
        digest = b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert directives.pop(f"{tag}-src") == f"'sha256-{digest}'"
    nothing = dict.fromkeys(("default-src", "base-uri", "form-action", "frame-ancestors"), "'none'")
    assert directives == {**nothing, "connect-src": "'self'", "img-src": "data:"}


def test_every_control_has_a_label() -> None:
    elements = Page(native_page(api_key=KEY).html).elements
    labelled = {attributes["for"] for tag, attributes in elements if tag == "label"}
    controls = {attributes["id"] for tag, attributes in elements if tag in ("input", "textarea", "select")}
    assert controls == labelled == {"prompt", "max_tokens", "temperature", "more", "key"}


def test_only_a_server_with_a_key_speaks_of_one_and_never_shows_it() -> None:
    with_key, without = native_page(api_key=KEY).html, native_page().html
    assert KEY not in with_key
    for word in ("VLLM_LITE_API_KEY", 'id="key"', "Authorization: Bearer &lt;key&gt;"):
        assert word in with_key
        assert word not in without
    assert "for everything but <code>/docs</code> and <code>/health</code>" in with_key
    links = [attributes.get("href") for tag, attributes in Page(with_key).elements if tag == "a"]
    assert "metrics" not in links and "health" in links


@pytest.mark.parametrize(
    ("server", "url"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"host": "0.0.0.0", "port": 81}, "http://127.0.0.1:81"),
        ({"ssl_certfile": "a", "ssl_keyfile": "b"}, "https://127.0.0.1:8000"),
    ],
)
def test_snippets_have_a_url_without_a_script_too(server: dict[str, Any], url: str) -> None:
    assert native_page(**server).html.count(f">{url}</span>/generate") == 3


def contrast(one: str, other: str) -> float:
    """As WCAG 2 has it."""
    lights = []
    for color in (one, other):
        channels = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        lights.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(lights) + 0.05) / (min(lights) + 0.05)


def test_colors_can_be_told_apart() -> None:
    """WCAG AA: 4.5 for text, 3 for the edges of controls."""
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    (style,) = Page(native_page().html).texts["style"]
    schemes = [
        dict(re.findall(r"--(\w[\w-]*): (#\w{6});", block)) for block in re.findall(r":root \{(.*?)\}", style, re.S)
    ]
    assert len(schemes) == 2 and set(schemes[0]) == set(schemes[1])
    for colors in schemes:
        texts = itertools.product(("text", "muted", "accent", "error"), ("page", "raised"))
        for text, ground in [*texts, ("on-accent", "accent")]:
            assert contrast(colors[text], colors[ground]) >= 4.5, (text, ground)
        assert contrast(colors["control"], colors["page"]) >= 3


def test_a_server_sends_it_to_everybody() -> None:
    expected = native_page("fake", stream_delimiter="newline", api_key=KEY, port=0)
    with running_server("--api-key", KEY, "--stream-delimiter", "newline") as server:
        response = server.get("/docs")
        assert response.status == 200
        assert response.body.decode() == expected.html
        assert response.headers["content-type"] == "text/html; charset=utf-8"
        assert expected.headers.items() <= {name: response.headers[name.lower()] for name in expected.headers}.items()
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-content-type-options"] == "nosniff"
        assert server.get("/docs", "Origin: http://elsewhere").status == 403
