"""A server that says the same bytes whatever it is asked, once: HTTP or not."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def canned_server(answer: bytes) -> Iterator[int]:
    """Its port. Answers a request whose body ends in a brace, and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                received = b""
                while not received.endswith(b"}"):  # what is left unread would reset the connection
                    received += connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()
