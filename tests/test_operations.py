"""What the README says of running behind nginx and under a supervisor."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.programs import find_program
from tests.helpers.server import Server, generate_bytes, read_response, request_bytes, running_server
from tests.helpers.waiting import wait_for_requests
from vllm_lite.config import ServerConfig, parse_command_line

README = (Path(__file__).parent.parent / "README.md").read_text()
START_WITHIN_S = 20
STREAM = {"prompt": "!delay=0.02 x", "stream": True, "max_tokens": 100}


def block(name: str) -> str:
    found = re.search(rf"<!-- {name} -->\n```\w+\n(.*?)```", README, flags=re.DOTALL)
    assert found
    return found[1]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
    return port


class Proxy:
    """A running nginx."""

    def __init__(self, port: int) -> None:
        self.port = port

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)


@contextmanager
def running_nginx(server_port: int, folder: Path) -> Iterator[Proxy]:
    """With the README's configuration, on other ports, and its files in the folder."""
    port = free_port()
    ours = block("nginx").replace("127.0.0.1:8000", f"127.0.0.1:{server_port}")
    ours = ours.replace("listen 80;", f"listen 127.0.0.1:{port};")
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    config = (
        f"daemon off;\nmaster_process off;\npid {folder}/pid;\nevents {{}}\nhttp {{\naccess_log off;\n{paths}{ours}}}\n"
    )
    (folder / "nginx.conf").write_text(config)
    log = folder / "error.log"
    command = [
        find_program("nginx", package="nginx-light"),
        "-p",
        str(folder),
        "-c",
        str(folder / "nginx.conf"),
        "-e",
        str(log),
    ]
    with subprocess.Popen(command) as process:
        proxy = Proxy(port)
        try:
            wait_until_it_listens(proxy, process, log)
            yield proxy
        finally:
            process.terminate()


def wait_until_it_listens(proxy: Proxy, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_WITHIN_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            proxy.connect().close()
        except ConnectionRefusedError:
            time.sleep(0.02)
            continue
        return
    raise AssertionError(f"nginx does not listen: {log.read_text()}")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server("--allowed-origins", "https://public.example") as server:
        yield server
        assert "Traceback" not in server.log


@pytest.fixture(scope="module")
def proxy(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with running_nginx(server.port, tmp_path_factory.mktemp("nginx")) as proxy:
        yield proxy


def test_messages_pass_nginx_one_by_one(proxy: Proxy) -> None:
    """Case H8: the first one long before the last."""
    with proxy.connect() as connection:
        start = time.monotonic()
        connection.sendall(generate_bytes(STREAM))
        received = bytearray()
        while received.count(b"\0") == 0:
            received += connection.recv(65536)
        first_s = time.monotonic() - start
        while data := connection.recv(65536):
            received += data
        assert first_s < 0.2 * (time.monotonic() - start)
    assert received.count(b"\0\r\n") == STREAM["max_tokens"]
    assert received.endswith(b"\r\n0\r\n\r\n")


def test_a_client_that_leaves_nginx_aborts_its_request(server: Server, proxy: Proxy) -> None:
    before = server.metrics()["num_requests_aborted_total"]
    with proxy.connect() as connection:
        connection.sendall(generate_bytes({**STREAM, "max_tokens": 100_000}))
        assert connection.recv(65536)
        wait_for_requests(server, 1)
    wait_for_requests(server, 0)
    assert server.metrics()["num_requests_aborted_total"] == before + 1


def test_bodies_and_errors_pass_nginx(server: Server, proxy: Proxy) -> None:
    for fields, status in (
        ({"prompt": "x" * 1_900_000, "max_tokens": 1}, 200),
        ({"prompt": "x" * (ServerConfig().max_body_mib * 2**20 - 100)}, 400),
        ({"prompt": 1}, 400),
    ):
        with proxy.connect() as connection:
            connection.sendall(generate_bytes(fields))
            response = read_response(connection)
            assert response.status == status
            assert re.fullmatch(r"[0-9a-f]{32}", response.headers["x-request-id"])
    assert response.headers["x-request-id"] in server.log  # it is nginx's


def test_pages_of_the_public_origin_must_be_named(proxy: Proxy) -> None:
    host = "public.example"
    for origin, status in (("https://public.example", 200), ("http://public.example", 403), ("http://elsewhere", 403)):
        with proxy.connect() as connection:
            body = json.dumps({"prompt": "a"}).encode()
            connection.sendall(request_bytes("POST", "/generate", body, f"Origin: {origin}", f"Host: {host}"))
            assert read_response(connection).status == status


def test_the_unit_starts_this_server_and_gives_it_time_to_stop() -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(block("supervisor"))
    service = unit["Service"]
    python, option, module, *flags = shlex.split(service["ExecStart"])
    assert (Path(python).name, option, module) == ("python", "-m", "vllm_lite.entrypoints.api_server")
    _, config = parse_command_line(flags)
    assert int(service["TimeoutStopSec"]) > config.shutdown_grace_s
