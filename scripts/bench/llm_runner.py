"""This engine as `LLM.generate` runs it: with its event loop, without HTTP."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from scripts.bench.figures import Run
from scripts.bench.workloads import Prompt, Workload
from vllm_lite import LLM, SamplingParams


class LlmRunner:
    """`options` are those of `LLM`."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._llm = LLM(**options)

    def __call__(self, workload: Workload, prompts: Sequence[Prompt]) -> Run:
        """Runs all prompts at once."""
        params = SamplingParams(temperature=0, max_tokens=workload.output_len, ignore_eos=True)
        start_s = time.perf_counter()
        outputs = self._llm.generate([prompt.text for prompt in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - start_s
        return Run(seconds, sum(len(output.outputs[0].token_ids) for output in outputs), [])
