"""What the command lines of the benchmarks share."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from scripts.bench.client import Address
from scripts.bench.quiet import Limits
from vllm_lite.config import API_KEY_VARIABLE

MAX_SECONDS = 1_000_000
"""More than a week; what waits for a socket counts milliseconds in 32 bits."""


def names_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Reads some of the known names, separated by commas."""

    def read(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} unknown; there are {', '.join(known)}")
        return names

    return read


def positive(text: str) -> int:
    """Reads an integer of at least 1."""
    return _integer(text, at_least=1)


def port(text: str) -> int:
    """Reads the number of a port that somebody may listen on."""
    return _integer(text, at_least=1, at_most=65535)


def at_least_zero(text: str) -> float:
    """Reads a finite number that is not negative."""
    if not 0 <= (number := _float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text}")
    return number


def seconds(text: str) -> float:
    """Reads a time that can be waited for."""
    if not 0 < (number := _float(text)) <= MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"must be a number above 0 and at most {MAX_SECONDS}, got {text}")
    return number


def output_file(text: str) -> Path:
    """Reads the name of a file that will be written after long work, which would be lost if it could not be."""
    path = Path(text)
    try:
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"{text} cannot be written: there is no folder {path.parent}")
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"{text} cannot be written: it is a folder")
        is_writable = os.access(path if path.exists() else path.parent, os.W_OK)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {error}") from error
    if not is_writable:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: permission denied")
    return path


def _integer(text: str, *, at_least: int, at_most: int | None = None) -> int:
    allowed = f"an integer of at least {at_least}" if at_most is None else f"an integer from {at_least} to {at_most}"
    try:
        number = int(text)
    except ValueError:
        number = at_least - 1
    if number < at_least or (at_most is not None and number > at_most):
        raise argparse.ArgumentTypeError(f"must be {allowed}, got {text}")
    return number


def _float(text: str) -> float:
    """NaN for what is no number: it lies within no limits."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def failed(message: str) -> int:
    """Prints what went wrong; the exit code."""
    print(f"error: {message}", file=sys.stderr)
    return 1


def add_server(parser: argparse.ArgumentParser) -> None:
    """Where the server is; `chosen_server` reads it."""
    parser.add_argument("--host", default="127.0.0.1", help="the server's address (default: %(default)s)")
    parser.add_argument("--port", type=port, default=8000, help="the server's port (default: %(default)s)")


def chosen_server(arguments: argparse.Namespace) -> Address:
    """Of the command line; the key, which is to be in no list of processes, is that of the environment."""
    return Address(arguments.host, arguments.port, api_key=os.environ.get(API_KEY_VARIABLE) or None)


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
    parser.add_argument("--json", type=output_file, help="also write the figures to this file")


def chosen_limits(arguments: argparse.Namespace) -> Limits:
    """Of the command line; `--quick` waits for nothing and repeats nothing."""
    if arguments.quick:
        return Limits(arguments.max_foreign, idle_wait_s=0.0, max_tries=1)
    return Limits(arguments.max_foreign, arguments.idle_wait, arguments.max_tries)
