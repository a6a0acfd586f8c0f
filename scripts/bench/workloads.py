"""What is measured: prompts of a length, as many at once, so many new tokens each. Knows no engine and no server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Workload:
    """`num_prompts` prompts of `prompt_len` tokens at once, `output_len` new tokens each, end of sequence ignored."""

    name: str
    num_prompts: int
    prompt_len: int
    output_len: int

    @property
    def num_tokens(self) -> int:
        """New tokens of a whole run."""
        return self.num_prompts * self.output_len

    @property
    def max_len(self) -> int:
        """Tokens of a prompt and its answer together."""
        return self.prompt_len + self.output_len

    def num_blocks(self, block_size: int) -> int:
        """KV blocks that a run fills."""
        return self.num_prompts * -(-self.max_len // block_size)


@dataclass(frozen=True)
class Prompt:
    """The same prompt as text and as the ids that the model's tokenizer makes of it."""

    text: str
    token_ids: list[int]


def absolute_model(model: str | None) -> str | None:
    """A path that means the same in every folder; the name of a model on the hub stays as it is."""
    return str(Path(model).resolve()) if model is not None and Path(model).exists() else model


def engine_options(
    workloads: list[Workload], *, model: str | None, dtype: str, threads: int, block_size: int = 16
) -> dict[str, str | int | bool | None]:
    """Fields of `EngineConfig` for all of these workloads, the same for the engine in process and for the server.

    The cache has no block more than the largest workload fills, so that after one run of it no page is untouched: the
    system lets all of those share one page of zeros, which is in the processor's cache, and long contexts look fast.
    """
    longest = max(workload.max_len for workload in workloads)
    return {
        "model": model,
        "dtype": dtype,
        "num_threads": threads,
        "device": "cpu",
        "max_model_len": longest,
        "block_size": block_size,
        "num_kv_blocks": max(workload.num_blocks(block_size) for workload in workloads),
        "enable_prefix_caching": False,
    }
