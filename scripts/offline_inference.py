"""Generates text for prompts with `LLM`, without a server, and prints prompt and text of each."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.bench.arguments import at_least_zero, failed, positive
from vllm_lite import LLM, SamplingParams
from vllm_lite.config import program_name
from vllm_lite.errors import RequestError, RequestFailedError, StartupError

PROMPTS = ["Hello, my name is", "The capital of France is", "The three primary colours are", "Once upon a time"]
MAX_SHOWN = 200
"""Characters of what cannot be read, in its error."""


def json_object(text: str) -> dict[str, Any]:
    """Reads one of the command line."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text[:MAX_SHOWN]!r}: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text[:MAX_SHOWN]!r}")
    return value


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(prog=program_name("scripts.offline_inference"), description=__doc__)
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="(default: a few of its own)")
    parser.add_argument("--file", type=Path, help="more prompts, one a line; empty lines are passed over")
    parser.add_argument("--model", help="folder, .gguf file or hub name (default: the default model)")
    parser.add_argument("--max-tokens", type=positive, default=32, help="new tokens (default: %(default)s)")
    parser.add_argument("--temperature", type=at_least_zero, default=0.8, help="(default: %(default)s)")
    parser.add_argument("--top-p", type=float, default=0.95, help="(default: %(default)s)")
    engine_help = """more keywords of LLM(...), as JSON: '{"dtype": "float32"}'"""
    parser.add_argument("--engine", type=json_object, default={}, metavar="JSON", help=engine_help)
    return parser


def chosen_prompts(arguments: argparse.Namespace) -> list[str]:
    """Those of the command line, then those of the file. Raises OSError and UnicodeDecodeError for a file like that."""
    prompts = list(arguments.prompts)
    if arguments.file is not None:
        prompts += [line for line in arguments.file.read_text(encoding="utf-8").splitlines() if line.strip()]
    return prompts if arguments.prompts or arguments.file is not None else PROMPTS


def main(words: Sequence[str] | None = None) -> int:
    """Reads the command line, generates, prints; the exit code."""
    parser = make_parser()
    arguments = parser.parse_args(words)
    options: dict[str, Any] = arguments.engine
    if arguments.model is not None and "model" in options:
        parser.error(f"--model {arguments.model} and --engine with a 'model' of its own: give one of them")
    try:
        prompts = chosen_prompts(arguments)
        params = SamplingParams(
            temperature=arguments.temperature, top_p=arguments.top_p, max_tokens=arguments.max_tokens
        )
        with LLM(**{"model": arguments.model, **options}) as llm:
            outputs = llm.generate(prompts, params)
    except (StartupError, RequestError, RequestFailedError, OSError, UnicodeDecodeError) as error:
        return failed(str(error))
    for output in outputs:
        print(f"Prompt: {output.prompt!r}, text: {output.outputs[0].text!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
