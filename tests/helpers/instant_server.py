"""The real server and the real engine on a model whose steps cost nothing: what it takes is all the server's own.

Run as a module with the real command line and a checkpoint.
"""

from __future__ import annotations

import sys

import numpy as np

from tests.helpers.timed_server import TimedExecutor
from vllm_lite.build import BuiltEngine, build_parts
from vllm_lite.config import EngineConfig
from vllm_lite.engine.async_llm_engine import AsyncLLMEngine
from vllm_lite.engine.llm_engine import LLMEngine
from vllm_lite.engine.step import StepInput, StepOutput
from vllm_lite.entrypoints.launch import main
from vllm_lite.entrypoints.native.routes import NATIVE

TOKEN_ID = ord("x")


class InstantExecutor:
    """Chooses the same token always."""

    def execute(self, step: StepInput) -> StepOutput:
        return StepOutput(np.full(step.sampling.num_rows, TOKEN_ID, np.int32))


def build(config: EngineConfig) -> BuiltEngine:
    parts = build_parts(config)
    engine = AsyncLLMEngine(LLMEngine(parts.settings, parts.tokenizer), TimedExecutor(InstantExecutor()))
    return BuiltEngine(engine, "instant", parts.tokenizer, parts.settings.max_model_len, parts.chat_template)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], build, NATIVE))
