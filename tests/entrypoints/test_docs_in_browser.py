"""`GET /docs` in a real browser: it loads without a complaint, streams, stops, shows errors, and fits a phone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from tests.helpers.browser import WAIT_S, Browser, running_browser
from tests.helpers.checkpoints import cached_checkpoint
from tests.helpers.server import REAL, Server, running_server
from vllm_lite.entrypoints.docs_page import PageDescription, docs_page

KEY = "s3cret/with+signs=="
ENDLESS = "!delay=0.02 on and on"
"""The fake engine takes its time over this prompt."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server() as server:
        yield server


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Browser]:
    """Whatever a test does with it, the page asks its own server alone, and no request is left behind."""
    browser.open(f"{server.url}/docs")
    yield browser
    assert {url.removeprefix(server.url) for url in browser.requested_urls()} <= {"/docs", "/generate"}
    wait_until_idle(server)


def wait_until_idle(server: Server) -> None:
    end = time.monotonic() + WAIT_S
    while server.metrics()["num_requests_running"]:
        assert time.monotonic() < end, "a request is still running"
        time.sleep(0.02)


def ask(page: Browser, prompt: str, max_tokens: str = "12", more: str = "") -> None:
    for css, text in (("#prompt", prompt), ("#max_tokens", max_tokens), ("#more", more)):
        page.fill(css, text)
    page.find("#send").click()


def candidates(page: Browser) -> list[str]:
    texts: list[str] = page.run("return [...document.querySelectorAll('.candidate')].map(one => one.textContent)")
    return texts


def test_it_loads_in_one_request_and_without_a_complaint(page: Browser, server: Server) -> None:
    assert page.requested_urls() == [f"{server.url}/docs"]
    assert page.console() == []
    assert page.driver.title == "vllm_lite · fake"
    assert page.text("[data-origin]") == server.url
    assert page.run("return getComputedStyle(document.querySelector('#send')).backgroundColor") == "rgb(11, 107, 97)"


@pytest.mark.parametrize("width", [320, 360, 700, 960, 976, 1300])
def test_it_fits_the_window(page: Browser, width: int) -> None:
    page.set_window(width)
    try:
        page.driver.refresh()
        ask(page, "x" * 300)
        page.wait_for_text("#reason", "length")
        assert page.run("return innerWidth") == width
        visible, whole = page.run("return ['clientWidth', 'scrollWidth'].map(name => document.documentElement[name])")
        assert visible == whole
        assert page.find("#generate-fields").is_displayed()
    finally:
        page.command("Emulation.clearDeviceMetricsOverride")


def test_it_follows_the_systems_colors(page: Browser) -> None:
    grounds = []
    for scheme in ("light", "dark"):
        page.set_colors(scheme)
        grounds.append(page.run("return getComputedStyle(document.body).backgroundColor"))
    page.command("Emulation.setEmulatedMedia", features=[])
    assert grounds == ["rgb(253, 253, 252)", "rgb(22, 24, 27)"]


def test_it_streams(page: Browser, server: Server) -> None:
    ask(page, "Hello", max_tokens="30")
    page.wait_for_text("#reason", "length")
    assert candidates(page) == [server.text(prompt="Hello", max_tokens=30).removeprefix("Hello")]
    assert page.text("#tokens") == "30"
    assert float(page.text("#rate")) > 0
    assert re.fullmatch(r"\d+ ms|\d+\.\d\d s", page.text("#first"))
    assert page.text("#error") == ""
    assert page.console() == []


def test_it_shows_text_before_the_answer_is_complete(page: Browser) -> None:
    ask(page, ENDLESS, max_tokens="null")
    page.wait_for_number("#tokens", 5)
    assert candidates(page)[0].startswith(" Hi é\n\0")
    assert page.find("#output").get_attribute("aria-busy") == "true"
    assert not page.find("#send").is_enabled()
    page.find("#stop").click()
    page.wait_for_text("#reason", "stopped by you")
    assert page.find("#output").get_attribute("aria-busy") == "false"


@pytest.mark.parametrize("way", ["button", "escape", "leave"])
def test_stop_aborts_the_request(page: Browser, server: Server, way: str) -> None:
    num_aborted = server.metrics()["num_requests_aborted_total"]
    ask(page, ENDLESS, max_tokens="null")
    page.wait_for_number("#tokens", 3)
    assert server.metrics()["num_requests_running"] == 1
    if way == "leave":
        page.driver.get("about:blank")
    else:
        page.find("#stop" if way == "button" else "body").send_keys(Keys.SPACE if way == "button" else Keys.ESCAPE)
        page.wait_for_text("#reason", "stopped by you")
    wait_until_idle(server)
    assert server.metrics()["num_requests_aborted_total"] == num_aborted + 1


def test_stop_works_before_the_first_token(page: Browser) -> None:
    ask(page, "!delay=100 slow")
    page.find("#stop").click()
    page.wait_for_text("#reason", "stopped by you")
    assert page.text("#error") == ""
    ask(page, "again", max_tokens="2")
    page.wait_for_text("#reason", "length")


@pytest.mark.parametrize("temperature", ["-1", "warm", "null", '"0'])
def test_a_400_is_shown_in_the_servers_words(page: Browser, server: Server, temperature: str) -> None:
    values = {"-1": -1, "null": None}
    response = server.post({"prompt": "a", "temperature": values.get(temperature, temperature)})
    page.fill("#temperature", temperature)
    ask(page, "a", max_tokens="2")
    if response.status == 200:
        page.wait_for_text("#reason", "length")
    else:
        page.wait_for_text("#error", f"400: {response.json()['detail']}")
        assert candidates(page) == []
        assert page.find("#send").is_enabled()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ('{"top_p": 0.9', "no JSON"),
        ("[1]", "must be an object"),
        ("null", "must be an object"),
        ('{"stream": false}', "leave out stream"),
        ('{"max_tokens": 3}', "leave out max_tokens"),
        ('{"top_p": 2}', "400: top_p must be in (0, 1], got 2."),
        ('{"top": 2}', "400: 'top' is not a known field; did you mean"),
    ],
)
def test_mistakes_in_more_fields_are_named(page: Browser, more: str, words: str) -> None:
    ask(page, "a", more=more)
    page.wait_for_part("#error", words)
    assert candidates(page) == []
    assert page.find("#send").is_enabled()


def test_empty_fields_are_left_to_the_servers_defaults(page: Browser) -> None:
    page.fill("#temperature", "")
    ask(page, "a", max_tokens="")
    page.wait_for_text("#tokens", "16")


def test_a_failure_in_mid_stream_is_shown(page: Browser) -> None:
    ask(page, "!delay=0.1 !fail=2 a")
    page.wait_for_part("#error", "The connection failed")
    assert candidates(page) == [" Hi é"]


def test_candidates_are_shown_one_by_one(page: Browser, server: Server) -> None:
    page.fill("#temperature", "1")
    ask(page, "a", more='{"n": 3}')
    page.wait_for_text("#reason", "length")
    assert candidates(page) == [server.text(prompt="a", max_tokens=12).removeprefix("a")] * 3
    assert page.text("#tokens") == "36"


def test_the_keyboard_is_enough(page: Browser) -> None:
    def press(*keys: str) -> None:
        ActionChains(page.driver).send_keys(*keys).perform()

    def focused() -> str:
        return str(page.run("return document.activeElement.id"))

    press(Keys.TAB)
    assert page.run("return document.activeElement.className") == "skip"
    press(Keys.ENTER)
    assert focused() == "main"
    for expected in ("prompt", "max_tokens", "temperature", "more", "send"):
        press(Keys.TAB)
        assert focused() == expected
        assert page.run("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.fill("#prompt", ENDLESS)
    page.fill("#max_tokens", "null")
    page.find("#send").send_keys(Keys.ENTER)
    page.wait_for_number("#tokens", 2)
    assert focused() == "stop"
    press(Keys.ENTER)
    page.wait_for_text("#reason", "stopped by you")
    assert focused() == "send"
    page.fill("#prompt", "a")
    page.fill("#max_tokens", "2")
    press(Keys.ENTER)
    page.wait_for_text("#tokens", "2")
    page.find("#prompt").send_keys(Keys.ENTER)
    assert page.run("return document.getElementById('prompt').value") == "a\n"
    page.fill("#max_tokens", "4")
    page.find("#prompt").send_keys(Keys.CONTROL, Keys.ENTER)
    page.wait_for_text("#tokens", "4")


def copied_snippets(page: Browser) -> list[str]:
    """What the clipboard holds after each button."""
    page.command("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    codes: list[str] = []
    for button in page.find_all(".snippet button"):
        button.click()
        page.wait_for_text(f".snippet:nth-of-type({len(codes) + 1}) button", "Copied")
        codes.append(str(page.driver.execute_async_script("navigator.clipboard.readText().then(arguments[0])")))
    return codes


@pytest.mark.parametrize("delimiter", ["null", "newline"])
def test_with_a_key_and_either_delimiter(browser: Browser, delimiter: str) -> None:
    """The page needs none, the panel asks for it, and the snippets run as they are copied."""
    with running_server("--api-key", KEY, "--stream-delimiter", delimiter) as server:
        browser.open(f"{server.url}/docs")
        ask(browser, "a")
        browser.wait_for_part("#error", "401: this server needs a key")
        browser.fill("#key", KEY)
        ask(browser, "a")
        browser.wait_for_text("#tokens", "12")
        answer = server.post({"prompt": "a", "max_tokens": 12}, f"Authorization: Bearer {KEY}").json()
        assert candidates(browser) == [answer["text"][0].removeprefix("a")]
        assert browser.run("return localStorage.length + sessionStorage.length + document.cookie.length") == 0
        assert {url.removeprefix(server.url) for url in browser.requested_urls()} == {"/docs", "/generate"}
        curl, whole, streamed = copied_snippets(browser)
        browser.driver.refresh()
        assert browser.run("return document.getElementById('key').value") == ""
        environment = {**os.environ, "VLLM_LITE_API_KEY": KEY}
        for code in (whole, streamed):
            assert server.url in code
            command = [sys.executable, "-c", code]
            run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
            assert " 你好" in run.stdout
            assert len(run.stdout.splitlines()) > (32 if code is streamed else 2)
        assert curl.startswith(f"curl {server.url}/generate")
        if shutil.which("curl"):
            command = ["sh", "-c", curl]
            run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
            assert '{"text":["The capital of France is' in run.stdout


CHUNKS = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {"content": "Par\n\n"}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {"content": "is 你好"}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {"completion_tokens": 7}},
]
"""What an OpenAI-compatible server streams."""


@contextmanager
def openai_server(chunks: list[Any], end: str) -> Iterator[tuple[str, list[Any]]]:
    """Its URL and what was posted to it. Sends its events in pieces of three bytes, as a network may."""
    document = {"info": {"title": "t", "version": "1", "description": "d"}, "paths": {}}
    page = docs_page(PageDescription(document, "m", "http://a", False, [], "openai", {"model": "m"}))
    posted: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def answer(self, content_type: str, headers: Mapping[str, str] = MappingProxyType({})) -> None:
            self.send_response(200)
            for name, value in {"Content-Type": content_type, **headers}.items():
                self.send_header(name, value)
            self.end_headers()

        def do_GET(self) -> None:
            self.answer("text/html; charset=utf-8", page.headers)
            self.wfile.write(page.html.encode())

        def do_POST(self) -> None:
            posted.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.answer("text/event-stream")
            events = "".join(f"data: {json.dumps(chunk, ensure_ascii=False)}{end}{end}" for chunk in chunks)
            data = f": a comment{end}{end}{events}data: [DONE]{end}{end}".encode()
            for start in range(0, len(data), 3):
                self.wfile.write(data[start : start + 3])
                self.wfile.flush()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", posted
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["lf", "crlf"])
def test_the_panel_of_an_openai_server(browser: Browser, end: str) -> None:
    with openai_server(CHUNKS, end) as (url, posted):
        browser.open(f"{url}/docs")
        browser.fill("#more", '{"top_p": 0.5}')
        browser.find("#send").click()
        browser.wait_for_text("#reason", "stop")
        browser.wait_for_text("#tokens", "7")
        assert candidates(browser) == ["Par\n\nis 你好"]
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        fields = {"model": "m", "messages": messages, "max_tokens": 64, "temperature": 0, "top_p": 0.5}
        sent = {**fields, "stream": True, "stream_options": {"include_usage": True}}
        assert posted == [("/v1/chat/completions", sent)]
        assert browser.console() == []


@pytest.mark.parametrize(
    ("chunks", "words"),
    [(CHUNKS[:2], "ended before the answer was complete"), ([CHUNKS[1], {"error": {"message": "broke"}}], "broke")],
)
def test_an_openai_stream_that_fails(browser: Browser, chunks: list[Any], words: str) -> None:
    with openai_server(chunks, "\n") as (url, _):
        browser.open(f"{url}/docs")
        browser.find("#send").click()
        browser.wait_for_part("#error", words)
        assert candidates(browser) == ["Par\n\n"]


def test_with_a_real_engine(browser: Browser) -> None:
    with running_server("--model", str(cached_checkpoint()), module=REAL) as server:
        browser.open(f"{server.url}/docs")
        for more in ('{"ignore_eos": true}', '{"use_beam_search": true, "n": 2, "best_of": 3}'):
            fields = {"ignore_eos": True} if "ignore" in more else {"use_beam_search": True, "n": 2, "best_of": 3}
            answer = server.post({"prompt": "Hello", "max_tokens": 20, "temperature": 0, **fields}).json()
            ask(browser, "Hello", max_tokens="20", more=more)
            browser.wait_for_text("#tokens", str(20 * len(answer["text"])))
            assert candidates(browser) == [text.removeprefix("Hello") for text in answer["text"]]
        assert browser.console() == []
        wait_until_idle(server)
        assert server.metrics()["num_free_kv_blocks"] == server.metrics()["num_total_kv_blocks"]
