"""The step's numbers on the device: tensors of maximal size that keep their addresses, filled in one copy."""

from __future__ import annotations

import numpy as np
import torch

from vllm_lite.engine.step import StepInput
from vllm_lite.layers.context import StepTensors
from vllm_lite.worker.transfer import host_tensor


class StepBuffers:
    """What lies in `tensors` beyond a step's own sizes does no harm where a captured step computes more than it.

    There, slots are -1 and contexts 0, so that nothing is written or read, and ids and indices are 0, which exist.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        block_size: int,
    ) -> None:
        sizes = {
            "token_ids": max_num_batched_tokens,
            "positions": max_num_batched_tokens,
            "slot_mapping": max_num_batched_tokens,
            "query_starts": max_num_seqs + 1,
            "context_lens": max_num_seqs,
            "token_indices": max_num_seqs,
        }
        ends = np.cumsum(list(sizes.values())).tolist()
        self._parts = {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends)}
        self._tables_start = ends[-1]
        table_shape = (max_num_seqs, -(-max_model_len // block_size))
        # All parts lie side by side as they come from the host, block tables last: only what a step has of them comes.
        self._received = torch.zeros(ends[-1] + table_shape[0] * table_shape[1], dtype=torch.int32, device=device)
        self.tensors = StepTensors(
            **{name: self._received[part] for name, part in self._parts.items()},
            block_tables=torch.zeros(table_shape, dtype=torch.int32, device=device),
        )

    def fill(self, step: StepInput) -> None:
        """For the ops that come after it on the current stream; waits for nothing."""
        num_seqs, num_blocks = step.block_tables.shape
        end = self._tables_start + step.block_tables.size
        staging = host_tensor(end, self._received.device)
        numbers = staging.numpy()
        for name, values, beyond in (
            ("token_ids", step.token_ids, 0),
            ("positions", step.positions, 0),
            ("slot_mapping", step.slot_mapping, -1),
            ("query_starts", step.query_starts, step.shape.num_tokens),
            ("context_lens", step.context_lens, 0),
            ("token_indices", step.sampling.token_indices, 0),
        ):
            part = numbers[self._parts[name]]
            part[: len(values)] = values
            part[len(values) :] = beyond
        numbers[self._tables_start :] = step.block_tables.reshape(-1)
        self._received[:end].copy_(staging, non_blocking=True)
        tables = self._received[self._tables_start : end].view(num_seqs, num_blocks)
        self.tensors.block_tables[:num_seqs, :num_blocks].copy_(tables)
