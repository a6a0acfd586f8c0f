"""Who may call the server, what web pages may read of it, and by which id a request is known."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scripts.bench import server as bench_server
from scripts.bench.client import exchange
from tests.helpers.checkpoints import cached_checkpoint
from tests.helpers.doors import Door
from tests.helpers.native_requests import ASKED, STREAMED
from tests.helpers.server import (
    FAKE,
    REAL,
    Response,
    Server,
    assert_refused,
    read_response,
    request_bytes,
    running_server,
)
from vllm_lite.config import API_KEY_VARIABLE, ServerConfig, parse_command_line
from vllm_lite.errors import StartupError

KEY = "s3cret/with+signs=="
BEARER = f"Authorization: Bearer {KEY}"


@pytest.fixture(scope="module", params=["flag", "environment"])
def locked(request: pytest.FixtureRequest, door: Door) -> Iterator[Server]:
    """A server that needs the key."""
    is_flag = request.param == "flag"
    flags = ["--api-key", KEY] if is_flag else []
    with running_server(*flags, "--log-level", "debug", api_key=None if is_flag else KEY, door=door) as server:
        arguments = Path(f"/proc/{server.process.pid}/cmdline").read_text()
        assert (KEY in arguments) == is_flag
        yield server


@pytest.mark.parametrize("header", [BEARER, f"authorization: bEARER   {KEY}"])
def test_the_key_opens_every_path(locked: Server, header: str) -> None:
    for fields in (ASKED, STREAMED):
        assert locked.post(fields, header).status == 200
    assert locked.get("/metrics", header).status == locked.get("/openapi.json", header).status == 200
    assert locked.get("/nothing", header).status == 404


@pytest.mark.parametrize(
    ("headers", "word"),
    [
        ([], "Authorization: Bearer"),
        (["Authorization: Bearer"], "Authorization: Bearer"),
        ([f"Authorization: {KEY}"], "Authorization: Bearer"),
        ([f"Authorization: Basic {KEY}"], "wrong"),
        ([f"Authorization: Bearer {KEY}x"], "wrong"),
        ([f"Authorization: Bearer {KEY[:-1]}"], "wrong"),
        ([f"Authorization: Bearer {KEY.upper()}"], "wrong"),
        (["Authorization: Bearer \xff\xfe"], "wrong"),
        (["Authorization: Bearer wrong", BEARER], "wrong"),
    ],
    ids=str,
)
def test_without_the_key_nothing_but_health_answers(locked: Server, headers: list[str], word: str) -> None:
    for response in (locked.post(ASKED, *headers), locked.post(STREAMED, *headers), locked.get("/metrics", *headers)):
        assert_refused(response, 401, word)
        assert response.headers["www-authenticate"] == "Bearer"
        assert KEY.encode() not in response.raw
    assert locked.get("/nothing", *headers).status == locked.get("/openapi.json", *headers).status == 401
    assert locked.get("/health", *headers).status == 200
    assert KEY not in locked.log and KEY not in locked.ready_line


def test_a_developers_own_key_is_not_that_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "of-the-developer")
    with running_server() as server:
        assert server.get("/metrics").status == 200
    with bench_server.running({}, command=[sys.executable, "-m", FAKE]) as started:
        assert exchange(started.address, [b"GET /metrics HTTP/1.0\r\n\r\n"])[0].body()


def test_the_flag_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "of-the-environment")
    assert parse_command_line([])[1].api_key == "of-the-environment"
    assert parse_command_line(["--api-key", "of-the-flag"])[1].api_key == "of-the-flag"


@pytest.mark.parametrize("key", ["", "in two", "schlüssel", "a\n", 5])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(StartupError, match="--api-key") as caught:
        ServerConfig(api_key=key)
    assert not str(key) or str(key) not in str(caught.value)


def test_the_key_is_not_shown_with_the_other_options() -> None:
    assert KEY not in repr(ServerConfig(api_key=KEY))


@pytest.fixture(scope="module")
def server(door: Door) -> Iterator[Server]:
    with running_server(door=door) as server:
        yield server


def exchanges(server: Server, *headers: str) -> list[Response]:
    """One of each kind of answer."""
    return [
        server.post(ASKED, *headers),
        server.post(STREAMED, *headers),
        server.post({"prompt": 5}, *headers),
        server.post({"prompt": "!fail=0 a"}, *headers),
        server.post({"prompt": "!fail=2 a", "stream": True}, *headers),
        server.get("/health", *headers),
        server.get("/metrics", *headers),
        server.get("/nothing", *headers),
        server.get(server.door.path, *headers),
    ]


KINDS = [200, 200, 400, 500, 200, 200, 200, 404, 405]


@pytest.mark.parametrize("own", ["a", "Trace_1.2-b", "x" * 64])
def test_a_clients_request_id_is_taken(server: Server, own: str) -> None:
    responses = exchanges(server, f"X-Request-Id: {own}")
    assert [response.status for response in responses] == KINDS
    assert {response.headers["x-request-id"] for response in responses} == {own}
    assert f"request {own} (" in server.log


@pytest.mark.parametrize("own", [None, "", "x" * 65, "a b", "a/b", "é", "a,b", "\xff"])
def test_other_requests_get_an_id_of_their_own(server: Server, own: str | None) -> None:
    responses = exchanges(server, *(() if own is None else (f"X-Request-Id: {own}",)))
    assert [response.status for response in responses] == KINDS
    ids = [response.headers["x-request-id"] for response in responses]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch("[0-9a-f]{32}", request_id) for request_id in ids)
    for request_id, response in zip(ids, responses):
        assert (f"request {request_id}: " in server.log) == (response in responses[:5])


def test_clients_that_send_the_same_id_at_once_are_kept_apart(door: Door) -> None:
    flags = ["--model", str(cached_checkpoint())]
    with running_server(*flags, module=REAL, door=door) as server, ThreadPoolExecutor(8) as pool:
        prompts = [f"{number} is" for number in range(8)]
        bodies = [{"prompt": prompt, "max_tokens": 20, "temperature": 0} for prompt in prompts]
        alone = [server.text(**body) for body in bodies]
        together = list(pool.map(lambda body: server.post(body, "X-Request-Id: same"), bodies))
        assert [response.text() for response in together] == alone
        assert server.log.count("request same (") == 8


def test_a_connection_that_is_kept_alive_has_an_id_for_each_request(server: Server) -> None:
    with server.connect() as connection:
        ids = []
        for headers in (["X-Request-Id: one"], [], ["X-Request-Id: two"], []):
            connection.sendall(request_bytes("GET", "/health", b"", "Connection: keep-alive", *headers))
            ids.append(read_response(connection).headers["x-request-id"])
    assert ids[::2] == ["one", "two"]
    assert len(set(ids)) == 4


PAGE = "http://page.example:3000"
PREFLIGHT = ["Access-Control-Request-Method: POST", "Access-Control-Request-Headers: content-type"]


def preflight(server: Server, *headers: str) -> Response:
    return server.exchange(request_bytes("OPTIONS", server.door.path, b"", *headers))


def cors_headers(response: Response) -> set[str]:
    return {name for name in response.headers if name.startswith("access-control-")}


@pytest.fixture(scope="module", params=[f"https://other.example,{PAGE}/", "*"], ids=["listed", "all"])
def shared(request: pytest.FixtureRequest, door: Door) -> Iterator[Server]:
    """A server that pages may call."""
    with running_server("--allowed-origins", request.param, "--api-key", KEY, door=door) as server:
        yield server


@pytest.mark.parametrize("origin", [PAGE, "https://other.example"])
def test_pages_may_read_every_answer(shared: Server, origin: str) -> None:
    responses = [*exchanges(shared, BEARER, f"Origin: {origin}"), shared.post(ASKED, f"Origin: {origin}")]
    assert [response.status for response in responses] == [*KINDS, 401]
    for response in responses:
        assert response.headers["access-control-allow-origin"] == origin
        assert response.headers["vary"] == "Origin"
        assert "X-Request-Id" in response.headers["access-control-expose-headers"]


def test_a_preflight_is_answered_without_a_key(shared: Server) -> None:
    response = preflight(shared, f"Origin: {PAGE}", *PREFLIGHT)
    assert (response.status, response.body) == (204, b"")
    assert response.headers["access-control-allow-origin"] == PAGE
    assert response.headers["access-control-allow-methods"] == "GET, POST"
    assert response.headers["access-control-allow-headers"] == "Authorization, Content-Type, X-Request-Id"
    assert response.headers["vary"] == "Origin"


def test_what_is_no_preflight_of_a_page_needs_the_key(shared: Server) -> None:
    assert preflight(shared, *PREFLIGHT).status == 401
    assert preflight(shared, f"Origin: {PAGE}").status == 401
    assert_refused(preflight(shared, f"Origin: {PAGE}", BEARER), 405, "OPTIONS")


def test_answers_to_scripts_only_tell_caches_that_pages_differ(shared: Server) -> None:
    for response in exchanges(shared, BEARER):
        assert not cors_headers(response)
        assert response.headers["vary"] == "Origin"


def test_an_origin_that_no_header_can_carry_is_refused(shared: Server) -> None:
    for response in (shared.post(ASKED, BEARER, "Origin: http://\xff"), preflight(shared, "Origin: \xe9", *PREFLIGHT)):
        assert_refused(response, 403, "--allowed-origins")
        assert not cors_headers(response)


def test_methods_and_headers_are_settable() -> None:
    flags = ["--allowed-origins", PAGE, "--allowed-methods", "POST", "--allowed-headers", "x-a, X-B"]
    with running_server(*flags) as server:
        response = preflight(server, f"Origin: {PAGE}", *PREFLIGHT)
        assert response.headers["access-control-allow-methods"] == "POST"
        assert response.headers["access-control-allow-headers"] == "x-a, X-B"
        refused = preflight(server, "Origin: http://page.example", *PREFLIGHT)
        assert_refused(refused, 403, "http://page.example")
        assert not cors_headers(refused)


def test_without_the_option_nothing_is_told_to_browsers(server: Server) -> None:
    own = f"Origin: http://127.0.0.1:{server.port}"
    host = f"Host: 127.0.0.1:{server.port}"
    for response in (server.post(ASKED, own, host), preflight(server, own, host, *PREFLIGHT), server.post(ASKED)):
        assert not cors_headers(response) and "vary" not in response.headers
    assert preflight(server, own, host, *PREFLIGHT).status == 405
    assert preflight(server, f"Origin: {PAGE}", host, *PREFLIGHT).status == 403


@pytest.mark.parametrize("flag", ["--allowed-methods", "--allowed-headers"])
@pytest.mark.parametrize("value", ["a b", "a:b", "ä", 'a"', "a\nb"])
def test_words_that_http_has_not_are_named(flag: str, value: str) -> None:
    with pytest.raises(StartupError, match=f"{flag} must be words"):
        parse_command_line([flag, f"X,{value}"])
