"""What the command lines of the benchmarks share."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from scripts.bench.client import Address
from scripts.bench.quiet import Limits


def names_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Reads some of the known names, separated by commas."""

    def read(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} unknown; there are {', '.join(known)}")
        return names

    return read


def positive(text: str) -> int:
    """Reads a number of at least 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def at_least_zero(text: str) -> float:
    """Reads a finite number that is not negative."""
    if not 0 <= (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text}")
    return number


def add_server(parser: argparse.ArgumentParser) -> None:
    """Where the server is; `chosen_server` reads it."""
    parser.add_argument("--host", default="127.0.0.1", help="the server's address (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="the server's port (default: %(default)s)")


def chosen_server(arguments: argparse.Namespace) -> Address:
    """Of the command line."""
    return Address(arguments.host, arguments.port)


def add_limits(parser: argparse.ArgumentParser) -> None:
    """What counts as disturbed, and where the figures go."""
    usual = Limits()
    parser.add_argument(
        "--max-foreign", type=float, default=usual.max_foreign, help="cores that others may use during a run"
    )
    parser.add_argument(
        "--max-tries", type=positive, default=usual.max_tries, help="runs until the least disturbed one counts"
    )
    parser.add_argument(
        "--idle-wait", type=float, default=usual.idle_wait_s, help="seconds to wait for an idle machine before a run"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")


def chosen_limits(arguments: argparse.Namespace) -> Limits:
    """Of the command line; `--quick` waits for nothing and repeats nothing."""
    if arguments.quick:
        return Limits(arguments.max_foreign, idle_wait_s=0.0, max_tries=1)
    return Limits(arguments.max_foreign, arguments.idle_wait, arguments.max_tries)
