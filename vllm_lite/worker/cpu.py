"""The CPU as what a model is computed on: its kernels, and the cores they run on. Knows no model."""

from __future__ import annotations

from vllm_lite.errors import StartupError
from vllm_lite.kernels.cpu import CpuKernels, load_cpu_kernels
from vllm_lite.kernels.topology import available_cpus, physical_cores


def find_cpu_kernels(num_threads: int | None) -> CpuKernels | None:
    """What `--num-threads` asks for, by default a thread for each physical core; None where torch must do.

    Raises StartupError for more threads than there are cores, of which some would only wait for others.
    """
    num_cpus, cores = len(available_cpus()), physical_cores()
    if num_threads is not None and num_threads > num_cpus:
        raise StartupError(
            f"--num-threads {num_threads} is more than the {num_cpus} cores that this process may use: set it to "
            f"{num_cpus} or less, or leave it out."
        )
    return load_cpu_kernels(num_threads or len(cores), cores)
