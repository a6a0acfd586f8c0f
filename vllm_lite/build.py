"""The composition root: makes an engine from a configuration. The only file that sees control plane and data plane."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_lite.config import INT32_MAX, EngineConfig, ModelConfig
from vllm_lite.engine.async_llm_engine import AsyncLLMEngine
from vllm_lite.engine.llm_engine import LLMEngine
from vllm_lite.engine.settings import EngineSettings
from vllm_lite.engine.tokenizer_protocol import Tokenizer
from vllm_lite.errors import StartupError
from vllm_lite.kernels.cpu import PANEL_ROWS, CpuKernels, load_cpu_kernels
from vllm_lite.kernels.topology import available_cpus, physical_cores
from vllm_lite.models.registry import build_model
from vllm_lite.tokenizer import load_tokenizer
from vllm_lite.worker.checkpoint import Checkpoint, open_checkpoint, tokenizer_path
from vllm_lite.worker.dtype import resolve_dtype
from vllm_lite.worker.executor import LocalExecutor
from vllm_lite.worker.gguf_header import open_gguf
from vllm_lite.worker.hf_config import derived_max_model_len
from vllm_lite.worker.kv_cache import available_memory, choose_num_blocks
from vllm_lite.worker.model_runner import ModelRunner
from vllm_lite.worker.weights import num_available_cores

logger = logging.getLogger(__name__)

TOKEN_BUDGET_ON_CPU = 512


@dataclass(frozen=True)
class EngineParts:
    """An engine and what it runs on, for callers that step it themselves."""

    engine: LLMEngine
    executor: LocalExecutor
    settings: EngineSettings
    tokenizer: Tokenizer
    model: ModelConfig
    checkpoint_path: Path


@dataclass(frozen=True)
class BuiltEngine:
    """An engine that is ready to be started on an event loop."""

    engine: AsyncLLMEngine
    model_name: str


def build_engine(config: EngineConfig) -> BuiltEngine:
    """Loads everything. Raises StartupError where the configuration, the checkpoint or the memory does not allow it."""
    parts = build_parts(config)
    engine = AsyncLLMEngine(parts.engine, parts.executor, log_stats=not config.disable_log_stats)
    return BuiltEngine(engine, config.model or parts.checkpoint_path.stem)


def build_parts(config: EngineConfig) -> EngineParts:
    """Like `build_engine`, without an event loop."""
    device = torch.device("cpu")
    kernels = _cpu_kernels(config)
    torch.set_num_threads(config.num_threads or num_available_cores())
    checkpoint = open_checkpoint(config)
    dtype = resolve_dtype(config, checkpoint.config, checkpoint.gguf_metadata is not None, device)
    max_model_len = choose_max_model_len(config, checkpoint.config)
    # What cannot work ends the start before the weights are read, and before there is a table for a huge context.
    _choose_num_blocks(config, checkpoint.config, dtype, max_model_len)
    with _named_memory_errors(checkpoint.config, max_model_len):
        panel_rows = 1 if kernels is None else PANEL_ROWS
        model = build_model(checkpoint.config, dtype, max_model_len, device, panel_rows)
    with ThreadPoolExecutor(max_workers=1) as pool:
        tokenizer = pool.submit(_load_tokenizer, config, checkpoint)
        checkpoint.load_into(model.weight_targets(), model.is_ignored)
        if kernels is not None:
            for matrix in model.options.matrices:
                kernels.pack(matrix)
    num_blocks = _choose_num_blocks(config, checkpoint.config, dtype, max_model_len)
    settings = EngineSettings(
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or TOKEN_BUDGET_ON_CPU,
        max_logprobs=config.max_logprobs,
        enable_prefix_caching=config.enable_prefix_caching,
        vocab_size=checkpoint.config.vocab_size,
        eos_token_ids=_end_ids(checkpoint.config, tokenizer.result()),
        seed=config.seed,
    )
    with _named_memory_errors(checkpoint.config, max_model_len):
        runner = ModelRunner(
            model,
            max_model_len=max_model_len,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            block_size=settings.block_size,
            num_blocks=num_blocks,
            cpu=kernels,
            enforce_eager=config.enforce_eager,
        )
    logger.info(
        "%s in %s on %d threads: context %d tokens, KV cache %d blocks of %d tokens",
        checkpoint.config.architecture,
        str(dtype).removeprefix("torch."),
        torch.get_num_threads() if kernels is None else kernels.num_threads,
        max_model_len,
        num_blocks,
        settings.block_size,
    )
    return EngineParts(
        engine=LLMEngine(settings, tokenizer.result()),
        executor=LocalExecutor(runner),
        settings=settings,
        tokenizer=tokenizer.result(),
        model=checkpoint.config,
        checkpoint_path=checkpoint.path,
    )


def _cpu_kernels(config: EngineConfig) -> CpuKernels | None:
    cores = physical_cores()
    if config.num_threads is not None and config.num_threads > len(available_cpus()):
        raise StartupError(
            f"--num-threads {config.num_threads} is more than the {len(available_cpus())} cores that this process may "
            "use: set it to that or less, or leave it out."
        )
    return load_cpu_kernels(config.num_threads or len(cores), cores)


def choose_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """`--max-model-len`, else what the checkpoint allows. Raises StartupError for more than that.

    Only dynamic RoPE scaling is made for contexts beyond the checkpoint's length.
    """
    longest = derived_max_model_len(model)
    if config.max_model_len is None:
        return longest
    if model.rope.kind == "dynamic":
        longest = min(int(longest * model.rope.factor), INT32_MAX)
    if config.max_model_len > longest:
        raise StartupError(
            f"--max-model-len {config.max_model_len} is more than the checkpoint's context of {longest} tokens: "
            f"set it to {longest} or less, or leave it out."
        )
    return config.max_model_len


def _choose_num_blocks(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, max_model_len: int) -> int:
    """For the memory of this moment."""
    return choose_num_blocks(
        model,
        dtype=dtype,
        block_size=config.block_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        num_kv_blocks=config.num_kv_blocks,
        available_bytes=available_memory() if config.num_kv_blocks is None else 0,
    )


@contextlib.contextmanager
def _named_memory_errors(model: ModelConfig, max_model_len: int) -> Iterator[None]:
    """torch says of memory that is not there, and of sizes that no memory has, that they are a RuntimeError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and not re.search("memory|overflow", str(error)):
            raise
        raise StartupError(
            f"there is not enough memory for {model.architecture} with {model.num_layers} layers, hidden size "
            f"{model.hidden_size}, a vocabulary of {model.vocab_size} and a context of {max_model_len} tokens: free "
            "some, take a smaller model, or lower --max-model-len, --num-kv-blocks, --max-num-seqs or "
            f"--max-num-batched-tokens. ({str(error).partition(chr(10))[0]})"
        ) from error


def _load_tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer:
    is_own = config.tokenizer is None
    path = tokenizer_path(config, checkpoint)
    metadata = checkpoint.gguf_metadata if is_own else None
    if not is_own and path.suffix == ".gguf":
        metadata = open_gguf(path).metadata
    return load_tokenizer(
        path,
        mode=config.tokenizer_mode,
        gguf_metadata=metadata,
        trust_remote_code=config.trust_remote_code,
    )


def _end_ids(model: ModelConfig, tokenizer: Tokenizer) -> frozenset[int]:
    """Every id that ends a sequence: those of the checkpoint's files, and the tokenizer's own."""
    own = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    return model.eos_token_ids | own
