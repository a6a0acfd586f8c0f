"""What HTTP costs: a server on a tiny model, whose steps cost little, beside `LLM.generate` on the same prompts.

Clients, server and engine share the cores, and every thread of the kernels (`--threads`) takes from the others: runs
with different numbers of them cannot be compared.

Contenders run in turn, round by round: `offline`, `http` for whole answers, `http-stream` for a
message a token, and both beside `--idle` connections that are kept alive and ask nothing. Each is asked `--waves` times
in a round, so that the round lasts long enough to be measured. Printed are tokens per second and ratios taken within a
round, medians with the least and the greatest, and what an idle server uses with and without those connections.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from scripts.bench import server
from scripts.bench.arguments import add_limits, chosen_limits, positive, seconds
from scripts.bench.client import Address
from scripts.bench.contenders import Contender, InProcess, OverHttp
from scripts.bench.figures import Run
from scripts.bench.llm_runner import LlmRunner
from scripts.bench.machine import machine
from scripts.bench.prompts import PromptMaker, open_tokenizer
from scripts.bench.protocols import NativeProtocol
from scripts.bench.rounds import Rounds, summary
from scripts.bench.workloads import Prompt, Workload, engine_options
from vllm_lite.config import program_name

COMPARED = (
    ("http", "offline"),
    ("http-stream", "offline"),
    ("http beside idle", "http"),
    ("http-stream beside idle", "http-stream"),
)


class Waves:
    """A contender that is asked several times in a run, each time by as many clients."""

    def __init__(self, contender: Contender, num_clients: int) -> None:
        self.name = contender.name
        self._contender, self._num_clients = contender, num_clients

    def run(self, workload: Workload, prompts: Sequence[Prompt]) -> Run:
        """As `Contender`; the seconds are those of the waves, without what is between them."""
        starts = range(0, len(prompts), self._num_clients)
        runs = [self._contender.run(workload, prompts[start : start + self._num_clients]) for start in starts]
        return Run(
            seconds=sum(run.seconds for run in runs),
            num_tokens=sum(run.num_tokens for run in runs),
            token_times=[times for run in runs for times in run.token_times],
        )


class BesideIdle:
    """A contender that runs while connections are open over which nothing is asked."""

    def __init__(self, contender: Contender, address: Address, num_idle: int) -> None:
        self.name = f"{contender.name} beside idle"
        self._contender, self._address, self._num_idle = contender, address, num_idle

    def run(self, workload: Workload, prompts: Sequence[Prompt]) -> Run:
        """As `Contender`."""
        with idle_connections(self._address, self._num_idle):
            return self._contender.run(workload, prompts)


@contextlib.contextmanager
def idle_connections(address: Address, count: int) -> Iterator[None]:
    """Connections that have been answered once and are kept alive."""
    asked = f"GET /health HTTP/1.1\r\nHost: {address.host}\r\n\r\n".encode()
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            connection = stack.enter_context(socket.create_connection((address.host, address.port), 30))
            connection.sendall(asked)
            if not connection.recv(2**16).startswith(b"HTTP/1.1 200 "):
                raise RuntimeError("the server refused an idle connection")
        yield


def measure(arguments: argparse.Namespace, model: str) -> dict[str, Any]:
    """Figures of the contenders, and cores that an idle server uses."""
    wave = Workload("tiny", arguments.clients, arguments.prompt_len, arguments.output_len)
    workload = replace(wave, num_prompts=arguments.clients * arguments.waves)
    options = engine_options([wave], model=model, dtype="float32", threads=arguments.threads)
    maker = PromptMaker(open_tokenizer(model))
    prompts = [maker.make(workload) for _ in range(arguments.pairs)]
    with contextlib.ExitStack() as stack:
        in_process = stack.enter_context(contextlib.closing(InProcess("offline", LlmRunner, options)))
        started = stack.enter_context(server.running(options))
        address = started.address
        asked = [
            Waves(OverHttp(name, address, NativeProtocol(), is_stream=name != "http"), arguments.clients)
            for name in ("http", "http-stream")
        ]
        beside = [BesideIdle(contender, address, arguments.idle) for contender in asked]
        contenders: list[Contender] = [Waves(in_process, arguments.clients), *asked, *beside]
        for contender in contenders:  # to warm up
            contender.run(wave, prompts[0][: arguments.clients])
        results = Rounds(chosen_limits(arguments), compared=COMPARED).measure(workload, contenders, prompts)
        results["idle_cores"] = {"0": server.idle_cores(started.process_id, arguments.idle_seconds)}
        with idle_connections(address, arguments.idle):
            cores = server.idle_cores(started.process_id, arguments.idle_seconds)
            results["idle_cores"][str(arguments.idle)] = cores
    return results


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog=program_name("scripts.bench_http"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--clients", type=positive, default=64, help="at once (default: %(default)s)")
    parser.add_argument("--prompt-len", type=positive, default=16)
    parser.add_argument("--output-len", type=positive, default=64)
    parser.add_argument("--waves", type=positive, default=8, help="of requests in a round (default: %(default)s)")
    parser.add_argument("--threads", type=positive, default=1, help="of the CPU kernels (default: %(default)s)")
    parser.add_argument("--idle", type=positive, default=256, help="connections (default: %(default)s)")
    parser.add_argument("--idle-seconds", type=seconds, default=10.0, help="for how long an idle server is watched")
    parser.add_argument("--pairs", type=positive, default=5, help="rounds that count")
    parser.add_argument("--quick", action="store_true", help="one round: only shows that all of it works")
    add_limits(parser)
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Reads the command line, measures, prints; the exit code."""
    from tests.helpers.checkpoints import cached_checkpoint  # noqa: PLC0415 - imports torch, which --help need not

    arguments = make_parser().parse_args(words)
    if arguments.quick:
        arguments.pairs, arguments.waves, arguments.idle_seconds = 1, 1, 0.5
    max_len = max(128, arguments.prompt_len + arguments.output_len)
    results = {"machine": machine(), **measure(arguments, str(cached_checkpoint(max_position_embeddings=max_len)))}
    size = f"{arguments.waves} x {arguments.clients} x ({arguments.prompt_len} in + {arguments.output_len} out)"
    print(f"{size}, median (least to greatest)")
    print(summary(results))
    for count, cores in results["idle_cores"].items():
        print(f"an idle server with {count} idle connections used {cores:.2%} of a core")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
