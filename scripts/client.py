"""Asks a running server to go on with a prompt, and prints its candidates, as they grow with --stream.

On a terminal a stream rewrites the candidates' lines in place; elsewhere only its last message is printed, a line for
each candidate.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import shutil
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from scripts.bench.arguments import add_server, at_least_zero, chosen_server, failed, positive
from scripts.bench.client import Address, no_answer
from vllm_lite.config import program_name

PROMPT = "San Francisco is a"
TIMEOUT_S = 300
LINE_UP_AND_CLEAR = "\x1b[1A\x1b[2K"


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        prog=program_name("scripts.client"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_server(parser)
    parser.add_argument("prompt", nargs="?", default=PROMPT, help="(default: %(default)r)")
    parser.add_argument("--stream", action="store_true", help="print while the text grows")
    parser.add_argument("--n", type=positive, default=1, help="candidates (default: %(default)s)")
    parser.add_argument("--use-beam-search", action="store_true", help="the best of a beam search; --n 2 or more")
    parser.add_argument("--max-tokens", type=positive, default=64, help="new tokens (default: %(default)s)")
    temperature_help = "(default: 0 for one candidate and for beam search, else 1)"
    parser.add_argument("--temperature", type=at_least_zero, help=temperature_help)
    return parser


def contradiction(arguments: argparse.Namespace) -> str | None:
    """What no server can do, in terms of the options."""
    if arguments.use_beam_search and arguments.n < 2:
        return f"--use-beam-search needs --n of 2 or more, got {arguments.n}"
    if arguments.use_beam_search and arguments.temperature:
        return f"--use-beam-search draws nothing: leave out --temperature {arguments.temperature:g}"
    if not arguments.use_beam_search and arguments.n > 1 and arguments.temperature == 0:
        return f"--temperature 0 has one candidate, got --n {arguments.n}: leave one out, or add --use-beam-search"
    return None


def request_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """The body of the request."""
    is_greedy = arguments.n == 1 or arguments.use_beam_search
    usual = 0.0 if is_greedy else 1.0
    return {
        "prompt": arguments.prompt,
        "n": arguments.n,
        "use_beam_search": arguments.use_beam_search,
        "temperature": usual if arguments.temperature is None else arguments.temperature,
        "max_tokens": arguments.max_tokens,
        "stream": arguments.stream,
    }


def answers(address: Address, fields: dict[str, Any]) -> Iterator[list[str]]:
    """The candidates' texts, prompt included, in each message of a stream, or once.

    Raises OSError where nobody answers, RuntimeError for a refusal or an answer that breaks off, and HTTPException,
    ValueError and LookupError for what is no answer of the native protocol.
    """
    connection = http.client.HTTPConnection(address.host, address.port, timeout=TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request("POST", f"{address.prefix}/generate", json.dumps(fields), address.headers())
        response = connection.getresponse()
        if response.status != 200:
            detail = response.read().decode(errors="replace")
            raise RuntimeError(f"the server answered {response.status}: {detail}")
        try:
            if not fields["stream"]:
                yield json.loads(response.read())["text"]
                return
            rest = b""
            while data := response.read1():
                # Servers end messages with a null byte or, later ones, with a newline; JSON itself has neither.
                *messages, rest = (rest + data).replace(b"\n", b"\0").split(b"\0")
                yield from (json.loads(message)["text"] for message in messages)
        except (http.client.IncompleteRead, OSError) as error:
            raise RuntimeError(f"the answer breaks off, the server has failed or was stopped: {error!r}") from error


class Screen:
    """The last rows of a terminal, written again for every message."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._num_rows = 0

    def show(self, lines: Sequence[str], *, is_last: bool = False) -> None:
        """Puts these lines in place of the ones before; until the last time only what fits on the screen."""
        columns, height = shutil.get_terminal_size()
        rows = [row for line in lines for row in wrapped(line, columns)]
        if not is_last:
            rows = rows[-(height - 1) :]
        self._file.write(LINE_UP_AND_CLEAR * self._num_rows + "".join(f"{row}\n" for row in rows))
        self._file.flush()
        self._num_rows = len(rows)


def wrapped(line: str, columns: int) -> list[str]:
    """The rows that a line takes on a terminal, on which some characters are two columns wide and some none."""
    rows, width = [""], 0
    for character in line:
        own = 0 if unicodedata.combining(character) else 1 + (unicodedata.east_asian_width(character) in "WF")
        if width + own > columns:
            rows.append("")
            width = 0
        rows[-1] += character
        width += own
    return rows


def candidate_lines(texts: Sequence[str]) -> list[str]:
    """One line for each, whatever the model wrote: `repr` leaves nothing that could move a terminal's cursor."""
    return [f"Candidate {index}: {text!r}" for index, text in enumerate(texts)]


def main(words: Sequence[str] | None = None) -> int:
    """Reads the command line, asks, prints; the exit code."""
    parser = make_parser()
    arguments = parser.parse_args(words)
    if (message := contradiction(arguments)) is not None:
        parser.error(message)
    address = chosen_server(arguments)
    print(f"Prompt: {arguments.prompt!r}", flush=True)
    screen, texts = Screen(sys.stdout), list[str]()
    try:
        for texts in answers(address, request_fields(arguments)):
            if sys.stdout.isatty():
                screen.show(candidate_lines(texts))
    except RuntimeError as error:
        return failed(str(error))
    except OSError as error:
        return failed(no_answer(address, error))
    except (http.client.HTTPException, ValueError, LookupError) as error:
        return failed(f"{address.host}:{address.port} does not speak the native protocol: {error!r}")
    if sys.stdout.isatty():
        screen.show(candidate_lines(texts), is_last=True)
    else:
        sys.stdout.writelines(f"{line}\n" for line in candidate_lines(texts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
