"""Who takes part: something in a process of its own that is called, or a server that is asked over HTTP."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

from scripts.bench.client import Address, exchange
from scripts.bench.figures import Run
from scripts.bench.protocols import WireProtocol
from scripts.bench.workloads import Prompt, Workload

Runner = Callable[[Workload, Sequence[Prompt]], Run]

STOP_TIMEOUT_S = 10


class Contender(Protocol):
    """Runs workloads, one at a time, and does nothing in between."""

    @property
    def name(self) -> str:
        """In the tables."""

    def run(self, workload: Workload, prompts: Sequence[Prompt]) -> Run:
        """Runs all prompts at once."""


class InProcess:
    """A runner in a process of its own, so that no other contender's memory, threads or cores are its own.

    It begins to load at once; the first use waits for it. Close it afterwards.
    """

    def __init__(self, name: str, make_runner: Callable[..., Runner], *arguments: Any) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make_runner, arguments), daemon=True)
        self._process.start()
        theirs.close()  # so that the end of the process is the end of the pipe

    def run(self, workload: Workload, prompts: Sequence[Prompt]) -> Run:
        """As `Contender`. Raises RuntimeError if the process has ended."""
        try:
            self._pipe.send((workload, prompts))
            run = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise RuntimeError(f"the process of {self.name} has ended; what it wrote to stderr says why") from error
        assert isinstance(run, Run)
        return run

    def close(self) -> None:
        """Ends the process."""
        self._pipe.close()
        self._process.join(STOP_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


def _serve(pipe: Connection, make_runner: Callable[..., Runner], arguments: tuple[Any, ...]) -> None:
    """What the process does: answers until the other end of the pipe is closed."""
    runner = make_runner(*arguments)
    while True:
        try:
            workload, prompts = pipe.recv()
        except EOFError:
            return
        pipe.send(runner(workload, prompts))


class OverHttp:
    """A server, asked for whole answers or for streams. The client runs in this process, on the same cores."""

    def __init__(self, name: str, address: Address, protocol: WireProtocol, *, is_stream: bool) -> None:
        self.name = name
        self._address = address
        self._protocol = protocol
        self._is_stream = is_stream

    def run(self, workload: Workload, prompts: Sequence[Prompt]) -> Run:
        """As `Contender`."""
        requests = [
            self._protocol.request(self._address, prompt, workload.output_len, is_stream=self._is_stream)
            for prompt in prompts
        ]
        responses = exchange(self._address, requests)
        answers = [
            self._protocol.read(response.body(), workload.output_len, is_stream=self._is_stream)
            for response in responses
        ]
        return Run(
            seconds=max(response.end_s for response in responses),
            num_tokens=sum(answer.num_tokens for answer in answers),
            token_times=[answer.token_times for answer in answers] if self._is_stream else [],
        )
