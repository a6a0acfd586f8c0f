"""A load on a running server: chunks of documents as prompts, streamed, from many threads at once.

Every request asks for a fixed number of tokens, or for one drawn from a range. Requests follow each other on every
thread (closed loop), or come at random, so many a second on average (`--rate`, Poisson). The percentiles of the times
to the first token, between tokens and of whole requests are printed, tokens per second and milliseconds per token, and
how many requests failed, and why. The exit code is 1 if one failed or was not sent.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from scripts.bench.arguments import (
    add_server,
    at_least_zero,
    chosen_server,
    failed,
    output_file,
    positive,
    seconds,
)
from scripts.bench.client import check_listening
from scripts.bench.documents import CHARS_PER_TOKEN, read_chunks
from scripts.bench.load import TIMES, Job, Load, LoadRunner, Outcome, load_figures, poisson_times
from scripts.bench.load_plot import find_matplotlib, write_plot
from scripts.bench.prompts import open_tokenizer
from vllm_lite.config import program_name
from vllm_lite.errors import StartupError


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        prog=program_name("scripts.load_test"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_server(parser)
    parser.add_argument("--documents", type=Path, required=True, help="folder whose UTF-8 files are the text")
    parser.add_argument("--num-chunks", type=positive, default=128, help="requests to send (default: %(default)s)")
    parser.add_argument("--chunk-tokens", type=positive, default=512, help="of a prompt (default: %(default)s)")
    tokenizer_help = f"the served model, to count its tokens; without it a token is {CHARS_PER_TOKEN} characters"
    parser.add_argument("--tokenizer", metavar="MODEL", help=tokenizer_help)
    parser.add_argument("--threads", type=positive, default=16, help="requests at a time (default: %(default)s)")
    parser.add_argument("--rate", type=at_least_zero, default=0.0, help="requests a second (default: closed loop)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--max-tokens", type=positive, default=64, help="new tokens (default: %(default)s)")
    length.add_argument("--max-tokens-range", type=positive, nargs=2, metavar=("LOW", "HIGH"), help="drawn instead")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: %(default)s)")
    parser.add_argument("--temperature", type=at_least_zero, default=0.0, help="(default: %(default)s, greedy)")
    eos_help = "generate to the full length, whatever the model says (default: on)"
    # Not as an argument, which some versions of Python add a default of their own to.
    parser.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=True).help = eos_help
    timeout_help = "seconds of silence after which a request has failed (default: %(default)s)"
    parser.add_argument("--timeout", type=seconds, default=120.0, help=timeout_help)
    limit_help = "seconds after which no request is sent (default: %(default)s)"
    parser.add_argument("--time-limit", type=seconds, default=1800.0, help=limit_help)
    parser.add_argument("--json", type=output_file, help="also write the figures and every request to this file")
    parser.add_argument("--plot", type=output_file, metavar="FILE.png", help="also draw them; needs matplotlib")
    return parser


def make_jobs(arguments: argparse.Namespace) -> list[Job]:
    """One for each chunk. Raises ValueError for documents that do not suffice, StartupError for the tokenizer."""
    tokenizer = None if arguments.tokenizer is None else open_tokenizer(arguments.tokenizer)
    num_chunks = arguments.num_chunks
    chunks = read_chunks(
        arguments.documents, num_chunks=num_chunks, chunk_tokens=arguments.chunk_tokens, tokenizer=tokenizer
    )
    generator = random.Random(arguments.seed)
    low, high = arguments.max_tokens_range or (arguments.max_tokens, arguments.max_tokens)
    if low > high:
        raise ValueError(f"--max-tokens-range must be LOW HIGH, got {low} {high}")
    lengths = [generator.randint(low, high) for _ in chunks]
    due: Sequence[float | None] = [None] * num_chunks
    if arguments.rate:
        due = poisson_times(arguments.rate, num_chunks, generator)
    return [Job(*job) for job in zip(chunks, lengths, due)]


def run(arguments: argparse.Namespace, jobs: list[Job]) -> Load:
    """Sends them all, with a bar on stderr."""
    fields = {"temperature": arguments.temperature, "ignore_eos": arguments.ignore_eos}
    runner = LoadRunner(chosen_server(arguments), fields, num_threads=arguments.threads, timeout_s=arguments.timeout)
    with tqdm(total=len(jobs), desc="Requests", dynamic_ncols=True) as bar:
        num_tokens = num_failed = 0

        def show(outcome: Outcome) -> None:
            nonlocal num_tokens, num_failed
            num_tokens += len(outcome.token_times)
            num_failed += outcome.failure is not None
            rate = num_tokens / max(bar.format_dict["elapsed"], 1e-9)
            bar.set_postfix_str(f"{rate:.1f} tokens/s, {num_failed} failed", refresh=False)
            bar.update()

        return runner.run(jobs, time_limit_s=arguments.time_limit, on_outcome=show)


def report(figures: dict[str, Any]) -> str:
    """The figures as text."""
    counts = f"{figures['num_answered']} answered, {figures['num_failed']} failed, {figures['num_not_sent']} not sent"
    lines = [f"requests   {counts}, in {figures['seconds']:.2f} s"]
    lines += [f"  failed {count} times: {reason}" for reason, count in figures["failures"].items()]
    lines.append(
        f"speed      {figures['tokens_per_s']:.1f} new tokens/s, {figures['requests_per_s']:.2f} requests/s "
        f"({figures['num_tokens']} tokens)"
    )
    if columns := next((list(figures[name]) for name in TIMES if name in figures), []):
        lines.append(f"{'ms':28}" + "".join(f"{column:>11}" for column in columns))
        for name in TIMES:
            if name in figures:
                lines.append(f"{TIMES[name]:28}" + "".join(f"{value:11.2f}" for value in figures[name].values()))
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """Reads the command line, sends, prints; the exit code."""
    parser = make_parser()
    arguments = parser.parse_args(words)
    try:
        if arguments.plot:
            find_matplotlib()
        jobs = make_jobs(arguments)
    except (ValueError, OSError, StartupError) as error:
        parser.error(str(error))
    try:
        check_listening(chosen_server(arguments), arguments.timeout)
    except OSError as error:
        return failed(str(error))
    load = run(arguments, jobs)
    figures = load_figures(load)
    print(report(figures))
    if arguments.json:
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
        requests = [asdict(outcome) for outcome in load.outcomes]
        everything = {"settings": settings, "figures": figures, "requests": requests}
        arguments.json.write_text(json.dumps(everything, indent=2) + "\n")
    if arguments.plot and load.answered:
        way = f"{arguments.rate:g} requests/s (Poisson)" if arguments.rate else "closed loop"
        title = f"{len(jobs)} prompts of {arguments.chunk_tokens} tokens, {arguments.threads} threads, {way}"
        write_plot(arguments.plot, title, load)
    return 1 if figures["num_failed"] or load.num_not_sent else 0


if __name__ == "__main__":
    sys.exit(main())
