"""From a command line to a server that is ready. Knows no model: who starts a server says how its engine is built.

Every failure on this way ends in one message on stderr and exit code 1, before anybody can connect.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from aiohttp import web

from vllm_lite.config import EngineConfig, flag_of, parse_command_line
from vllm_lite.entrypoints.lifecycle import serve
from vllm_lite.entrypoints.listening import bind, tls_context
from vllm_lite.entrypoints.request_service import RequestService
from vllm_lite.entrypoints.served_engine import ServedModel
from vllm_lite.errors import StartupError

logger = logging.getLogger(__name__)

THREADS_GRACE_S = 1.0
"""How long the process waits for its threads at its end."""


@dataclass(frozen=True)
class ServerProgram:
    """One of the servers that can be started: what differs between them."""

    module: str
    """What `python -m` starts."""
    description: str
    make_app: Callable[[RequestService], web.Application]
    example_path: str
    example: Mapping[str, Any]
    """The body of a request that the ready line shows."""


def main(arguments: list[str], build: Callable[[EngineConfig], ServedModel], program: ServerProgram) -> int:
    """Runs a server until it ends; the exit code of the process."""
    try:
        return _run(arguments, build, program)
    except StartupError as error:
        print(f"error: {error}", file=sys.stderr)
        logger.debug("where it was raised:", exc_info=True)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(arguments: list[str], build: Callable[[EngineConfig], ServedModel], program: ServerProgram) -> int:
    engine_config, config = parse_command_line(arguments, program.module, program.description)
    _configure_logging(config.log_level)
    if ignored := engine_config.fields_without_effect():
        logger.warning("accepted without effect: %s", ", ".join(flag_of(name) for name in ignored))
    tls = tls_context(config)
    with bind(config.host, config.port) as sock:
        started = time.monotonic()
        model = build(engine_config)
        logger.info("%s loaded in %.1f s", model.model_name, time.monotonic() - started)
        _spare_collector()
        announce = partial(_announce, program)
        exit_code = asyncio.run(serve(model, sock, tls, engine_config, config, program.make_app, announce))
    if busy := _busy_threads():
        logger.warning("the process ends while threads are at work: %s", ", ".join(busy))
        _exit_without_waiting(exit_code)
    return exit_code


def _busy_threads() -> list[str]:
    """The names of those that are left, whose requests have ended: a step, a tokenizer or a template may hang."""
    end_s = time.monotonic() + THREADS_GRACE_S
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread() and not thread.daemon]
    for thread in others:
        thread.join(max(0.0, end_s - time.monotonic()))
    return [thread.name for thread in others if thread.is_alive()]


def _spare_collector() -> None:
    """Takes what has been loaded out of garbage collections: all lives as long as the process.

    Looking through the objects of torch and transformers took a tenth of a second, in which no stream goes on, whenever
    many requests came.
    """
    gc.collect()
    gc.freeze()


def _exit_without_waiting(exit_code: int) -> NoReturn:
    """Python would wait for all threads, and one that hangs never ends."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(exit_code)


def _announce(program: ServerProgram, url: str) -> None:
    insecure = "-k " if url.startswith("https") else ""
    print(f"Ready: curl {insecure}{url}{program.example_path} -d '{json.dumps(program.example)}'", flush=True)


def _configure_logging(level: str) -> None:
    """Logs go to stderr, so that stdout holds the ready line alone; other libraries only warn."""
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("vllm_lite").setLevel(level.upper())
