"""The real server and the real engine, whose executor and tokenizer fail where a prompt says so.

Run as a module with the real command line and a checkpoint with the tests' byte tokenizer, and with `--openai` for the
server of OpenAI's protocol. A prompt may end in a mark: `!raise` (the step that computes its end raises), `!raise=3`
(the third step after that does), so too `!memory`, `!oom`, `!sleep` and `!lock` (the step never ends); `!encode`
(tokenising raises), `!decode` (decoding its first token does).
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from tests.helpers.fake_server import take_program
from vllm_lite.build import BuiltEngine, build_parts
from vllm_lite.config import EngineConfig
from vllm_lite.engine.async_llm_engine import AsyncLLMEngine
from vllm_lite.engine.llm_engine import Executor, LLMEngine
from vllm_lite.engine.step import StepInput, StepOutput
from vllm_lite.engine.tokenizer_protocol import Tokenizer
from vllm_lite.entrypoints.launch import main

INSIDES = "0xdeadbeef in /opt/insides.cpp:42"
"""In the messages of all errors: for the log, and not for clients."""
MARK = re.compile(r"!(raise|memory|oom|sleep|lock)(?:=(\d+))?$")


def _raise(error: Exception) -> NoReturn:
    raise error


def _lock() -> None:
    lock = threading.Lock()
    for _ in range(2):
        lock.acquire()


FAULTS: dict[str, Callable[[], None]] = {
    "raise": lambda: _raise(RuntimeError(INSIDES)),
    "memory": lambda: _raise(MemoryError(INSIDES)),
    "oom": lambda: _raise(torch.OutOfMemoryError(f"CUDA out of memory. {INSIDES}")),
    "sleep": lambda: time.sleep(1e6),
    "lock": _lock,
}


class FaultyExecutor:
    """Computes steps as another executor does, but for those that shall fail."""

    def __init__(self, executor: Executor, tokenizer: Tokenizer) -> None:
        self._executor = executor
        self._tokenizer = tokenizer
        self._fault: Callable[[], None] | None = None
        self._num_steps_before = 0

    def execute(self, step: StepInput) -> StepOutput:
        for start, end in zip(step.query_starts.tolist(), step.query_starts[1:].tolist()):
            if found := MARK.search(self._tokenizer.decode(step.token_ids[start:end].tolist())):
                self._fault, self._num_steps_before = FAULTS[found[1]], int(found[2] or 0)
        if self._fault is not None:
            if self._num_steps_before == 0:
                fault, self._fault = self._fault, None
                fault()
            self._num_steps_before -= 1
        return self._executor.execute(step)


class FaultyTokenizer:
    """Another tokenizer, but for the prompts and answers that it fails at."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str) -> list[int]:
        if text.endswith("!encode"):
            raise RuntimeError(INSIDES)
        return self._tokenizer.encode(text)

    def decode(self, token_ids: Sequence[int], **flags: bool) -> str:
        text = self._tokenizer.decode(token_ids, **flags)
        if "!decode" in text and not text.endswith("!decode"):
            raise RuntimeError(INSIDES)
        return text


def build(config: EngineConfig) -> BuiltEngine:
    parts = build_parts(config)
    tokenizer: Any = FaultyTokenizer(parts.tokenizer)
    executor = FaultyExecutor(parts.executor, parts.tokenizer)
    engine = AsyncLLMEngine(LLMEngine(parts.settings, tokenizer), executor, log_stats=not config.disable_log_stats)
    return BuiltEngine(engine, "faulty", tokenizer, parts.settings.max_model_len, parts.chat_template)


if __name__ == "__main__":
    chosen, words = take_program(sys.argv[1:])
    sys.exit(main(words, build, chosen))
