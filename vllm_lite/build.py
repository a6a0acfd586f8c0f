"""The composition root: makes an engine from a configuration. The only file that sees control plane and data plane."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from vllm_lite.base_tokenizer import BaseTokenizer
from vllm_lite.chat_template import ChatTemplate, choose_chat_template, read_template_option
from vllm_lite.config import INT32_MAX, LEAST_CONTEXT, EngineConfig, ModelConfig
from vllm_lite.engine.async_llm_engine import AsyncLLMEngine
from vllm_lite.engine.llm_engine import LLMEngine
from vllm_lite.engine.settings import EngineSettings
from vllm_lite.engine.tokenizer_protocol import Tokenizer
from vllm_lite.errors import StartupError
from vllm_lite.models.registry import build_model
from vllm_lite.tokenizer import load_tokenizer
from vllm_lite.worker.checkpoint import Checkpoint, open_checkpoint, tokenizer_path
from vllm_lite.worker.cpu import find_cpu_kernels
from vllm_lite.worker.cuda_graphs import Capture, CudaGraphs
from vllm_lite.worker.dtype import resolve_dtype
from vllm_lite.worker.executor import LocalExecutor
from vllm_lite.worker.gguf_header import open_gguf
from vllm_lite.worker.gpu import Gpu, find_gpu
from vllm_lite.worker.hf_config import derived_max_model_len
from vllm_lite.worker.huge_pages import Arena
from vllm_lite.worker.kv_cache import CacheBudget, available_memory, budget_on_cpu, budget_on_gpu, choose_num_blocks
from vllm_lite.worker.largest_step import largest_step
from vllm_lite.worker.model_runner import ModelRunner
from vllm_lite.worker.weights import num_available_cores

logger = logging.getLogger(__name__)

TOKEN_BUDGET_ON_CPU = 512
TOKEN_BUDGET_ON_GPU = 2048
NO_MEMORY = re.compile("out of memory|can(no|')t allocate|not enough memory|overflow", re.IGNORECASE)
"""In a RuntimeError of torch's. A GPU that reports an illegal memory access has memory enough."""


@dataclass(frozen=True)
class EngineParts:
    """An engine and what it runs on, for callers that step it themselves."""

    engine: LLMEngine
    executor: LocalExecutor
    settings: EngineSettings
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    model: ModelConfig
    checkpoint_path: Path


@dataclass(frozen=True)
class BuiltEngine:
    """An engine that is ready to be started on an event loop."""

    engine: AsyncLLMEngine
    model_name: str
    tokenizer: Tokenizer
    max_model_len: int
    chat_template: ChatTemplate | None


def build_engine(config: EngineConfig) -> BuiltEngine:
    """Loads everything. Raises StartupError where the configuration, the checkpoint or the memory does not allow it."""
    parts = build_parts(config)
    engine = AsyncLLMEngine(parts.engine, parts.executor, log_stats=not config.disable_log_stats)
    return BuiltEngine(
        engine,
        model_name=config.model or parts.checkpoint_path.stem,
        tokenizer=parts.tokenizer,
        max_model_len=parts.settings.max_model_len,
        chat_template=parts.chat_template,
    )


def build_parts(config: EngineConfig) -> EngineParts:
    """Like `build_engine`, without an event loop."""
    given_template = read_template_option(config.chat_template)
    gpu = find_gpu(config.device)
    checkpoint = open_checkpoint(config)
    cpu = find_cpu_kernels(config.num_threads, checkpoint.config) if gpu is None else None
    # Beside the kernels' threads, others of torch's would only be in their way.
    torch.set_num_threads(1 if cpu is not None else config.num_threads or num_available_cores())
    plan = _make_plan(config, checkpoint, gpu, has_cpu_kernels=cpu is not None)
    # What cannot work ends the start before the weights are read, and before there is a table for a huge context.
    plan.choose_num_blocks(_cache_size(config, gpu))
    cuda = None if gpu is None else gpu.compile_for(plan.dtype, plan.model.head_dim)
    with _named_memory_errors(plan.model, plan.max_model_len):
        model = build_model(
            plan.model,
            plan.dtype,
            plan.max_model_len,
            plan.device,
            panel_rows=1 if cpu is None else cpu.panel_rows,
            new_memory=Arena().empty if gpu is None else None,
        )
        with ThreadPoolExecutor(max_workers=1) as pool:
            tokenizer = pool.submit(_load_tokenizer, config, checkpoint)
            chat_template = pool.submit(lambda: choose_chat_template(given_template, tokenizer.result()))
            checkpoint.load_into(model.weight_targets(), model.is_ignored)
            if cpu is not None:
                cpu.pack_all(model.options.matrices)
        new_runner = partial(
            ModelRunner,
            model,
            **plan.step_sizes,
            block_size=plan.block_size,
            cuda=cuda,
            cpu=cpu,
            enforce_eager=config.enforce_eager,
        )

        def try_largest_step() -> None:
            trial = new_runner(num_blocks=1)
            trial.activations.attended.zero_()  # nothing attends to anything; a NaN there would spare the sampler work
            trial.run(largest_step(**plan.step_sizes))

        num_blocks = plan.choose_num_blocks(_cache_size(config, gpu, try_largest_step))
        runner = new_runner(num_blocks=num_blocks)
        if gpu is not None:
            _warm_up(runner, plan, None if config.enforce_eager else gpu.capture)
    logger.info(
        "%s in %s on %s: context %d tokens, KV cache %d blocks of %d tokens",
        plan.model.architecture,
        str(plan.dtype).removeprefix("torch."),
        f"{torch.get_num_threads() if cpu is None else cpu.num_threads} threads" if gpu is None else gpu.name,
        plan.max_model_len,
        num_blocks,
        plan.block_size,
    )
    settings = _engine_settings(config, plan, num_blocks, tokenizer.result())
    prepare_thread = None if cpu is None else cpu.pin_caller
    if gpu is not None:
        prepare_thread = gpu.make_current
    return EngineParts(
        engine=LLMEngine(settings, tokenizer.result()),
        executor=LocalExecutor(runner, prepare_thread),
        settings=settings,
        tokenizer=tokenizer.result(),
        chat_template=chat_template.result(),
        model=plan.model,
        checkpoint_path=checkpoint.path,
    )


def _engine_settings(config: EngineConfig, plan: _Plan, num_blocks: int, tokenizer: Tokenizer) -> EngineSettings:
    return EngineSettings(
        **plan.step_sizes,
        block_size=plan.block_size,
        num_blocks=num_blocks,
        max_logprobs=choose_max_logprobs(config, plan.model),
        enable_prefix_caching=config.enable_prefix_caching,
        vocab_size=plan.model.vocab_size,
        eos_token_ids=_end_ids(plan.model, tokenizer),
        seed=config.seed,
    )


@dataclass(frozen=True)
class _Plan:
    """What is decided before anything is made."""

    model: ModelConfig
    dtype: torch.dtype
    device: torch.device
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int

    @property
    def step_sizes(self) -> dict[str, int]:
        """What bounds a step, as keywords."""
        names = ("max_model_len", "max_num_seqs", "max_num_batched_tokens")
        return {name: getattr(self, name) for name in names}

    def choose_num_blocks(self, size: CacheBudget | int) -> int:
        """Raises StartupError as the function does."""
        return choose_num_blocks(
            self.model,
            dtype=self.dtype,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            size=size,
        )


def _make_plan(config: EngineConfig, checkpoint: Checkpoint, gpu: Gpu | None, *, has_cpu_kernels: bool) -> _Plan:
    device = torch.device("cpu") if gpu is None else gpu.device
    return _Plan(
        model=checkpoint.config,
        dtype=resolve_dtype(config, checkpoint.config, checkpoint.gguf_metadata is not None, device, has_cpu_kernels),
        device=device,
        block_size=config.block_size,
        max_model_len=choose_max_model_len(config, checkpoint.config),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens
        or (TOKEN_BUDGET_ON_CPU if gpu is None else TOKEN_BUDGET_ON_GPU),
    )


def choose_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """`--max-model-len`, else what the checkpoint allows. Raises StartupError for more than that.

    Only dynamic RoPE scaling is made for contexts beyond the checkpoint's length.
    """
    longest = derived_max_model_len(model)
    if longest < LEAST_CONTEXT:
        raise StartupError(
            f"the checkpoint's context of {longest} token has no room for a prompt and an answer, which need at least "
            f"{LEAST_CONTEXT}: correct its config.json, or name another model with --model."
        )
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


def choose_max_logprobs(config: EngineConfig, model: ModelConfig) -> int:
    """`--max-logprobs`, or as many as there are tokens."""
    if config.max_logprobs > model.vocab_size:
        logger.warning(
            "--max-logprobs %d is more than the vocabulary has tokens: %d are meant",
            config.max_logprobs,
            model.vocab_size,
        )
    return min(config.max_logprobs, model.vocab_size)


def _warm_up(runner: ModelRunner, plan: _Plan, capture: Capture | None) -> None:
    """So that the first request waits for nothing, and no memory that a graph uses is given up for a larger piece."""
    runner.run(largest_step(**plan.step_sizes))
    if capture is not None:
        with torch.inference_mode():
            runner.compute = CudaGraphs(runner.compute, capture, **plan.step_sizes)


def _cache_size(
    config: EngineConfig, gpu: Gpu | None, try_largest_step: Callable[[], None] = lambda: None
) -> CacheBudget | int:
    """`--num-kv-blocks`, or what the memory of this moment leaves, on a GPU once the largest step has been tried."""
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    if gpu is None:
        return budget_on_cpu(available_memory())
    return budget_on_gpu(gpu.memory_during(try_largest_step), config.gpu_memory_utilization)


@contextlib.contextmanager
def _named_memory_errors(model: ModelConfig, max_model_len: int) -> Iterator[None]:
    """torch says of memory that is not there, and of sizes that no memory has, that they are a RuntimeError."""
    try:
        yield
    except StartupError:
        raise
    except (RuntimeError, MemoryError) as error:
        is_named = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not is_named and NO_MEMORY.search(str(error)) is None:
            raise
        raise StartupError(
            f"there is not enough memory for {model.architecture} with {model.num_layers} layers, hidden size "
            f"{model.hidden_size}, a vocabulary of {model.vocab_size} and a context of {max_model_len} tokens: free "
            "some, take a smaller model, or lower --max-model-len, --num-kv-blocks, --max-num-seqs or "
            f"--max-num-batched-tokens. ({str(error).partition(chr(10))[0]})"
        ) from error


def _load_tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> BaseTokenizer:
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
