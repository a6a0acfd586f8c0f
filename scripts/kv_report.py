"""How well the KV cache is used: slots that are allocated but empty, and blocks that sharing saves.

Shared are prefixes of prompts, the blocks of several candidates of a request, and those of beams.

Drives the engine without a model: an executor that answers at once, requests with lengths like those of ShareGPT
(log-normal) that arrive at a steady rate, and fewer blocks than they would like to have.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_lite.config import program_name
from vllm_lite.engine.llm_engine import LLMEngine
from vllm_lite.engine.settings import EngineSettings
from vllm_lite.engine.step import NO_LOGPROBS, Continuations, Logprobs, StepInput, StepOutput
from vllm_lite.sampling_params import SamplingParams

VOCAB_SIZE = 32_000
MAX_MODEL_LEN = 4096
MEAN_PROMPT_LEN = 161
MEAN_OUTPUT_LEN = 338
SPREAD = 1.0
"""Standard deviation of the logarithm of a length."""


class SilentTokenizer:
    """No id has text: the report is about blocks."""

    vocab_size = VOCAB_SIZE
    eos_token_id: int | None = None
    special_ids: frozenset[int] = frozenset()
    is_quick = True

    def min_num_tokens(self, text: str) -> int:
        """Nothing is known."""
        return 0

    def encode(self, text: str) -> list[int]:
        """No text is ever encoded."""
        raise NotImplementedError

    def encode_plain(self, text: str) -> list[int]:
        """No text is ever encoded."""
        raise NotImplementedError

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Nothing."""
        return ""


class InstantExecutor:
    """Answers every sampled row with the same token, and beams with tokens whose logprobs are drawn at random."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = np.random.default_rng(seed)

    def execute(self, step: StepInput) -> StepOutput:
        """Computes nothing."""
        num_logprobs, num_beams = len(step.sampling.logprob_rows), len(step.sampling.beam_rows)
        empty = np.zeros((num_logprobs, 0))
        logprobs = Logprobs(np.zeros(num_logprobs, np.float32), empty.astype(np.int32), empty.astype(np.float32))
        return StepOutput(
            np.ones(step.shape.num_rows, np.int32),
            logprobs=logprobs if num_logprobs else NO_LOGPROBS,
            continuations=self._continuations(num_beams, int(step.sampling.num_continuations.max(initial=0))),
        )

    def _continuations(self, num_beams: int, count: int) -> Continuations:
        """As peaked as a language model's: the best of 1,000 tokens has a third of the probability in the mean."""
        logits = -np.sort(-self._generator.normal(0, 2.5, (num_beams, 1000)), axis=1)
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        ids = np.tile(np.arange(count, dtype=np.int32), (num_beams, 1))
        return Continuations(ids, logprobs[:, :count].astype(np.float32))


@dataclass(frozen=True)
class WasteReport:
    """Averages over the steps of one run. Lengths are in tokens, shares between 0 and 1."""

    waste: float
    """Of the allocated token slots, those without a token."""
    blocks_in_use: float
    """Of all blocks, the allocated ones."""
    mean_prompt_len: float
    mean_output_len: float
    num_steps: int
    num_preemptions: int
    recomputed: float
    """Tokens computed again after a preemption, as a share of all that had to be computed."""


def make_engine(*, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> LLMEngine:
    """An engine with room for as many sequences as its blocks hold."""
    settings = EngineSettings(
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        max_logprobs=0,
        enable_prefix_caching=enable_prefix_caching,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset(),
        seed=0,
    )
    return LLMEngine(settings, SilentTokenizer())


def draw_lengths(generator: np.random.Generator, mean: float, count: int) -> list[int]:
    """Log-normal lengths, clipped to 4 .. 2000."""
    drawn = generator.lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD, count)
    return [int(length) for length in np.clip(drawn, 4, 2000)]


def report_waste(
    *, num_requests: int, num_blocks: int, block_size: int, arrivals_per_step: float, seed: int
) -> WasteReport:
    """Runs all requests, which arrive at random with a steady rate. Without reuse, so that slots are easy to count."""
    generator = np.random.default_rng(seed)
    prompt_lens = draw_lengths(generator, MEAN_PROMPT_LEN, num_requests)
    output_lens = draw_lengths(generator, MEAN_OUTPUT_LEN, num_requests)
    arrivals = np.cumsum(generator.exponential(1 / arrivals_per_step, num_requests))
    engine = make_engine(num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=False)
    executor = InstantExecutor()
    wastes: list[float] = []
    in_use: list[float] = []
    num_arrived = num_steps = num_computed = 0
    while num_arrived < num_requests or engine.has_unfinished:
        while num_arrived < num_requests and arrivals[num_arrived] <= num_steps:
            prompt = generator.integers(0, VOCAB_SIZE, prompt_lens[num_arrived]).tolist()
            params = SamplingParams(max_tokens=output_lens[num_arrived], ignore_eos=True)
            engine.add_request(str(num_arrived), None, prompt, params)
            num_arrived += 1
        num_steps += 1
        step = engine.begin_step()
        if step is not None:
            num_computed += step.shape.num_tokens
            num_allocated = num_blocks - engine.stats().num_free_blocks
            wastes.append(1 - int(step.context_lens.sum()) / (num_allocated * block_size))
            in_use.append(num_allocated / num_blocks)
            engine.finish_step(executor.execute(step))
    return WasteReport(
        waste=statistics.fmean(wastes),
        blocks_in_use=statistics.fmean(in_use),
        mean_prompt_len=statistics.fmean(prompt_lens),
        mean_output_len=statistics.fmean(output_lens),
        num_steps=num_steps,
        num_preemptions=engine.stats().num_preemptions,
        recomputed=num_computed / (sum(prompt_lens) + sum(output_lens) - num_requests) - 1,
    )


def count_blocks_of_shared_prompts(
    *, num_prompts: int, prefix_len: int, own_len: int, block_size: int, enable_prefix_caching: bool
) -> int:
    """The most blocks in use while prompts that begin with the same tokens are served together.

    One of them comes first, as the system prompt of a server that has been running for a while.
    """
    generator = np.random.default_rng(0)
    prefix = generator.integers(0, VOCAB_SIZE, prefix_len).tolist()
    num_blocks = num_prompts * (prefix_len + own_len + 2 * block_size) // block_size
    engine = make_engine(num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=enable_prefix_caching)
    executor = InstantExecutor()
    # All stay until the last one has come: a step computes 2,048 tokens.
    num_steps = num_prompts * (prefix_len + own_len) // 1024 + 8
    most = 0
    for index in range(num_prompts):
        own = generator.integers(0, VOCAB_SIZE, own_len).tolist()
        engine.add_request(str(index), None, prefix + own, SamplingParams(max_tokens=num_steps, ignore_eos=True))
        if index == 0:
            engine.step(executor)
    while engine.has_unfinished:
        engine.step(executor)
        most = max(most, num_blocks - engine.stats().num_free_blocks)
    return most


def share_saved_by_candidates(*, num_requests: int, block_size: int, num_candidates: int, is_beams: bool) -> float:
    """Of the blocks that candidates would need if each had its own, those that sharing saves: the mean over all steps.

    As the paper on PagedAttention counts: https://arxiv.org/abs/2309.06180, figure 15.
    """
    generator = np.random.default_rng(0)
    prompt_lens = draw_lengths(generator, MEAN_PROMPT_LEN, num_requests)
    output_lens = draw_lengths(generator, MEAN_OUTPUT_LEN, num_requests)
    engine = make_engine(num_blocks=100_000, block_size=block_size, enable_prefix_caching=False)
    executor = InstantExecutor()
    for index, (prompt_len, output_len) in enumerate(zip(prompt_lens, output_lens)):
        params = SamplingParams(
            n=num_candidates,
            use_beam_search=is_beams,
            temperature=0 if is_beams else 1,
            max_tokens=output_len,
            ignore_eos=True,
        )
        engine.add_request(str(index), None, generator.integers(0, VOCAB_SIZE, prompt_len).tolist(), params)
    saved: list[float] = []
    while engine.has_unfinished:
        step = engine.begin_step()
        assert step is not None
        if step.shape.num_tokens == step.shape.num_seqs:  # no prompt is on its way
            own = int((-(-step.context_lens // block_size)).sum())
            stats = engine.stats()
            saved.append(1 - (stats.num_total_blocks - stats.num_free_blocks) / own)
        engine.finish_step(executor.execute(step))
    return statistics.fmean(saved)


def main() -> None:
    """Reads the command line, runs, prints."""
    parser = argparse.ArgumentParser(
        prog=program_name("scripts.kv_report"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--num-requests", type=int, default=1000)
    parser.add_argument("--num-blocks", type=int, default=2048)
    parser.add_argument("--block-size", type=int, default=16, choices=[8, 16, 32])
    parser.add_argument("--arrivals-per-step", type=float, default=0.25)
    parser.add_argument("--num-prompts", type=int, default=32, help="prompts that share a prefix")
    parser.add_argument("--prefix-len", type=int, default=512, help="tokens that they share")
    parser.add_argument("--own-len", type=int, default=64, help="tokens that each has to itself")
    parser.add_argument("--num-shared", type=int, default=100, help="requests with several candidates")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    waste = report_waste(
        num_requests=arguments.num_requests,
        num_blocks=arguments.num_blocks,
        block_size=arguments.block_size,
        arrivals_per_step=arguments.arrivals_per_step,
        seed=arguments.seed,
    )
    print(
        f"{arguments.num_requests} requests, mean prompt {waste.mean_prompt_len:.0f} and output "
        f"{waste.mean_output_len:.0f} tokens, {waste.num_steps} steps"
    )
    print(f"preemptions              {waste.num_preemptions:8}, {waste.recomputed:.1%} of the tokens computed twice")
    print(f"blocks in use            {waste.blocks_in_use:8.1%} of {arguments.num_blocks}")
    print(f"KV waste                 {waste.waste:8.2%} of the allocated token slots")
    without, shared = (
        count_blocks_of_shared_prompts(
            num_prompts=arguments.num_prompts,
            prefix_len=arguments.prefix_len,
            own_len=arguments.own_len,
            block_size=arguments.block_size,
            enable_prefix_caching=enable_prefix_caching,
        )
        for enable_prefix_caching in (False, True)
    )
    print(
        f"{arguments.num_prompts} prompts that share {arguments.prefix_len} tokens and add {arguments.own_len}: "
        f"{without} blocks without reuse, {shared} with it, {1 - shared / without:.1%} saved"
    )
    for name, is_beams, published in (("candidates", False, "16 to 31 %"), ("beams", True, "44 to 66 %")):
        share = share_saved_by_candidates(
            num_requests=arguments.num_shared, block_size=arguments.block_size, num_candidates=4, is_beams=is_beams
        )
        print(
            f"{arguments.num_shared} requests of 4 {name}: {share:.1%} of the blocks saved "
            f"(published for vLLM on ShareGPT, 2 to 6 of them: {published})"
        )


if __name__ == "__main__":
    main()
