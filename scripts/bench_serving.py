"""Speed of the whole: this engine in process and over HTTP, beside Hugging Face and, by URL, any other server.

Workloads: `single`, one prompt; `batch`, 32 at once, computing the prompts included; `long`, one of 1,500 tokens. Every
contender gets the same token ids and generates the same number of tokens, greedy, end of sequence ignored, prefix
reuse off. Contenders run in turn, round by round; ratios are taken within a round, and medians over the rounds are
printed with the least and the greatest. The first run of each is not counted. A run during which other processes were
busy is repeated; `--max-foreign` says what busy is. Beside that: `ready`, the seconds from the start of scripts/serve
until it answers, with and without compiled kernels, and `idle`, what a server does that nobody asks.

Another server must have been started with its prefix reuse off (or get the field that turns it off with
`--compare-extra`), on the same cores. With two contenders chosen their runs strictly alternate:

  scripts/bench_serving --compare-url http://127.0.0.1:8080 --compare-protocol openai --compare-pid 4711 \\
      --compare-extra '{"cache_prompt": false}' --contenders engine,peer-stream --workloads single,long
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from scripts.bench import server
from scripts.bench.arguments import add_limits, chosen_limits, names_of, positive
from scripts.bench.busy import measure_busy
from scripts.bench.client import Address
from scripts.bench.contenders import Contender, InProcess, OverHttp
from scripts.bench.engine_runner import EngineRunner
from scripts.bench.figures import spread
from scripts.bench.hugging_face_runner import HuggingFaceRunner
from scripts.bench.machine import machine
from scripts.bench.prompts import PromptMaker, open_tokenizer
from scripts.bench.protocols import NativeProtocol, OpenAIProtocol, WireProtocol, first_model
from scripts.bench.rounds import Rounds, spread_text, summary
from scripts.bench.workloads import Prompt, Workload, absolute_model, engine_options
from vllm_lite.config import program_name
from vllm_lite.kernels.topology import physical_cores

WORKLOADS = ("single", "batch", "long", "ready", "idle")
CONTENDERS = ("engine", "http", "http-stream", "transformers", "peer", "peer-stream")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
IDLE_S = 10.0
BUSY_HELP = "measure only how this engine fares beside a process that is always busy, on 1 thread and on --threads"
PID_HELP = "its process on this machine, so that its work, and its children's, is not taken for a disturbance"


@dataclass(frozen=True)
class Peer:
    """Another server."""

    address: Address
    protocol: WireProtocol


class Bench:
    """What the command line asks for, as the parts of a benchmark. Each part starts what it needs and ends it."""

    def __init__(self, arguments: argparse.Namespace, peer: Peer | None) -> None:
        self._arguments = arguments
        self._peer = peer
        self.model = absolute_model(arguments.model)
        self.workloads = chosen_workloads(arguments)
        self.rounds = Rounds(chosen_limits(arguments), tuple(arguments.compare_pid))
        self._maker = PromptMaker(open_tokenizer(self.model))

    def options(self, threads: int) -> dict[str, str | int | bool | None]:
        """Of the engine and of the server."""
        return engine_options(self.workloads, model=self.model, dtype=self._arguments.dtype, threads=threads)

    @contextlib.contextmanager
    def contenders(self, names: Sequence[str], threads: int) -> Iterator[list[Contender]]:
        """Those of these names, each with a whole run of every workload behind it."""
        found: dict[str, Contender] = {}
        with contextlib.ExitStack() as stack:
            if "engine" in names:
                found["engine"] = stack.enter_context(
                    contextlib.closing(InProcess("engine", EngineRunner, self.options(threads)))
                )
            if "transformers" in names:
                arguments = (self.model, self._arguments.dtype, threads)
                found["transformers"] = stack.enter_context(
                    contextlib.closing(InProcess("transformers", HuggingFaceRunner, *arguments))
                )
            servers = [("peer", self._peer)] if self._peer is not None else []
            if {"http", "http-stream"} & set(names):
                address = stack.enter_context(server.running(self.options(threads))).address
                servers.append(("http", Peer(address, NativeProtocol())))
            for name, asked in servers:
                for is_stream in (False, True):
                    full_name = f"{name}-stream" if is_stream else name
                    found[full_name] = OverHttp(full_name, asked.address, asked.protocol, is_stream=is_stream)
            chosen = [found[name] for name in names if name in found]
            for workload in self.workloads:
                prompts = self._maker.make(workload)
                for contender in chosen:
                    contender.run(workload, prompts)
            yield chosen

    def speed(self) -> dict[str, Any]:
        """Figures of every workload, by its name."""
        results: dict[str, Any] = {}
        with self.contenders(self._arguments.contenders, self._arguments.threads) as contenders:
            for workload in self.workloads:
                results[workload.name] = self.rounds.measure(workload, contenders, self._prompts(workload))
        return results

    def busy(self) -> dict[str, Any]:
        """Slowdown and longest gaps beside a busy process, by number of threads and workload; not of long prompts."""
        names = [name for name in self._arguments.contenders if name in ("engine", "http-stream")]
        results: dict[str, Any] = {}
        for threads in sorted({1, self._arguments.threads}):
            with self.contenders(names, threads) as contenders:
                results[str(threads)] = {
                    workload.name: measure_busy(workload, contenders, self._prompts(workload), self.rounds)
                    for workload in self.workloads
                    if workload.name != "long"
                }
        return results

    def ready(self) -> dict[str, Any]:
        """Seconds until `scripts/serve` answers."""
        times = [server.ready_times(self.options(self._arguments.threads)) for _ in range(self._arguments.pairs)]
        return {
            "empty_cache_s": spread([empty_s for empty_s, _ in times]),
            "cached_s": spread([cached_s for _, cached_s in times]),
        }

    def idle(self) -> dict[str, Any]:
        """Cores that an idle server uses, which has answered a request before."""
        with server.running(self.options(self._arguments.threads)) as started:
            workload = self.workloads[0]
            contender = OverHttp("http", started.address, NativeProtocol(), is_stream=False)
            contender.run(workload, self._maker.make(workload))
            seconds = self._arguments.idle_seconds
            return {"seconds": seconds, "cores": server.idle_cores(started.process_id, seconds)}

    def _prompts(self, workload: Workload) -> list[list[Prompt]]:
        """Those of each round: the same for all contenders, others in every round, in case a server remembers."""
        return [self._maker.make(workload) for _ in range(self._arguments.pairs)]


def chosen_workloads(arguments: argparse.Namespace) -> list[Workload]:
    """The workloads that generate; `ready` and `idle` alone are measured with the first of them."""
    workloads = [
        Workload("single", 1, arguments.prompt_len, arguments.output_len),
        Workload("batch", arguments.num_prompts, arguments.prompt_len, arguments.output_len),
        Workload("long", 1, arguments.long_prompt_len, arguments.output_len),
    ]
    return [workload for workload in workloads if workload.name in arguments.workloads] or workloads[:1]


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog=program_name("scripts.bench_serving"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", help="folder, .gguf file or name on the hub (default: the default model)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=positive, default=len(physical_cores()), help="of every contender")
    parser.add_argument("--workloads", type=names_of(WORKLOADS), default=list(WORKLOADS), help=", ".join(WORKLOADS))
    parser.add_argument(
        "--contenders", type=names_of(CONTENDERS), default=list(CONTENDERS), help=f"in turn: {', '.join(CONTENDERS)}"
    )
    parser.add_argument("--pairs", type=positive, default=5, help="rounds that count")
    parser.add_argument("--num-prompts", type=positive, default=32, help="of the batch")
    parser.add_argument("--prompt-len", type=positive, default=128)
    parser.add_argument("--long-prompt-len", type=positive, default=1500)
    parser.add_argument("--output-len", type=positive, default=128)
    parser.add_argument("--busy", action="store_true", help=BUSY_HELP)
    parser.add_argument("--quick", action="store_true", help="a few tokens, one round: only shows that all of it works")
    parser.add_argument("--compare-url", help="another server, such as http://127.0.0.1:8080")
    parser.add_argument("--compare-protocol", choices=["native", "openai"], default="openai")
    parser.add_argument("--compare-model", help="its name for the model (default: the first that /v1/models lists)")
    parser.add_argument("--compare-text", action="store_true", help="send it prompts as text, not as lists of ids")
    parser.add_argument("--compare-extra", type=json.loads, default={}, help="JSON object of more fields for it")
    parser.add_argument("--compare-pid", type=positive, action="append", default=[], help=PID_HELP)
    parser.add_argument("--idle-seconds", type=float, default=IDLE_S, help="for how long an idle server is watched")
    add_limits(parser)
    return parser


def make_quick(arguments: argparse.Namespace) -> None:
    """Sizes for a check that takes seconds."""
    arguments.pairs, arguments.idle_seconds = 1, 0.5
    arguments.num_prompts, arguments.prompt_len, arguments.output_len, arguments.long_prompt_len = 3, 8, 4, 24


def find_peer(arguments: argparse.Namespace) -> Peer | None:
    """The server that `--compare-url` names. Raises ValueError for what cannot be compared."""
    if arguments.compare_url is None:
        return None
    url = urlsplit(arguments.compare_url)
    if url.scheme != "http" or url.hostname is None:
        raise ValueError(f"--compare-url must be like http://127.0.0.1:8080, got {arguments.compare_url!r}")
    if url.hostname in LOOPBACK and not arguments.compare_pid:
        raise ValueError("--compare-pid is needed for a server on this machine: its work would count as a disturbance")
    address = Address(url.hostname, url.port or 80, url.path.rstrip("/").removesuffix("/v1"))
    if arguments.compare_protocol == "native":
        return Peer(address, NativeProtocol())
    model = arguments.compare_model or first_model(address)
    return Peer(address, OpenAIProtocol(model, arguments.compare_text, arguments.compare_extra))


def report(results: dict[str, Any]) -> str:
    """The tables."""
    lines = []
    for name, workload in results.get("workloads", {}).items():
        sizes = f"{workload['prompts']} x ({workload['prompt_tokens']} in + {workload['output_tokens']} out)"
        lines += [f"{name}: {sizes}, median (least to greatest)", summary(workload)]
    for threads, workloads in results.get("busy", {}).items():
        for name, contenders in workloads.items():
            lines.append(f"beside a busy process, {threads} threads, {name}:")
            for contender, values in contenders.items():
                lines += [f"  {contender:12} {figure:24} {spread_text(values[figure], 2)}" for figure in values]
    if "ready" in results:
        lines.append("scripts/serve, seconds until ready:")
        lines += [f"  {name:26} {spread_text(values, 1)}" for name, values in results["ready"].items()]
    if "idle" in results:
        idle = results["idle"]
        lines.append(f"an idle server used {idle['cores']:.2%} of a core over {idle['seconds']:.1f} s")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """Reads the command line, measures, prints; the exit code."""
    parser = make_parser()
    arguments = parser.parse_args(words)
    if arguments.quick:
        make_quick(arguments)
    if arguments.output_len < 2:
        parser.error("--output-len must be at least 2: the speed of decoding is that of the tokens after the first")
    try:
        peer = find_peer(arguments)
    except (ValueError, OSError, RuntimeError) as error:
        parser.error(str(error))
    bench = Bench(arguments, peer)
    settings = {name: getattr(arguments, name) for name in ("dtype", "threads", "pairs", "max_foreign")}
    results: dict[str, Any] = {"machine": machine(), "settings": {"model": bench.model, **settings}}
    print(json.dumps(results), flush=True)
    if arguments.busy:
        results["busy"] = bench.busy()
    else:
        if {"single", "batch", "long"} & set(arguments.workloads):
            results["workloads"] = bench.speed()
        for name, measure in (("ready", bench.ready), ("idle", bench.idle)):
            if name in arguments.workloads:
                results[name] = measure()
    print(report(results))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
