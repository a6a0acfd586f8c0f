"""The life of a server: listen when ready, stop when told, leave when the engine is dead. Knows no route."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from vllm_lite.config import EngineConfig, ServerConfig
from vllm_lite.entrypoints.app import API_PROTOCOL
from vllm_lite.entrypoints.failures import FailureShape
from vllm_lite.entrypoints.http_connection import HttpConnection
from vllm_lite.entrypoints.listening import BACKLOG, allow_early_reuse, limit_unsent, server_url
from vllm_lite.entrypoints.request_service import RequestService, ServerState
from vllm_lite.entrypoints.served_engine import ServedEngine, ServedModel
from vllm_lite.errors import StartupError

logger = logging.getLogger(__name__)

ALIVE_CHECK_S = 0.1
SENT_CHECK_S = 0.01
DEAD_NOTICE_S = 2.0
"""How long `/health` says 503 before the process of a dead engine exits: probes come about once a second."""
HANDLER_GRACE_S = 1.0
"""How long handlers get to write what they have once the engine has nothing left for them, and then clients to read."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


async def serve(
    model: ServedModel,
    sock: socket.socket,
    tls: ssl.SSLContext | None,
    engine_config: EngineConfig,
    config: ServerConfig,
    make_app: Callable[[RequestService], web.Application],
    announce: Callable[[str], None],
) -> int:
    """Serves until a signal comes or the engine dies; the exit code. `announce` gets the URL once the server listens.

    Where the engine's `step_time_s` is not None afterwards, a thread is left that may never end. Raises StartupError if
    the port was taken after all.
    """
    engine, state = model.engine, ServerState()
    app = make_app(RequestService(model, state, engine_config, config))
    runner = web.AppRunner(
        app,
        handler_cancellation=True,  # a client that leaves aborts its request
        shutdown_timeout=HANDLER_GRACE_S,
    )
    await runner.setup()
    engine.start()
    watchdog = asyncio.create_task(_watch(engine, config.watchdog_s))  # to the end: the last step may be the one
    try:
        listener = await _listen(runner, app[API_PROTOCOL].failure_shape, config.slow_client_s, sock, tls)
        is_told_to_stop = _catch_stop_signals()
        announce(server_url(config.host, sock.getsockname()[1], is_tls=tls is not None))
        await _until_stop_or_death(engine, is_told_to_stop)
        if engine.is_alive:
            state.is_stopping = True
            listener.close()
            await _finish_requests(engine, config.shutdown_grace_s)
        if not engine.is_alive:
            logger.error("the engine is dead: the server exits")
            await _wait(is_told_to_stop, DEAD_NOTICE_S)
        exit_code = 0 if engine.is_alive else 1
    finally:
        assert runner.server is not None, "the runner has been set up"
        connections = [one for one in runner.server.connections if isinstance(one, HttpConnection)]
        await runner.cleanup()
        await _until_sent(connections)
        await engine.stop()
        watchdog.cancel()
    logger.info("stopped")
    return exit_code if engine.step_time_s is None else 1


async def _listen(
    runner: web.AppRunner, shape: FailureShape, slow_client_s: float, sock: socket.socket, tls: ssl.SSLContext | None
) -> asyncio.Server:
    """As `web.SockSite` does it, which has no place for a kind of connection of our own."""
    loop, server = asyncio.get_running_loop(), runner.server
    assert server is not None, "the runner has been set up"

    # Without decompression: a bomb would go off on the event loop, even in a body that nobody reads.
    options: dict[str, Any] = {"auto_decompress": False, "access_log": None, "logger": _http_logger()}

    def connect() -> HttpConnection:
        return HttpConnection(server, shape, slow_client_s, loop=loop, **options)

    allow_early_reuse(sock)
    limit_unsent(sock)
    try:
        return await loop.create_server(connect, sock=sock, ssl=tls, backlog=BACKLOG)
    except OSError as error:
        port = sock.getsockname()[1]
        raise StartupError(f"port {port} was taken while the model loaded; choose another one with --port.") from error


def _catch_stop_signals() -> asyncio.Event:
    """The event that the first signal sets. A second signal ends the process at once."""
    loop = asyncio.get_running_loop()
    is_told_to_stop = asyncio.Event()

    def stop() -> None:
        is_told_to_stop.set()
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop)
    return is_told_to_stop


async def _until_stop_or_death(engine: ServedEngine, is_told_to_stop: asyncio.Event) -> None:
    while engine.is_alive and not is_told_to_stop.is_set():
        await _wait(is_told_to_stop, ALIVE_CHECK_S)


async def _watch(engine: ServedEngine, limit_s: float) -> None:
    """Declares an engine dead whose step takes too long: nothing else would tell its clients, or end the process."""
    while (time_s := engine.step_time_s) is None or time_s <= limit_s:
        await asyncio.sleep(ALIVE_CHECK_S)
    logger.error("a step has not ended within %g s (--watchdog-s): the engine is declared dead", limit_s)
    engine.declare_dead(f"The engine is dead: a step has not ended within {limit_s:g} s (--watchdog-s).")


async def _finish_requests(engine: ServedEngine, grace_s: float) -> None:
    stats = engine.stats()
    num_requests = stats.num_running + stats.num_waiting
    logger.info("stopping: %d requests get %g s to finish; a second signal ends the process", num_requests, grace_s)
    await engine.drain(grace_s)


async def _until_sent(connections: Sequence[HttpConnection]) -> None:
    """Closing a connection leaves what waits in its buffer to the event loop, which is about to end."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + HANDLER_GRACE_S
    while any(connection.num_unsent for connection in connections) and loop.time() < end_s:
        await asyncio.sleep(SENT_CHECK_S)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    """Until the event or the timeout, whichever comes first."""
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)


def _http_logger() -> logging.Logger:
    """aiohttp logs a traceback for each client that does not speak HTTP: that is no fault of the server."""
    http_logger = logging.getLogger(f"{__name__}.http")
    http_logger.addFilter(lambda record: not _is_clients_fault(record))
    return http_logger


def _is_clients_fault(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return isinstance(error, (ConnectionError, HttpProcessingError, web.RequestPayloadError))
