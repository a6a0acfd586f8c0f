"""`GET /docs`: one HTML page out of an OpenAPI document, with everything inlined. Knows no protocol and no engine.

What a protocol adds is a `PageDescription`: snippets for its clients, and which panel tries it.
"""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from string import Template
from typing import Any, Literal

Schema = Mapping[str, Any]
PanelKind = Literal["native", "openai"]
"""Which `docs/panel_<kind>.html` asks for the prompt, and which entry of `PROTOCOLS` in `docs/page.js` runs the panel.
`native` needs the data `delimiter` (null or newline), `openai` needs `model`."""
SET_BY_PANEL: Mapping[PanelKind, Sequence[str]] = {
    "native": ("stream", "details", "stream_deltas"),
    "openai": ("model", "stream", "stream_options"),
}
"""Fields that a panel sends whatever its user wants."""
ORIGIN = "{origin}"
"""Stands for the server's own URL in a snippet."""
MIN_POWER = 2**31
"""From here on a bound that is a power of two is shown as one."""


@dataclass(frozen=True)
class Snippet:
    """A client as short as it gets. `code` may hold `ORIGIN`."""

    title: str
    code: str


@dataclass(frozen=True)
class PageDescription:
    """What a page shows beside its OpenAPI document."""

    document: Schema
    model_name: str
    origin: str
    """The server's URL as far as it knows it; a browser puts the one that it used in its place."""
    needs_key: bool
    snippets: Sequence[Snippet]
    panel: PanelKind
    panel_data: Mapping[str, str] = field(default_factory=dict)
    """`data-` attributes of the panel, which its script reads."""


@dataclass(frozen=True)
class DocsPage:
    """The page, and the headers to send it with: they allow what is inlined, the server's own routes, and no more."""

    html: str
    headers: Mapping[str, str]


def docs_page(description: PageDescription) -> DocsPage:
    """Builds the page. It holds nothing secret but what the document and the model's name tell."""
    info = description.document["info"]
    style, script = _part("page.css"), _part("page.js")
    html = Template(_part("page.html")).substitute(
        title=escape(info["title"]),
        version=escape(info["version"]),
        about=_prose(info.get("description", "")),
        model_name=escape(description.model_name.encode(errors="replace").decode()),  # may be any bytes
        key_note=_key_note(description.document) if description.needs_key else "",
        panel=_panel(description),
        snippets="\n".join(_snippets(description)),
        routes=_routes(description),
        operations="\n".join(_operations(description.document)),
        style=style,
        script=script,
    )
    policy = (
        f"default-src 'none'; style-src {_hash_source(style)}; script-src {_hash_source(script)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return DocsPage(html, headers)


def type_of(schema: Schema) -> str:
    """The type of a field in words, without null."""
    if "enum" in schema:
        return _either([json.dumps(value) for value in schema["enum"] if value is not None])
    if "anyOf" in schema:
        return _either([type_of(choice) for choice in schema["anyOf"] if choice != {"type": "null"}])
    if schema.get("type") in ("array", ["array", "null"]):
        items = schema["items"]
        return f"array of ({type_of(items)})" if "anyOf" in items else f"array of {type_of(items)}s"
    if "additionalProperties" in schema and isinstance(schema["additionalProperties"], Mapping):
        return f"object of {type_of(schema['additionalProperties'])}s"
    types = schema.get("type", "any")
    return _either([name for name in ([types] if isinstance(types, str) else types) if name != "null"])


def limits_of(schema: Schema) -> str:
    """The bounds of a field's value in words; empty where it has none."""
    limits = [" or ".join(filter(None, map(limits_of, schema.get("anyOf", ()))))]
    if "exclusiveMinimum" in schema:
        limits.append(f"above {_number(schema['exclusiveMinimum'])}")
    limits.append(_span(schema, "minimum", "maximum"))
    limits.append(_span(schema, "minLength", "maxLength", " characters"))
    for least, most in (("minItems", "maxItems"), ("minProperties", "maxProperties")):
        limits.append(_span(schema, least, most, " entries"))
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), Mapping) and (inner := limits_of(schema[key])):
            limits.append(f"each {inner}")
    return ", ".join(filter(None, limits))


def _span(schema: Schema, least_key: str, most_key: str, unit: str = "") -> str:
    least, most = schema.get(least_key), schema.get(most_key)
    if least is not None and most is not None:
        return f"{_number(least)} to {_number(most)}{unit}"
    if least == 1 and unit:
        return "not empty"
    if least is not None:
        return f"at least {_number(least)}{unit}"
    return "" if most is None else f"at most {_number(most)}{unit}"


def _number(value: float) -> str:
    if abs(value) < MIN_POWER or not isinstance(value, int):
        return f"{value:g}" if isinstance(value, float) else str(value)
    sign, size = ("-" if value < 0 else ""), abs(value)
    if size & (size - 1) == 0:
        return f"{sign}2^{size.bit_length() - 1}"
    return f"{sign}2^{size.bit_length()} - 1" if size & (size + 1) == 0 and not sign else str(value)


def _either(words: Sequence[str]) -> str:
    *first, last = words or ["null"]
    return f"{', '.join(first)} or {last}" if first else last


def _part(name: str) -> str:
    return (files(__package__) / "docs" / name).read_text(encoding="utf-8")


def _hash_source(content: str) -> str:
    """What a Content-Security-Policy allows exactly this content by."""
    return f"'sha256-{b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _key_note(document: Schema) -> str:
    open_routes = [
        _code(path)
        for path, methods in document["paths"].items()
        if all("401" not in operation["responses"] for operation in methods.values())
    ]
    key = _code("Authorization: Bearer <key>")
    return f"<p>It needs a key, sent as {key}, for everything but {' and '.join(open_routes)}.</p>"


def _panel(description: PageDescription) -> str:
    sets = SET_BY_PANEL[description.panel]
    *first, last = map(_code, sets)
    return Template(_part("panel.html")).substitute(
        kind=description.panel,
        names=" ".join(sets),
        sets=f"{', '.join(first)} and {last}",
        attributes=" ".join(f'data-{name}="{escape(value)}"' for name, value in description.panel_data.items()),
        fields=_part(f"panel_{description.panel}.html"),
        key=_part("key_input.html") if description.needs_key else "",
    )


def _snippets(description: PageDescription) -> Iterator[str]:
    origin = f'<span data-origin="">{escape(description.origin)}</span>'
    for snippet in description.snippets:
        code = origin.join(escape(part) for part in snippet.code.split(ORIGIN))
        yield f'<figure class="snippet"><figcaption>{escape(snippet.title)}</figcaption>'
        yield f'<pre tabindex="0" aria-label="{escape(snippet.title)}"><code>{code}</code></pre></figure>'


def _routes(description: PageDescription) -> str:
    rows = []
    for path, methods in description.document["paths"].items():
        for method, operation in methods.items():
            name = _code(f"{method.upper()} {path}")
            # A browser follows a link without the key.
            is_locked = description.needs_key and "401" in operation["responses"]
            if method == "get" and "{" not in path and not is_locked:
                name = f'<a href="{escape(path.removeprefix("/"))}">{name}</a>'
            rows.append((name, _prose(operation["summary"])))
    return _table("Routes of this server", ("Route", "What it answers"), rows)


def _operations(document: Schema) -> Iterator[str]:
    """For each operation that takes a JSON object: its fields, and the statuses that it answers with."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if "requestBody" not in operation:
                continue
            schema = _resolved(document, operation["requestBody"]["content"]["application/json"]["schema"])
            name, anchor = f"{method.upper()} {path}", path.strip("/").replace("/", "-")
            yield f'<section aria-labelledby="{anchor}-fields"><h2 id="{anchor}-fields">Fields of {_code(name)}</h2>'
            yield f"<p>{_prose(schema.get('description', ''))}</p>"
            yield _fields(f"Fields of {name}", schema) + "</section>"
            statuses = [(_code(status), _prose(one["description"])) for status, one in operation["responses"].items()]
            yield f'<section aria-labelledby="{anchor}-answers"><h2 id="{anchor}-answers">Answers of {_code(name)}</h2>'
            yield _table(f"Answers of {name}", ("Status", "When"), sorted(statuses)) + "</section>"


def _resolved(document: Schema, schema: Schema) -> Schema:
    if "$ref" not in schema:
        return schema
    found: Schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return found


def _fields(label: str, schema: Schema) -> str:
    rows = []
    for name, one in schema["properties"].items():
        default = "required" if name in schema.get("required", ()) else _default(one)
        note = ("Deprecated. " if one.get("deprecated") else "") + one.get("description", "")
        rows.append((_code(name), escape(type_of(one)), default, escape(limits_of(one)), _prose(note)))
    return _table(label, ("Field", "Type", "Default", "Limits", "What it does"), rows, css_class="fields")


def _default(schema: Schema) -> str:
    return _code(json.dumps(schema["default"])) if "default" in schema else ""


def _prose(text: str) -> str:
    """Of CommonMark, which OpenAPI's descriptions are, its code spans."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def _table(label: str, columns: Sequence[str], rows: Iterable[Sequence[str]], css_class: str = "") -> str:
    """A table that becomes a list of its rows on a narrow screen; cells are HTML."""
    heads = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    lines = []
    for first, *rest in rows:
        cells = "".join(f'<td data-label="{escape(c)}">{cell}</td>' for c, cell in zip(columns[1:], rest))
        lines.append(f'<tr><th scope="row">{first}</th>{cells}</tr>')
    body = "\n".join(lines)
    return (
        f'<table class="{css_class}" aria-label="{escape(label)}">\n'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"
    )
