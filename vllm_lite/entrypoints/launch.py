"""From a command line to a server that is ready. Knows no model: who starts a server says how its engine is built.

Every failure on this way ends in one message on stderr and exit code 1, before anybody can connect.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from vllm_lite.config import EngineConfig, flag_of, parse_command_line
from vllm_lite.entrypoints.lifecycle import serve
from vllm_lite.entrypoints.listening import bind, tls_context
from vllm_lite.entrypoints.served_engine import ServedModel
from vllm_lite.errors import StartupError

logger = logging.getLogger(__name__)

EXAMPLE = json.dumps({"prompt": "The capital of France is", "max_tokens": 32, "temperature": 0})


def main(arguments: list[str], build: Callable[[EngineConfig], ServedModel]) -> int:
    """Runs a server until it ends; the exit code of the process."""
    try:
        return _run(arguments, build)
    except StartupError as error:
        print(f"error: {error}", file=sys.stderr)
        logger.debug("where it was raised:", exc_info=True)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(arguments: list[str], build: Callable[[EngineConfig], ServedModel]) -> int:
    engine_config, config = parse_command_line(arguments)
    _configure_logging(config.log_level)
    if ignored := engine_config.fields_without_effect():
        logger.warning("accepted without effect: %s", ", ".join(flag_of(name) for name in ignored))
    tls = tls_context(config)
    with bind(config.host, config.port) as sock:
        started = time.monotonic()
        model = build(engine_config)
        logger.info("%s loaded in %.1f s", model.model_name, time.monotonic() - started)
        exit_code = asyncio.run(serve(model, sock, tls, engine_config, config, _announce))
    if model.engine.step_time_s is not None:
        _exit_without_waiting(exit_code)
    return exit_code


def _exit_without_waiting(exit_code: int) -> NoReturn:
    """Python would wait for all threads, and that of a step that hangs never ends."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(exit_code)


def _announce(url: str) -> None:
    insecure = "-k " if url.startswith("https") else ""
    print(f"Ready: curl {insecure}{url}/generate -d '{EXAMPLE}'", flush=True)


def _configure_logging(level: str) -> None:
    """Logs go to stderr, so that stdout holds the ready line alone; other libraries only warn."""
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("vllm_lite").setLevel(level.upper())
