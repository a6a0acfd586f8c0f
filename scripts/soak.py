"""Asks a server of its own for a long time what well- and ill-behaved clients ask, and checks everything it does.

A pool of requests is first answered one at a time. Later answers, whatever runs beside them, must be the same to the
byte: whole ones, streams message by message, and what came of those that were cut short. Of several candidates that are
streamed, messages may be cut otherwise; their texts and the last message are checked. What is sampled without a seed is
checked by its form. Outputs are batch invariant with the CPU kernels, in bfloat16 as in float32, so nothing else is
allowed for; without these kernels choose --dtype float32.

Counters of /metrics are compared at quiet moments, exactly, with the sums over the request lines of the server's log;
and each line with what the client of that request saw and, where it was answered, with what the idle server did: prompt
tokens, generated tokens, how it ended. Every request has one line, and what was refused was never queued: it is counted
by its status, which its line must tell, and which must be the one that its client saw. Where the client left, the log
alone can tell how the request ended and how many tokens it had: there the two must agree. A line that ends in a way
that there must not be is a finding. Preemptions, of which no client knows, are reported. Under load, counters must lie
between what has been answered and what has been sent, and never fall.

The time begins when the pool has been answered and the server has had every kind of client: large bodies, a burst,
streams that nobody reads. The first life of the server takes four fifths of it: memory after the first tenth of its
load and at its end must agree within 2 %, and file descriptors at quiet moments must be equal. Then comes SIGTERM in
the middle of the load, and shorter lives, some with a time limit for requests, some with little grace at the end. The
last stop may take a minute or two more than --seconds. Exit code 1 means a finding; the log of the life that had it is
kept in the current folder.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.bench.arguments import output_file, positive, seconds
from scripts.soak_requests import MAX_BODY_MIB
from scripts.soak_run import Report, Soak
from vllm_lite.config import program_name

COMMON = f"--max-num-seqs 16 --max-waiting-requests 24 --max-body-mib {MAX_BODY_MIB}"
TINY_BLOCKS = 64
BLOCKS = 32
"""A prompt has fewer tokens where these are not bytes. Both are too few for all that run: some are preempted."""
BLOCK_SIZE = 16


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        prog=program_name("scripts.soak"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=seconds, default=60.0, help="how long (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="makes requests and clients (default: %(default)s)")
    parser.add_argument("--model", help="folder or .gguf file, or default (default: a tiny model, made on the spot)")
    parser.add_argument("--pool", type=positive, default=84, help="how many distinct requests (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="of the model, as the server's (default: %(default)s)")
    parser.add_argument("--json", type=output_file, help="also write everything to this file")
    return parser


def server_flags(model: str | None, dtype: str) -> list[str]:
    """The command line of the server."""
    if model is None:
        from tests.helpers.checkpoints import cached_checkpoint  # noqa: PLC0415 - imports torch

        num_blocks = TINY_BLOCKS
        threads = ["--num-threads", "1"]  # more have nothing to do
        model = str(cached_checkpoint(max_position_embeddings=num_blocks * BLOCK_SIZE))
    else:
        num_blocks, threads = BLOCKS, []
    chosen = [] if model == "default" else ["--model", model]
    sizes = ["--max-model-len", str(num_blocks * BLOCK_SIZE), "--num-kv-blocks", str(num_blocks)]
    sizes += ["--block-size", str(BLOCK_SIZE)]
    return [*chosen, *threads, *sizes, *COMMON.split(), "--dtype", dtype]


def table(report: Report) -> str:
    """A line for each kind."""
    outcomes = sorted({outcome for _, outcome in report.counts})
    kinds = sorted({kind for kind, _ in report.counts})
    widths = [max(8, len(outcome) + 2) for outcome in outcomes]
    lines = [f"{'':24}" + "".join(f"{outcome:>{width}}" for outcome, width in zip(outcomes, widths))]
    for kind in kinds:
        counts = [report.counts[kind, outcome] for outcome in outcomes]
        lines.append(f"{kind:24}" + "".join(f"{count or '':>{width}}" for count, width in zip(counts, widths)))
    totals = [sum(report.counts[kind, outcome] for kind in kinds) for outcome in outcomes]
    return "\n".join([*lines, f"{'all':24}" + "".join(f"{total:>{width}}" for total, width in zip(totals, widths))])


def figures(report: Report) -> dict[str, object]:
    """The numbers of the run by their names."""
    counts = report.counts
    num_requests = counts.total()
    metrics = [life["metrics"] for life in report.lives]
    quiet = [sample for life in report.lives[:1] for sample in life["samples"] if sample["at"].endswith("%")]
    early, late = report.rss_kib

    def of(name: str) -> int:
        return sum(count for (_, outcome), count in counts.items() if outcome == name)

    return {
        "requests": num_requests,
        "requests/s": round(num_requests / max(report.load_s, 0.001), 1),
        "answered right": of("right"),
        "wrong answers": of("wrong"),
        "hangs": of("hung"),
        "tracebacks": report.num_tracebacks,
        "lives": len(report.lives),
        "refused with 503": of("503"),
        "aborted": int(sum(one.get("num_requests_aborted_total", 0) for one in metrics)),
        "preemptions": int(sum(one.get("num_preemptions_total", 0) for one in metrics)),
        "generated tokens": int(sum(one.get("generation_tokens_total", 0) for one in metrics)),
        "RSS after the first tenth, MiB": round(early / 1024, 1),
        "RSS at the end, MiB": round(late / 1024, 1),
        "RSS change, %": round(100 * (late / early - 1), 2) if early else 0.0,
        "file descriptors at quiet moments": sorted({sample["num_fds"] for sample in quiet}),
        "threads at quiet moments": sorted({sample["num_threads"] for sample in quiet}),
        "KV blocks free at quiet moments": sorted(
            {f"{one['num_free_kv_blocks']:g} of {one['num_total_kv_blocks']:g}" for one in metrics if one}
        ),
    }


def main(words: Sequence[str] | None = None) -> int:
    """The exit code."""
    arguments = make_parser().parse_args(words)
    start_s = time.monotonic()
    flags = server_flags(arguments.model, arguments.dtype)
    soak = Soak(flags, arguments.seconds, arguments.seed, arguments.pool, Path.cwd())
    soak.run()
    report = soak.report
    print(table(report))
    numbers = figures(report)
    for name, value in numbers.items():
        print(f"{name}: {value}")
    print(f"seed {arguments.seed}, {time.monotonic() - start_s:.1f} s", end=", ")
    print(f"{len(report.findings)} findings" if report.findings else "no finding")
    for finding in report.findings:
        print(f"\n{finding}")
    if arguments.json is not None:
        counts = [
            {"kind": kind, "outcome": outcome, "count": count} for (kind, outcome), count in report.counts.items()
        ]
        everything = {
            "seed": arguments.seed,
            "figures": numbers,
            "counts": counts,
            "findings": report.findings,
            "lives": report.lives,
        }
        arguments.json.write_text(json.dumps(everything, indent=1))
    return 1 if report.findings else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the server ends with its soak
    sys.exit(main())
