"""Reads the tensors of GGUF files under their Hugging Face names, as floats and in Hugging Face's row order."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_lite.config import ModelConfig
from vllm_lite.errors import StartupError
from vllm_lite.worker.gguf_config import read_gguf_config
from vllm_lite.worker.gguf_header import GGUFFile, GGUFTensorInfo, open_gguf
from vllm_lite.worker.weights import CheckpointTensor

try:
    import gguf
except ImportError:  # everything but GGUF files is served without it
    gguf = None

PLAIN_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
ROPE_FACTORS = "rope_freqs.weight"
OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read_gguf(path: Path) -> tuple[ModelConfig, dict[str, Any], list[CheckpointTensor]]:
    """The model's configuration, the file's metadata (for the tokenizer) and its tensors.

    Raises StartupError where the file is broken or cut off, holds an architecture or tensor type that does not run, or
    where the package gguf is missing.
    """
    if gguf is None:
        raise StartupError(f"{path} cannot be read without the package gguf: pip install gguf")
    file = open_gguf(path)
    by_name: dict[str, GGUFTensorInfo] = {}
    for info in file.tensors:
        if info.name in by_name:
            raise _broken(file, info, "is there twice")
        _check_inside(file, info)
        by_name[info.name] = info
    factors = by_name.pop(ROPE_FACTORS, None)
    config = read_gguf_config(
        file.metadata,
        {name: info.shape for name, info in by_name.items()},
        None if factors is None else _read(file, factors).float().numpy(),
        str(path),
    )
    is_llama = file.metadata["general.architecture"] == "llama"
    return config, file.metadata, [_tensor(file, info, config, is_llama) for info in by_name.values()]


def huggingface_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; a name that is not known stays as it is."""
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_NAMES:
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{parts[3]}"
    return name


def _tensor(file: GGUFFile, info: GGUFTensorInfo, config: ModelConfig, is_llama: bool) -> CheckpointTensor:
    name = huggingface_name(info.name)
    num_heads = 0
    if is_llama and ".q_proj." in name:
        num_heads = config.num_heads
    elif is_llama and ".k_proj." in name:
        num_heads = config.num_kv_heads

    order = _halves_from_interleaved(info.shape, num_heads) if num_heads else None
    return CheckpointTensor(
        name, info.shape, partial(_read, file, info, order=order), PLAIN_DTYPES.get(_type(file, info).name)
    )


def _halves_from_interleaved(shape: tuple[int, ...], num_heads: int) -> npt.NDArray[np.int64] | None:
    """Where llama.cpp has put each row of q or k; None where the shape is wrong, which load_weights says better.

    It turns neighbouring rows of a head together, Hugging Face row i of the first half with row i of the second.
    """
    if shape[0] % (2 * num_heads):
        return None
    order: npt.NDArray[np.int64] = np.arange(shape[0]).reshape(num_heads, -1, 2).swapaxes(1, 2).ravel()
    return order


def _read(
    file: GGUFFile, info: GGUFTensorInfo, rows: slice = slice(None), order: npt.NDArray[np.int64] | None = None
) -> torch.Tensor:
    """Some rows, in the given order of them all, in their plain dtype, or in float32 where they are quantised."""
    picked = rows if order is None else order[rows]
    tensor_type, num_bytes = _type(file, info), _num_bytes(file, info)
    if dtype := PLAIN_DTYPES.get(tensor_type.name):
        stored = torch.frombuffer(file.data, dtype=dtype, count=math.prod(info.shape), offset=info.offset)
        values = stored.view(info.shape)[picked].clone()
    else:
        blocks = np.frombuffer(file.data, np.uint8, num_bytes, info.offset).reshape(*info.shape[:-1], -1)
        try:
            # Rows are whole blocks, single elements are not.
            expanded = gguf.dequantize(blocks if blocks.ndim == 1 else blocks[picked], tensor_type)
        except NotImplementedError as error:
            raise _broken(file, info, f"is of type {tensor_type.name}, which is not supported") from error
        values = torch.from_numpy(expanded[picked] if blocks.ndim == 1 else expanded)
    start, end, _ = rows.indices(info.shape[0])
    if order is not None:
        # Its neighbours are of the same heads, so what another piece still needs of them is little.
        start, end = int(order[rows].min()), int(order[rows].max()) + 1
    row_bytes = num_bytes // info.shape[0]
    file.release(info.offset + start * row_bytes, (end - start) * row_bytes)
    return values


def _type(file: GGUFFile, info: GGUFTensorInfo) -> gguf.GGMLQuantizationType:
    try:
        return gguf.GGMLQuantizationType(info.type_id)
    except ValueError:
        raise _broken(file, info, f"is of type {info.type_id}, which is not known") from None


def _num_bytes(file: GGUFFile, info: GGUFTensorInfo) -> int:
    block_size: int
    block_bytes: int
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[_type(file, info)]
    if not info.shape or 0 in info.shape or info.shape[-1] % block_size:
        raise _broken(file, info, f"has shape {list(info.shape)}, which does not fit its blocks of {block_size}")
    return math.prod(info.shape) // block_size * block_bytes


def _check_inside(file: GGUFFile, info: GGUFTensorInfo) -> None:
    if info.offset + _num_bytes(file, info) > len(file.data):
        raise _broken(file, info, "lies beyond the end of the file, which is cut off")


def _broken(file: GGUFFile, info: GGUFTensorInfo, reason: str) -> StartupError:
    return StartupError(f"{file.path}: tensor {info.name} {reason}.")
