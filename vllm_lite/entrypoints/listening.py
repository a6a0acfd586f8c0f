"""The listening socket, TLS and the server's URL. Knows no HTTP.

The port is bound before the model loads, so that a taken port fails at once; nobody can connect until the server
listens.
"""

from __future__ import annotations

import errno
import socket
import ssl
from typing import Any

from vllm_lite.config import ServerConfig
from vllm_lite.errors import StartupError

BACKLOG = 1024
"""Connections that may wait to be accepted: load testers open hundreds at a time."""
MAX_UNSENT = 64 * 1024
"""Bytes that the system takes for a connection beyond those that are on their way; by itself it takes megabytes."""
REACHABLE_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
"""Where a server that listens on all interfaces is reached from the same machine."""


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound but does not listen yet. Raises StartupError.

    The first try goes without SO_REUSEADDR: with it, two servers that are both still loading could share a port. Only
    connections of an earlier server that linger in TIME_WAIT need it.
    """
    family, address = _resolve(host, port)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        try:
            sock.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        sock.close()
        raise StartupError(_bind_message(host, port, error)) from error
    return sock


def allow_early_reuse(sock: socket.socket) -> None:
    """To be called before the socket listens: connections inherit it, so a restarted server can bind at once."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def limit_unsent(sock: socket.socket) -> None:
    """To be called before the socket listens: for a client that does not read, little waits, and writes soon block."""
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # Linux and macOS have it
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT)


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """None without `--ssl-certfile`. Raises StartupError for a file that is missing or does not fit."""
    if config.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # Without a password of ours, OpenSSL would ask for one on the terminal and wait.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password="")
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise StartupError(
            f"--ssl-certfile {config.ssl_certfile} and --ssl-keyfile {config.ssl_keyfile} cannot be used: "
            f"{error.strerror if isinstance(error, OSError) and error.strerror else error}. "
            "Both must be PEM files that belong together, the key without a password."
        ) from error
    return context


def server_url(host: str, port: int, *, is_tls: bool) -> str:
    """The URL under which this machine reaches the server."""
    name = REACHABLE_HOSTS.get(host, host)
    return f"{'https' if is_tls else 'http'}://{f'[{name}]' if ':' in name else name}:{port}"


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """IPv4 before IPv6, as clients that were told "localhost" try it."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise StartupError(f"--host {host} is not an address or name of this machine: {error}.") from error
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, address


def _bind_message(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is taken; stop what uses it or choose another one with --port."
    if error.errno == errno.EACCES:
        return f"port {port} is not open to this user; choose one above 1023 with --port."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is not an address of this machine; 127.0.0.1 and 0.0.0.0 always are."
    return f"cannot bind port {port} on {host}: {error.strerror}; choose others with --port and --host."
