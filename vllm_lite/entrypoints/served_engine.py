"""What the HTTP layer needs from an engine: the part of `AsyncLLMEngine` that it may call. Knows no HTTP."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

from vllm_lite.chat_template import ChatTemplate
from vllm_lite.engine.statistics import EngineStats
from vllm_lite.engine.tokenizer_protocol import Tokenizer
from vllm_lite.outputs import RequestDelta, RequestTally
from vllm_lite.sampling_params import SamplingParams


class ServedEngine(Protocol):
    """Turns prompts into deltas."""

    @property
    def is_alive(self) -> bool:
        """Whether the engine can serve requests."""

    @property
    def step_time_s(self) -> float | None:
        """How many seconds the step that is being computed has taken; None where none is."""

    def start(self) -> None:
        """Starts the engine's task in the running event loop."""

    async def stop(self) -> None:
        """Ends the engine's task and its threads, but for that of a step on whose account it was declared dead."""

    def declare_dead(self, reason: str) -> None:
        """From now on it cannot serve; open requests get an EngineDeadError with the reason."""

    async def drain(self, grace_s: float) -> None:
        """Returns when no request is left; those still running after `grace_s` seconds end with reason "abort"."""

    def abort(self, request_id: str) -> None:
        """Ends an open request with reason "abort", if it has not ended."""

    def stats(self) -> EngineStats:
        """The counts and times of this moment."""

    def prompt_token_ids(self, request_id: str) -> Sequence[int]:
        """The prompt's ids while `generate` is open; empty before they are known."""

    def admission_time_s(self, request_id: str) -> float | None:
        """When the request first left the queue, in monotonic seconds, while `generate` is open; None before that."""

    def generate(
        self,
        request_id: str,
        prompt: str | None,
        params: SamplingParams,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        add_special_tokens: bool = True,
        is_whole: bool,
        on_end: Callable[[RequestTally], None],
    ) -> AsyncGenerator[RequestDelta, None]:
        """One delta a step that generated; closing it early aborts the request. Ids go before the text of a prompt.

        Each comes at once, but where `is_whole` says that only the whole of them is wanted.

        `on_end` gets what was counted of the request before the generator ends; not of one that was never queued.
        Raises RequestError, RequestFailedError and EngineDeadError.
        """


class ServedModel(Protocol):
    """What `build_engine` returns."""

    @property
    def engine(self) -> ServedEngine:
        """The engine, not yet started."""

    @property
    def model_name(self) -> str:
        """The model's name as a user knows it."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The engine's."""

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its answer together."""

    @property
    def chat_template(self) -> ChatTemplate | None:
        """What makes prompts of conversations; None where neither the checkpoint nor the user has a template."""
