"""A server process of ours: started, ready, idle, ended."""

from __future__ import annotations

import http.client
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from scripts.bench.client import Address
from scripts.bench.quiet import tree_cpu_s
from vllm_lite.config import API_KEY_VARIABLE, flag_of, hub_cache_dir

ROOT = Path(__file__).resolve().parents[2]
SERVE = [str(ROOT / "scripts" / "serve")]
MODULE = [sys.executable, "-m", "vllm_lite.entrypoints.api_server"]
START_TIMEOUT_S = 300
STOP_TIMEOUT_S = 40
HEALTH_POLL_S = 0.005


@dataclass(frozen=True)
class Server:
    """One that answers."""

    address: Address
    process_id: int
    ready_s: float
    """From the start of its process to the first 200 of `/health`."""


def flags(options: Mapping[str, str | int | bool | None]) -> list[str]:
    """Fields of `EngineConfig` as a command line; None is left out, false is `--no-...`."""
    words: list[str] = []
    for name, value in options.items():
        flag = flag_of(name)
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag.removeprefix('--')}")
        elif value is not None:
            words += [flag, str(value)]
    return words


@contextmanager
def running(
    options: Mapping[str, str | int | bool | None],
    *,
    command: Sequence[str] = MODULE,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Starts a server on a free port of 127.0.0.1 and ends it afterwards.

    `environment` is added to this process's, but for the key of the developer's own servers. Raises RuntimeError with
    the server's log if it does not become ready.
    """
    inherited = {name: value for name, value in os.environ.items() if name != API_KEY_VARIABLE}
    with tempfile.TemporaryFile("w+") as log:
        start_s = time.perf_counter()
        process = subprocess.Popen(
            [*command, "--port", "0", *flags(options)],
            cwd=ROOT,
            env=inherited | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        watchdog = threading.Timer(START_TIMEOUT_S, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            address = _announced_address(process.stdout.readline())
            if address is None or not _wait_for_health(address, process):
                log.seek(0)
                raise RuntimeError(f"the server did not become ready; its log:\n{log.read()[-3000:]}")
            ready_s = time.perf_counter() - start_s
            watchdog.cancel()
            yield Server(address, process.pid, ready_s)
        finally:
            watchdog.cancel()
            _stop(process)


def _announced_address(ready_line: str) -> Address | None:
    found = re.search(r"http://([^ :/]+):(\d+)", ready_line)
    return None if found is None else Address(found[1], int(found[2]))


def _wait_for_health(address: Address, process: subprocess.Popen[str]) -> bool:
    """Whether `/health` became 200 before the process ended."""
    while process.poll() is None:
        connection = http.client.HTTPConnection(address.host, address.port, timeout=START_TIMEOUT_S)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return True
        except OSError:
            pass  # it does not listen yet
        finally:
            connection.close()
        time.sleep(HEALTH_POLL_S)
    return False


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def ready_times(options: Mapping[str, str | int | bool | None], command: Sequence[str] = SERVE) -> tuple[float, float]:
    """Seconds from the start of `scripts/serve` to ready: with no compiled kernels, then with those of this start.

    The default port stays free and the user's cache folder is left alone; the hub's cache stays where it is.
    """
    with tempfile.TemporaryDirectory() as cache:
        environment = {"XDG_CACHE_HOME": cache, "HF_HUB_CACHE": str(hub_cache_dir())}
        with running(options, command=command, environment=environment) as server:
            empty_s = server.ready_s
        with running(options, command=command, environment=environment) as server:
            return empty_s, server.ready_s


def idle_cores(process_id: int, seconds: float) -> float:
    """Cores that a server that nobody asks is busy on."""
    before, start_s = tree_cpu_s([process_id]), time.perf_counter()
    time.sleep(seconds)
    return (tree_cpu_s([process_id]) - before) / (time.perf_counter() - start_s)
