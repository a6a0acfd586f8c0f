"""The CPU as what a model is computed on: its kernels, and the cores they run on."""

from __future__ import annotations

import logging

from vllm_lite.config import ModelConfig
from vllm_lite.errors import StartupError
from vllm_lite.kernels.cpu import MAX_HEAD_DIM, MAX_INNER_SIZE, CpuKernels, load_cpu_kernels
from vllm_lite.kernels.topology import available_cpus, cpu_quota, physical_cores

logger = logging.getLogger(__name__)


def find_cpu_kernels(num_threads: int | None, model: ModelConfig) -> CpuKernels | None:
    """What `--num-threads` asks for, by default a thread for each physical core; None where torch must do.

    Raises StartupError for more threads than there are cores, of which some would only wait for others.
    """
    cpus, cores, quota = available_cpus(), physical_cores(), cpu_quota()
    if num_threads is not None and num_threads > len(cpus):
        raise StartupError(
            f"--num-threads {num_threads} is more than the {len(cpus)} cores that this process may use: set it to "
            f"{len(cpus)} or less, or leave it out."
        )
    if (reason := _beyond_the_kernels(model)) is not None:
        logger.warning("the CPU kernels cannot be used, so torch computes everything, several times slower: %s", reason)
        return None
    if num_threads is None:
        num_threads = min(len(cores), quota or len(cores))
    # With cores to spare, others may be on the first ones: then the system knows better where threads belong.
    is_alone = num_threads == len(cores) and (quota is None or quota >= len(cpus))
    return load_cpu_kernels(num_threads, cores if is_alone else ())


def _beyond_the_kernels(model: ModelConfig) -> str | None:
    """What of a model's sizes they do not take."""
    if model.head_dim > MAX_HEAD_DIM or model.head_dim % 2:
        return f"they take heads of an even number of dimensions up to {MAX_HEAD_DIM}, the model has {model.head_dim}"
    sizes = (model.hidden_size, model.intermediate_size, model.num_heads * model.head_dim, model.embedding_size)
    if max(sizes) > MAX_INNER_SIZE or any(size % 2 for size in sizes):
        return f"they take layers of even sizes up to {MAX_INNER_SIZE}, the model has {', '.join(map(str, sizes))}"
    return None
