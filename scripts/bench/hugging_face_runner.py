"""Hugging Face in process, with a static batch."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from transformers.generation.streamers import BaseStreamer

from scripts.bench.figures import Run
from scripts.bench.workloads import Prompt, Workload
from scripts.hugging_face import load_reference
from vllm_lite.config import EngineConfig
from vllm_lite.worker.checkpoint import open_checkpoint


class HuggingFaceRunner:
    """`generate` of transformers on the same weights; prompts of equal length need no padding."""

    def __init__(self, model: str | None, dtype: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self._model = load_reference(open_checkpoint(EngineConfig(model=model)).path, getattr(torch, dtype))

    def __call__(self, workload: Workload, prompts: Sequence[Prompt]) -> Run:
        """Runs all prompts in one batch. Only a single prompt can be streamed."""
        streamer = TokenClock() if len(prompts) == 1 else None
        ids = torch.tensor([prompt.token_ids for prompt in prompts])
        start_s = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=workload.output_len,  # masks the end of sequence
                max_new_tokens=workload.output_len,
                pad_token_id=0,
                streamer=streamer,
            )
        seconds = time.perf_counter() - start_s
        token_times = [] if streamer is None else [[now_s - start_s for now_s in streamer.times]]
        return Run(seconds, output[:, ids.shape[1] :].numel(), token_times)


class TokenClock(BaseStreamer):  # type: ignore[misc,unused-ignore]
    """Notes when transformers hands out each token."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """The prompt first, then a token at a time."""
        if self._has_prompt:
            self.times.append(time.perf_counter())
        self._has_prompt = True

    def end(self) -> None:
        """Nothing is left to do."""
