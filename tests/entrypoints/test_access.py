"""Who may call the server, what web pages may read of it, and by which id a request is known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.entrypoints.test_native_protocol import ASKED, STREAMED, assert_refused
from tests.helpers.server import Server, running_server
from vllm_lite.config import API_KEY_VARIABLE, ServerConfig, parse_command_line
from vllm_lite.errors import StartupError

KEY = "s3cret/with+signs=="
BEARER = f"Authorization: Bearer {KEY}"


@pytest.fixture(scope="module", params=["flag", "environment"])
def locked(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server that needs the key."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "environment":
            patch.setenv(API_KEY_VARIABLE, KEY)
        flags = ["--api-key", KEY] if request.param == "flag" else []
        with running_server(*flags, "--log-level", "debug") as server:
            arguments = Path(f"/proc/{server.process.pid}/cmdline").read_text()
            assert (KEY in arguments) == (request.param == "flag")
            yield server


@pytest.mark.parametrize("header", [BEARER, f"authorization: bEARER   {KEY}"])
def test_the_key_opens_every_path(locked: Server, header: str) -> None:
    for fields in (ASKED, STREAMED):
        assert locked.post(fields, header).status == 200
    assert locked.get("/metrics", header).status == 200
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
    assert locked.get("/nothing", *headers).status == 401
    assert locked.get("/health", *headers).status == 200
    assert KEY not in locked.log and KEY not in locked.ready_line


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
