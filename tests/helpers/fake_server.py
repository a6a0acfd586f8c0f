"""The real server on an engine that plays back a script: for tests of bytes, status codes and timing.

Run as a module with the real command line and, on top of it, `--openai` for the server of OpenAI's protocol and
`--script` with JSON (`run` has the keys). A prompt may begin with words such as `!fail=3` (fail the request after 3
tokens; so do those of `FAULTS`, each with an error of its own), `!die=3` (kill the engine), `!delay=0.1` (seconds a
token), `!tokenise=0.1` (seconds before it is queued), `!refuse` (then it is not).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.helpers.byte_tokenizer import ByteTokenizer
from vllm_lite.chat_template import ChatTemplate
from vllm_lite.config import EngineConfig
from vllm_lite.engine.statistics import EngineStats
from vllm_lite.engine.tokenizer_protocol import Tokenizer
from vllm_lite.entrypoints.launch import ServerProgram, main
from vllm_lite.entrypoints.native.routes import NATIVE
from vllm_lite.entrypoints.openai.program import OPENAI
from vllm_lite.entrypoints.served_engine import ServedEngine
from vllm_lite.errors import EngineDeadError, OverloadedError, RequestError, RequestFailedError
from vllm_lite.outputs import CompletionDelta, FinishReason, Outcome, RequestDelta, RequestTally
from vllm_lite.sampling_params import SamplingParams

PIECES = [" Hi", " é", "", "\n", "\0", '"', "\\", " 你好", "😀", "</s>", "\u2028", " end"]
"""The script: pieces of text, one a token, over and over. One is empty, as a token's is that is held back."""
INSIDES = "0xdeadbeef"
FAULTS: dict[str, Callable[[], Exception]] = {
    "fail": lambda: RequestFailedError("the step of this request failed."),
    "dead": lambda: EngineDeadError("the engine is dead."),
    "mistake": lambda: RequestError("prompt is a mistake.", "prompt"),
    "overload": lambda: OverloadedError("too many."),
    "http": lambda: web.HTTPNotFound(),
    "crash": lambda: RuntimeError(INSIDES),
    "late": lambda: asyncio.TimeoutError(INSIDES),
}
MAX_PROMPT_CHARS = 2_000_000
NUM_BLOCKS = 64
OPENAI_FLAG = "--openai"


@dataclass
class FakeStats:
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = NUM_BLOCKS
    num_total_blocks: int = NUM_BLOCKS
    num_preemptions: int = 0
    num_aborted: int = 0


@dataclass
class FakeEngine:
    """Serves `max_num_seqs` requests at a time, each of which holds one block."""

    max_num_seqs: int
    pieces: list[str]
    delay_s: float
    is_alive: bool = True
    _stats: FakeStats = field(default_factory=FakeStats)
    _admission_times_s: dict[str, float] = field(default_factory=dict)
    _aborted_ids: set[str] = field(default_factory=set)
    _accepted_ids: set[str] = field(default_factory=set)
    _slots: asyncio.Semaphore = field(init=False)
    _must_end: asyncio.Event = field(init=False)

    @property
    def step_time_s(self) -> float | None:
        return None  # there are no steps

    def declare_dead(self, reason: str) -> None:
        raise NotImplementedError("no step, no hanging")

    def start(self) -> None:
        self._slots = asyncio.Semaphore(self.max_num_seqs)
        self._must_end = asyncio.Event()

    async def stop(self) -> None:
        self._must_end.set()

    async def drain(self, grace_s: float) -> None:
        end = time.monotonic() + grace_s
        while self._stats.num_running + self._stats.num_waiting and self.is_alive:
            if time.monotonic() >= end:
                self._must_end.set()
                return
            await asyncio.sleep(0.01)

    def abort(self, request_id: str) -> None:
        self._aborted_ids.add(request_id)

    def stats(self) -> EngineStats:
        return EngineStats(**vars(self._stats))

    def prompt_token_ids(self, request_id: str) -> Sequence[int]:
        return (1, 2, 3) if request_id in self._accepted_ids else ()

    def admission_time_s(self, request_id: str) -> float | None:
        return self._admission_times_s.get(request_id)

    async def generate(
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
        if not self.is_alive:
            raise EngineDeadError("the engine is dead.")
        params.check_limits(vocab_size=1000, max_num_seqs=self.max_num_seqs, max_logprobs=20)
        prompt = prompt or ""
        if len(prompt) > MAX_PROMPT_CHARS:
            raise RequestError(f"prompt has {len(prompt)} tokens, the context holds {MAX_PROMPT_CHARS}.")
        await asyncio.sleep(float(_options(prompt).get("tokenise", 0)))
        if "refuse" in _options(prompt):
            raise RequestError("prompt is refused.", "prompt")
        self._accepted_ids.add(request_id)
        self._stats.num_waiting += 1
        is_running = False
        num_tokens = 0
        first_token_time_s: float | None = None
        outcome: Outcome = "abort"
        try:
            async with self._slots:
                self._stats.num_waiting -= 1
                self._stats.num_running += 1
                self._stats.num_free_blocks -= 1
                is_running = True
                self._admission_times_s[request_id] = time.monotonic()
                async for delta in self._play(request_id, prompt, params):
                    num_tokens += sum(len(output.token_ids) for output in delta.outputs)
                    if num_tokens and first_token_time_s is None:
                        first_token_time_s = time.monotonic()
                    if delta.finished:
                        outcome = delta.outputs[0].finish_reason or outcome
                    yield delta
        except (RequestFailedError, EngineDeadError):
            outcome = "failed"
            raise
        finally:
            self._accepted_ids.discard(request_id)
            admission_time_s = self._admission_times_s.pop(request_id, None)
            on_end(RequestTally(outcome, 3 if num_tokens else 0, num_tokens, admission_time_s, first_token_time_s))
            if is_running:
                self._stats.num_running -= 1
                self._stats.num_free_blocks += 1
            else:
                self._stats.num_waiting -= 1
            if outcome == "abort":
                self._stats.num_aborted += 1

    async def _play(self, request_id: str, prompt: str, params: SamplingParams) -> AsyncGenerator[RequestDelta, None]:
        options = _options(prompt)
        for k, piece in enumerate(itertools.islice(itertools.cycle(self.pieces), params.max_tokens)):
            await asyncio.sleep(float(options.get("delay", self.delay_s)))
            for fault in FAULTS:
                if k == int(options.get(fault, -1)):
                    raise FAULTS[fault]()
            if k == int(options.get("die", -1)):
                self.is_alive = False
            if not self.is_alive:
                raise EngineDeadError("the engine is dead.")
            if self._must_end.is_set() or request_id in self._aborted_ids:
                yield _delta(request_id, params.n, "", (), "abort")
                return
            yield _delta(request_id, params.n, piece, (k,), "length" if k + 1 == params.max_tokens else None)


def _options(prompt: str) -> dict[str, str]:
    """What the words of a prompt with an exclamation mark ask for."""
    words = (word[1:].partition("=") for word in prompt.split() if word.startswith("!"))
    return {name: value for name, _, value in words}


@dataclass(frozen=True)
class FakeModel:
    engine: ServedEngine
    model_name: str = "fake"
    tokenizer: Tokenizer = field(default_factory=ByteTokenizer)
    max_model_len: int = MAX_PROMPT_CHARS
    chat_template: ChatTemplate | None = None


def _apply_chat_template(
    conversation: list[dict[str, str]], *, chat_template: str, tokenize: bool, add_generation_prompt: bool, **_: Any
) -> str:
    """A line for each message. Refuses those whose role is `refused`; `!render=2` in one makes it take 2 seconds."""
    if any(message["role"] == "refused" for message in conversation):
        raise ValueError("the role is refused")
    for message in conversation:
        time.sleep(float(_options(message["content"]).get("render", 0)))
    lines = [f"{message['role']}: {message['content']}\n" for message in conversation]
    return "".join([*lines, "assistant:" if add_generation_prompt else ""])


def _delta(
    request_id: str, num_candidates: int, text: str, token_ids: tuple[int, ...], reason: FinishReason | None
) -> RequestDelta:
    """All candidates are alike."""
    outputs = tuple(CompletionDelta(index, text, token_ids, reason) for index in range(num_candidates))
    return RequestDelta(request_id, outputs, finished=reason is not None)


def take_program(arguments: list[str]) -> tuple[ServerProgram, list[str]]:
    """The server that a command line of the tests' own chooses, and what is left of it."""
    program = OPENAI if OPENAI_FLAG in arguments else NATIVE
    return program, [argument for argument in arguments if argument != OPENAI_FLAG]


def run(arguments: list[str]) -> int:
    program, arguments = take_program(arguments)
    script: dict[str, Any] = {}
    if "--script" in arguments:
        at = arguments.index("--script")
        script = json.loads(arguments[at + 1])
        arguments = arguments[:at] + arguments[at + 2 :]

    def build(config: EngineConfig) -> FakeModel:
        time.sleep(script.get("load_s", 0.0))
        engine = FakeEngine(config.max_num_seqs, script.get("pieces", PIECES), script.get("delay_s", 0.0))
        template = ChatTemplate("", _apply_chat_template, {}) if script.get("has_chat_template", True) else None
        return FakeModel(engine, chat_template=template)

    return main(arguments, build, program)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
