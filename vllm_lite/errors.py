"""The errors that cross a layer. Each carries a message that a user can act on; nothing here knows HTTP."""

from __future__ import annotations


class RequestError(ValueError):
    """A caller's mistake: names the field, the value and what is allowed. The HTTP layer answers 400 with it.

    `param` is the field's name alone, for protocols that tell it apart; None where the mistake is in no one field.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class EngineDeadError(RuntimeError):
    """The engine can serve no request any more. The HTTP layer answers 503 with it."""


class OverloadedError(RuntimeError):
    """As many requests as may wait are waiting: this one is not queued. The HTTP layer answers 503, to be repeated."""


class RequestFailedError(RuntimeError):
    """This one request failed through no fault of its caller (its step raised, its logits were not finite)."""


class StartupError(RuntimeError):
    """The server cannot start as asked: names the thing and the way out. The process prints it and exits with 1."""
