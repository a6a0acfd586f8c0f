"""This engine in process, with scheduler, sampler and detokeniser."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from scripts.bench.figures import Run
from scripts.bench.workloads import Prompt, Workload
from vllm_lite import SamplingParams, build
from vllm_lite.config import EngineConfig


class EngineRunner:
    """This engine. `options` are fields of `EngineConfig`."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._parts = build.build_parts(EngineConfig(**options))

    def __call__(self, workload: Workload, prompts: Sequence[Prompt]) -> Run:
        """Runs all prompts at once. Raises RuntimeError where the cache was too small for them."""
        engine, executor = self._parts.engine, self._parts.executor
        num_preemptions = engine.stats().num_preemptions
        params = SamplingParams(temperature=0, max_tokens=workload.output_len, ignore_eos=True)
        token_times: dict[str, list[float]] = {str(index): [] for index in range(len(prompts))}
        start_s = time.perf_counter()
        for request_id, prompt in zip(token_times, prompts):
            engine.add_request(request_id, prompt.text, prompt.token_ids, params)
        while engine.has_unfinished:
            deltas = engine.step(executor)
            now_s = time.perf_counter() - start_s
            for delta in deltas:
                token_times[delta.request_id] += [now_s] * len(delta.outputs[0].token_ids)
        seconds = time.perf_counter() - start_s
        if engine.stats().num_preemptions != num_preemptions:
            raise RuntimeError(f"{workload.name}: a request was preempted, so this is no measurement")
        return Run(seconds, sum(map(len, token_times.values())), list(token_times.values()))
