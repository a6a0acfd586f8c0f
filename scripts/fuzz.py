"""Sends a server requests made from its own /openapi.json and bytes that are no HTTP, and looks at how it takes them.

None may be answered with a 5xx or not at all, and when all are through the server must be healthy with nothing left
in its KV cache. All routes of the document that take a body are asked; chats need a server with a chat template.
Without --port a server is started on a tiny model. Exit code 1 means a finding, whose bytes are printed or, where they
are many, written to a file.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import http.client
import io
import json
import re
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.bench.arguments import failed, port, positive, seconds
from scripts.bench.client import Address
from scripts.fuzz_cases import CLOSED, Case, Cases
from tests.helpers.json_schema import allows
from vllm_lite.config import program_name

NUM_CLIENTS = 8
MAX_FINDINGS = 10
MAX_PRINTED_BYTES = 4000
IDLE_WITHIN_S = 30.0
IDLE_POLL_S = 0.05
PATIENCE_S = 0.2
"""After so much silence a client whose bytes may be no whole request says that no more will come."""
OWN_SERVER = "--num-kv-blocks 256 --max-num-seqs 16 --max-body-mib 1 --dtype float32 --disable-log-requests"

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@dataclass(frozen=True)
class Schemas:
    """What the server's document says of bodies."""

    requests: dict[str, dict[str, Any]]
    """Of those that are posted, by path."""
    failure: dict[str, Any]
    """Of every answer with a status of 400 or more."""


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        prog=program_name("scripts.fuzz"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--host", default="127.0.0.1", help="the server's address (default: %(default)s)")
    parser.add_argument("--port", type=port, help="the server's port (default: a server is started)")
    parser.add_argument(
        "--openai",
        action="store_true",
        help="start the server of OpenAI's protocol (one on --port says what it speaks)",
    )
    parser.add_argument("--requests", type=positive, default=2000, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="makes the requests (default: %(default)s)")
    parser.add_argument("--only", type=int, help="send the request of this number alone")
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=30.0,
        help="seconds within which a connection must end (default: %(default)s)",
    )
    return parser


@dataclass
class Report:
    """What came of the cases."""

    counts: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)
    """By kind of case and outcome."""
    findings: list[str] = field(default_factory=list)

    def table(self) -> str:
        """A line for each kind."""
        outcomes = sorted({outcome for _, outcome in self.counts})
        lines = [f"{'':14}" + "".join(f"{outcome:>8}" for outcome in outcomes)]
        for kind in sorted({kind for kind, _ in self.counts}):
            lines.append(f"{kind:14}" + "".join(f"{self.counts[kind, outcome] or '':>8}" for outcome in outcomes))
        totals = [sum(count for (_, one), count in self.counts.items() if one == outcome) for outcome in outcomes]
        return "\n".join([*lines, f"{'all':14}" + "".join(f"{total:>8}" for total in totals)])


def send(address: Address, case: Case, timeout_s: float) -> bytes:
    """What comes back until the server closes the connection or the client of this case leaves.

    Raises TimeoutError for a connection that does not end in time, and OSError where nobody listens.
    """
    end_s = time.monotonic() + timeout_s
    received = bytearray()
    must_end = case.may_wait
    with socket.create_connection((address.host, address.port), timeout=timeout_s) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before the last byte was sent
            connection.sendall(case.data)
        while not is_whole(received) and (case.leave_after is None or len(received) < case.leave_after):
            left_s = max(0.001, end_s - time.monotonic())
            connection.settimeout(min(PATIENCE_S, left_s) if must_end else left_s)
            try:
                data = connection.recv(2**16)
            except TimeoutError:
                if not must_end:
                    raise
                must_end = False
                connection.shutdown(socket.SHUT_WR)
                continue
            except ConnectionResetError:
                break
            if not data:
                break
            received += data
    return bytes(received)


def is_whole(received: bytearray) -> bool:
    """Whether a body is there that was announced with its length; others end with the connection."""
    head, separator, body = received.partition(b"\r\n\r\n")
    found = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
    return bool(separator and found and len(body) >= int(found[1]))


class _Received:
    """As much of a socket as `http.client` needs to read an answer that is all there."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def status_of(received: bytes) -> int:
    """CLOSED where there is no status line."""
    found = re.match(rb"(?:HTTP/1\.1 100 .*\r\n\r\n)?HTTP/[0-9]\.[0-9] ([0-9]{3})", received)
    return int(found[1]) if found else CLOSED


def problem(case: Case, received: bytes, failure_schema: dict[str, Any]) -> str | None:
    """What is wrong with an answer, if anything is."""
    status = status_of(received)
    if status >= 500:
        return f"answered {status}"
    if case.leave_after is not None:
        return None if status in (CLOSED, 200) else f"answered {status}"
    if case.allowed is not None and status not in case.allowed:
        expected = " or ".join(str(one) for one in sorted(case.allowed))
        return f"{f'answered {status}' if status else 'closed without an answer'}, expected {expected}"
    if status == CLOSED:
        return "answered with what is no HTTP" if received else None
    response = http.client.HTTPResponse(_Received(received))  # type: ignore[arg-type]
    try:
        response.begin()
        body = response.read()
        failure = json.loads(body) if status >= 400 else None
    except (http.client.HTTPException, ValueError) as error:
        return f"answered {status} in a way that cannot be read: {error!r}"
    if status >= 400 and not allows(failure_schema, failure):
        return f"answered {status} with what is no failure of the document: {failure!r}"
    return None


def run_case(address: Address, case: Case, failure_schema: dict[str, Any], timeout_s: float) -> tuple[str, str | None]:
    """The outcome, by its name in the report, and what is wrong with it."""
    try:
        received = send(address, case, timeout_s)
    except TimeoutError:
        return "hung", f"the connection did not end within {timeout_s:g} s"
    except OSError as error:
        return "refused", f"nobody answers: {error}"
    status = status_of(received)
    name = "left" if case.leave_after is not None else str(status) if status else "closed"
    return name, problem(case, received, failure_schema)


def describe(number: int, seed: int, case: Case, message: str) -> str:
    """A finding, with the bytes that were sent."""
    title = f"request {number} of seed {seed} ({case.kind}): {message}"
    if len(case.data) <= MAX_PRINTED_BYTES:
        return f"{title}\n  {case.data!r}"
    path = Path(f"fuzz-{seed}-{number}.bin")
    path.write_bytes(case.data)
    return f"{title}\n  {len(case.data)} bytes in {path}, which begin with {case.data[:200]!r}"


def fuzz(address: Address, schemas: Schemas, numbers: Sequence[int], seed: int, timeout_s: float) -> Report:
    """Sends the cases, several at a time, until all are through or there are enough findings."""
    report, cases = Report(), Cases(schemas.requests, seed)

    def run(number: int) -> tuple[int, Case, str, str | None] | None:
        if len(report.findings) >= MAX_FINDINGS:
            return None
        case = cases.make(number)
        return (number, case, *run_case(address, case, schemas.failure, timeout_s))

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        for done in pool.map(run, numbers):
            if done is None:
                continue
            number, case, outcome, message = done
            report.counts[case.kind, outcome] += 1
            if message is not None:
                report.findings.append(describe(number, seed, case, message))
    report.findings += leftovers(address)
    return report


def get(address: Address, path: str) -> tuple[int, bytes]:
    """Status and body."""
    connection = http.client.HTTPConnection(address.host, address.port, timeout=IDLE_WITHIN_S)
    with contextlib.closing(connection):
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()


def gauges(address: Address) -> dict[str, float]:
    """What `/metrics` says of requests and blocks."""
    text = get(address, "/metrics")[1].decode()
    names = "num_requests_running|num_requests_waiting|num_free_kv_blocks|num_total_kv_blocks"
    found = dict(re.findall(rf"^vllm_lite:({names})(?:\{{[^}}]*\}})? (\S+)$", text, flags=re.MULTILINE))
    if len(found) != 4:
        raise LookupError(f"/metrics lacks some of {names.replace('|', ', ')}")
    return {name: float(value) for name, value in found.items()}


def leftovers(address: Address) -> list[str]:
    """What the server has not got over once nobody asks it any more."""
    end_s = time.monotonic() + IDLE_WITHIN_S
    try:
        if (status := get(address, "/health")[0]) != 200:
            return [f"/health says {status} at the end"]
        while True:
            now = gauges(address)
            is_busy = now["num_requests_running"] or now["num_requests_waiting"]
            if not is_busy and now["num_free_kv_blocks"] == now["num_total_kv_blocks"]:
                return []
            if time.monotonic() > end_s:
                return [f"something is left {IDLE_WITHIN_S:g} s after the last request: {now}"]
            time.sleep(IDLE_POLL_S)  # requests of clients that left end with the next step
    except (OSError, http.client.HTTPException, LookupError) as error:
        return [f"the server does not answer at the end: {error!r}"]


def read_schemas(address: Address) -> Schemas:
    """Raises OSError, HTTPException, ValueError and LookupError."""
    document = json.loads(get(address, "/openapi.json")[1])
    known = document["components"]["schemas"]
    contents = {
        path: operations["post"]["requestBody"]["content"]["application/json"]
        for path, operations in document["paths"].items()
        if "requestBody" in operations.get("post", {})
    }
    if not contents:
        raise LookupError("no path takes a body")
    names = {path: content["schema"]["$ref"].rpartition("/")[2] for path, content in contents.items()}
    return Schemas({path: known[name] for path, name in names.items()}, known["Failure"])


@contextlib.contextmanager
def own_server(*, is_openai: bool) -> Iterator[tuple[Address, list[str]]]:
    """A server on a tiny model, and a list that holds what its process did wrong when the block has ended."""
    from tests.helpers.checkpoints import cached_checkpoint  # noqa: PLC0415 - imports torch, which nobody else needs
    from tests.helpers.doors import NATIVE, OPENAI  # noqa: PLC0415
    from tests.helpers.server import REAL, running_server  # noqa: PLC0415

    model = str(cached_checkpoint(max_position_embeddings=512))
    wrong: list[str] = []
    flags = ["--model", model, "--chat-template", TEMPLATE, *OWN_SERVER.split()]
    with running_server(*flags, module=REAL, door=OPENAI if is_openai else NATIVE) as server:
        yield Address("127.0.0.1", server.port), wrong
        if (code := server.process.poll()) is not None:
            wrong.append(f"the server exited with {code}")
        if "Traceback" in server.log:
            wrong.append(f"the server logged a traceback:\n{server.log[-3000:]}")


def main(words: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = make_parser()
    arguments = parser.parse_args(words)
    if arguments.openai and arguments.port is not None:
        parser.error("--openai is for a server that is started here: the one on --port says what it speaks")
    numbers = range(arguments.requests) if arguments.only is None else [arguments.only]
    is_ours = arguments.port is None
    chosen = (Address(arguments.host, arguments.port or 0), list[str]())
    start_s = time.monotonic()
    with own_server(is_openai=arguments.openai) if is_ours else contextlib.nullcontext(chosen) as (address, wrong):
        try:
            schemas = read_schemas(address)
        except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
            return failed(f"no /openapi.json from {address.host}:{address.port}: {error!r}")
        report = fuzz(address, schemas, numbers, arguments.seed, arguments.timeout)
    findings = [*report.findings, *wrong]
    print(report.table())
    print(f"{report.counts.total()} requests of seed {arguments.seed} in {time.monotonic() - start_s:.1f} s", end=", ")
    print(f"{len(findings)} findings" if findings else "no finding")
    for finding in findings:
        print(f"\n{finding}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
