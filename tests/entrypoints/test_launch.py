"""From the command line to the ready line: what is printed where, exit codes, TLS, the log."""

from __future__ import annotations

import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.certificates import CERTIFICATE, KEY, KEY_WITH_PASSWORD, OTHER_KEY
from tests.helpers.server import FAKE, ROOT, generate_bytes, read_response, run_server, running_server
from vllm_lite.entrypoints.listening import bind, server_url
from vllm_lite.errors import StartupError


def assert_fails(*flags: str, words: list[str]) -> None:
    start = time.monotonic()
    result = run_server(*flags, module=FAKE)
    assert result.returncode == 1, result
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert all(word in result.stderr for word in words), result.stderr
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--port", "high"], ["--port", "high"]),
        (["--port", "70000"], ["--port", "65535"]),
        (["--no-such-flag"], ["--no-such-flag"]),
        (["--block-size", "7"], ["--block-size", "16"]),
        (["-tp", "2"], ["--tensor-parallel-size", "not supported"]),
        (["--host", "256.1.1.1"], ["--host 256.1.1.1"]),
        (["--host", "203.0.113.7", "--port", "0"], ["--host 203.0.113.7"]),
        (["--ssl-keyfile", "key.pem"], ["--ssl-certfile"]),
    ],
)
def test_bad_flag_is_one_line(flags: list[str], words: list[str]) -> None:
    assert_fails(*flags, words=words)


def test_taken_port_is_named() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = str(sock.getsockname()[1])
        assert_fails("--port", port, words=[f"port {port}", "taken", "--port"])


def test_traceback_only_at_log_level_debug() -> None:
    flags = ["--host", "203.0.113.7", "--port", "0"]
    assert "Traceback" not in run_server(*flags, module=FAKE).stderr
    assert "Traceback" in run_server(*flags, "--log-level", "debug", module=FAKE).stderr


def test_ready_line_is_all_of_stdout_and_works_when_pasted() -> None:
    if shutil.which("curl") is None:
        pytest.skip("the ready line's command needs curl")
    with running_server("--host", "0.0.0.0") as server:
        assert server.url == f"http://127.0.0.1:{server.port}"
        command = server.ready_line[server.ready_line.index("curl ") :]
        result = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=30, check=True)
        assert result.stdout.startswith('{"text":["The capital of France is Hi')
        server.process.terminate()
        assert server.wait() == 0
        assert server.process.stdout is not None
        assert server.process.stdout.read() == ""


def test_flags_without_effect_are_named_in_one_line() -> None:
    flags = ["--swap-space", "8", "--engine-use-ray", "--max_paddings", "3", "--max-context-len-to-capture", "9"]
    with running_server(*flags, "--max-parallel-loading-workers", "2") as server:
        [line] = [line for line in server.log.splitlines() if "without effect" in line]
    for flag in (*flags[::2], "--max-parallel-loading-workers"):
        assert flag.replace("_", "-") in line or flag.isdecimal()


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_tls(tmp_path: Path) -> None:
    flags = ["--ssl-certfile", write(tmp_path, "c.pem", CERTIFICATE), "--ssl-keyfile", write(tmp_path, "k.pem", KEY)]
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with running_server(*flags) as server:
        assert f"curl -k https://127.0.0.1:{server.port}/generate" in server.ready_line
        with context.wrap_socket(server.connect()) as connection:
            connection.sendall(generate_bytes({"prompt": "a", "stream": True, "max_tokens": 3}))
            assert read_response(connection).messages() == ["a Hi", "a Hi é", "a Hi é"]
        with context.wrap_socket(server.connect()) as connection:
            connection.sendall(generate_bytes({"prompt": "!fail=2 a", "stream": True}))
            assert not read_response(connection).is_complete
        own = f"Origin: https://127.0.0.1:{server.port}"
        with context.wrap_socket(server.connect()) as connection:
            connection.sendall(generate_bytes({"prompt": "a"}, f"Host: 127.0.0.1:{server.port}", own))
            assert read_response(connection).status == 200
        with server.connect() as plain:
            plain.sendall(generate_bytes({"prompt": "a"}))
            assert plain.recv(1000) == b""
        assert "Traceback" not in server.log


@pytest.mark.parametrize(("prompt", "is_complete"), [("a", True), ("!fail=2 a", False)])
def test_a_client_of_tls_that_does_not_close_does_not_spoil_the_end(
    tmp_path: Path, prompt: str, is_complete: bool
) -> None:
    flags = ["--ssl-certfile", write(tmp_path, "c.pem", CERTIFICATE), "--ssl-keyfile", write(tmp_path, "k.pem", KEY)]
    context = ssl.create_default_context(cafile=flags[1])
    with running_server(*flags) as server:
        with context.wrap_socket(server.connect(), server_hostname="127.0.0.1") as connection:
            connection.sendall(generate_bytes({"prompt": prompt, "stream": True, "max_tokens": 3}))
            assert read_response(connection).is_complete == is_complete
            server.signal(signal.SIGTERM)
            assert server.wait() == 0, server.log
        assert "Traceback" not in server.log


@pytest.mark.parametrize("key", [None, OTHER_KEY, KEY_WITH_PASSWORD, "no key", CERTIFICATE])
def test_unusable_key_is_named(tmp_path: Path, key: str | None) -> None:
    keyfile = str(tmp_path / "absent.pem") if key is None else write(tmp_path, "key.pem", key)
    certfile = write(tmp_path, "certificate.pem", CERTIFICATE)
    assert_fails("--ssl-certfile", certfile, "--ssl-keyfile", keyfile, "--port", "0", words=[certfile, keyfile])


def test_one_log_line_a_request_without_its_prompt() -> None:
    with running_server() as server:
        server.post({"prompt": "secret " * 1000, "max_tokens": 5})
        server.post({"prompt": "secret", "max_tokens": 5, "stream": True})
        server.post({"prompt": ["secret"]})
        server.post({"prompt": "!fail=2 secret"})
        log = server.log
    lines = [line for line in log.splitlines() if "request " in line]
    assert len(lines) == 4
    assert all(len(line) < 500 for line in lines)
    assert "secret" not in log
    assert all(
        word in lines[0] for word in ("3 prompt tokens", "5 output tokens", "queued", "first token", "total", "length")
    )
    assert "refused" in lines[2]
    assert "failed" in lines[3]


def test_max_log_len_shows_the_beginning_of_the_prompt() -> None:
    with running_server("--max-log-len", "6") as server:
        server.post({"prompt": "secret\nmore"})
        assert "'secret'" in server.log
        assert "more" not in server.log


def test_disable_log_requests() -> None:
    with running_server("--disable-log-requests") as server:
        server.post({"prompt": "a"})
        assert "output tokens" not in server.log


@pytest.mark.parametrize(
    "host, url",
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("localhost", "http://localhost:80"),
    ],
)
def test_server_url_is_reachable_from_this_machine(host: str, url: str) -> None:
    assert server_url(host, 80, is_tls=False) == url


def test_bound_socket_does_not_listen_and_cannot_be_shared() -> None:
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        with pytest.raises(StartupError, match=f"port {port} .* taken"):
            bind("127.0.0.1", port)


def test_http_layer_starts_without_torch() -> None:
    """So that the server of the tests, and a wrong flag, do not wait for it."""
    code = "import sys, vllm_lite.entrypoints.api_server, vllm_lite.entrypoints.launch\n"
    code += "print('torch' in sys.modules or 'transformers' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"
