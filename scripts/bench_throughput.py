"""Generated tokens per second of this engine and of Hugging Face `generate`, in turn, on the same prompts.

Both run the same weights in the same dtype on the same threads: a batch of prompts of equal length (which spares
Hugging Face any padding), a fixed number of new tokens each, greedy, end of sequence ignored, prefix reuse off. The
ratio is taken pair by pair; medians are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scripts.hugging_face import load_reference
from vllm_lite import SamplingParams, build
from vllm_lite.config import EngineConfig


def make_prompts(num_prompts: int, prompt_len: int, vocab_size: int) -> list[list[int]]:
    """Random ids from a fixed seed: what they are does not change how long a forward takes."""
    ids = np.random.default_rng(0).integers(100, vocab_size, (num_prompts, prompt_len))
    return [[int(token_id) for token_id in row] for row in ids]


def engine_run(parts: build.EngineParts, prompts: list[list[int]], output_len: int) -> list[list[int]]:
    """Generates with this engine, all prompts at once; returns the new ids of each prompt."""
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    generated: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        parts.engine.add_request(str(index), None, prompt, params)
        generated[str(index)] = []
    while parts.engine.has_unfinished:
        for delta in parts.engine.step(parts.executor):
            generated[delta.request_id].extend(delta.outputs[0].token_ids)
    return list(generated.values())


def hugging_face_run(model: Any, prompts: list[list[int]], output_len: int) -> list[list[int]]:
    """Generates with a static batch of Hugging Face; returns the new ids of each prompt."""
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=output_len,
            max_new_tokens=output_len,
            pad_token_id=0,
        )
    new_ids: list[list[int]] = output[:, ids.shape[1] :].tolist()
    return new_ids


def timed(run: Callable[[], list[list[int]]], num_tokens: int) -> float:
    """Generated tokens per second of one run."""
    start = time.perf_counter()
    generated = run()
    seconds = time.perf_counter() - start
    if sum(map(len, generated)) != num_tokens:
        raise RuntimeError(f"{num_tokens} tokens were asked for, {sum(map(len, generated))} came")
    return num_tokens / seconds


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs both engines in turn and returns the figures."""
    longest = arguments.prompt_len + arguments.output_len
    config = EngineConfig(
        model=arguments.model,
        dtype=arguments.dtype,
        num_threads=arguments.threads,
        max_model_len=longest + 1,
        max_num_seqs=max(arguments.num_prompts, 1),
        enable_prefix_caching=False,
    )
    parts = build.build_parts(config)
    torch.set_num_threads(arguments.threads)
    reference = load_reference(parts.checkpoint_path, getattr(torch, config.torch_dtype_name))
    prompts = make_prompts(arguments.num_prompts, arguments.prompt_len, parts.model.vocab_size)
    num_tokens = arguments.num_prompts * arguments.output_len
    engine_run(parts, prompts, 2)
    hugging_face_run(reference, prompts, 2)
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(arguments.repeats):
        ours.append(timed(lambda: engine_run(parts, prompts, arguments.output_len), num_tokens))
        theirs.append(timed(lambda: hugging_face_run(reference, prompts, arguments.output_len), num_tokens))
        print(f"vllm_lite {ours[-1]:8.1f}   transformers {theirs[-1]:8.1f}   ratio {ours[-1] / theirs[-1]:.2f}   "
              f"load {os.getloadavg()[0]:.1f}", flush=True)  # fmt: skip
    return {
        "prompts": arguments.num_prompts,
        "prompt_tokens": arguments.prompt_len,
        "output_tokens": arguments.output_len,
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "torch": torch.__version__,
        "vllm_lite_tokens_per_s": spread(ours),
        "transformers_tokens_per_s": spread(theirs),
        "ratio": spread([a / b for a, b in zip(ours, theirs)]),
    }


def main() -> None:
    """Reads the command line, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or .gguf file (default: the default model)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    figures = measure(arguments)
    for name in ("vllm_lite_tokens_per_s", "transformers_tokens_per_s", "ratio"):
        values = figures[name]
        print(f"{name:27} median {values['median']:8.2f}   min {values['min']:8.2f}   max {values['max']:8.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
