"""Tiny random Hugging Face checkpoints, made on the spot, that no bug of an architecture survives.

Weights have a standard deviation of 0.2 and biases and norms are filled with noise: with the default initialisation
several real bugs change no greedy token. Knows transformers, which is the reference; knows nothing of the engine.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
LAYER_NORM_FAMILIES: dict[str, tuple[Any, Any]] = {
    "gpt2": (GPT2Config, GPT2LMHeadModel),
    "opt": (OPTConfig, OPTForCausalLM),
    "bloom": (BloomConfig, BloomForCausalLM),
    "gpt_neox": (GPTNeoXConfig, GPTNeoXForCausalLM),
}
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "initializer_range": 0.2,
}
LAYER_NORM_SIZES: dict[str, Any] = {
    name: SIZES[name] for name in ("vocab_size", "hidden_size", "bos_token_id", "eos_token_id", "initializer_range")
} | {"num_hidden_layers": 3, "num_attention_heads": 4}
SIZES_OF: dict[str, dict[str, Any]] = {
    "qwen3": {**SIZES, "head_dim": 16},  # its default of 128 loops on one token
    "gpt2": {**LAYER_NORM_SIZES, "n_positions": 128, "n_inner": 128},
    "opt": {**LAYER_NORM_SIZES, "ffn_dim": 128, "max_position_embeddings": 128, "init_std": 0.2, "pad_token_id": 0},
    "bloom": LAYER_NORM_SIZES,
    "gpt_neox": {**LAYER_NORM_SIZES, "intermediate_size": 128, "max_position_embeddings": 128},
}


class _Removed:
    def __repr__(self) -> str:
        return "REMOVED"  # an address would give a test another name in each process


REMOVED = _Removed()
"""As a value of `edit_json`: the key is taken out."""

_cache_root = tempfile.mkdtemp(prefix="tiny-checkpoints-")
atexit.register(shutil.rmtree, _cache_root, ignore_errors=True)
_cached: dict[str, Path] = {}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """256 ids: 0 `<unk>`, 1 `</s>` (begin and end), then one for each byte that UTF-8 uses. Adds no special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    never_in_utf8 = {"þ", "ÿ"}  # how the byte-level alphabet writes 0xFE and 0xFF
    pieces = ["<unk>", "</s>"] + [piece for piece in alphabet if piece not in never_in_utf8]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="</s>", eos_token="</s>", model_max_length=128
    )


def make_model(family: str = "llama", *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random float32 model; `overrides` are fields of the Hugging Face configuration."""
    config_class, model_class = {**FAMILIES, **LAYER_NORM_FAMILIES}[family]
    bias_std = 0.1 if family in LAYER_NORM_FAMILIES else 0.5  # more, and the last norm's decides about every token
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = model_class(config_class(**{**SIZES_OF.get(family, SIZES), **overrides})).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(".bias"):
                    parameter.normal_(0.0, bias_std)
                elif parameter.dim() == 1:
                    parameter.normal_(1.0, 0.2)
    return model


def save_checkpoint(
    folder: Path, model: PreTrainedModel, *, dtype: torch.dtype = torch.float32, max_shard_size: str = "5GB"
) -> Path:
    """Saves model and byte tokenizer as safetensors; `max_shard_size` like "40KB" makes shards with an index."""
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    byte_tokenizer().save_pretrained(folder)
    return folder


def cached_checkpoint(
    family: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Path:
    """A folder made once in a test session. Copy it before you change it (`copy_checkpoint`)."""
    key = json.dumps([family, seed, str(dtype), overrides], sort_keys=True)
    if key not in _cached:
        folder = Path(_cache_root) / f"{family}-{len(_cached)}"
        _cached[key] = save_checkpoint(folder, make_model(family, seed=seed, **overrides), dtype=dtype)
    return _cached[key]


def copy_checkpoint(source: Path, destination: Path) -> Path:
    shutil.copytree(source, destination, dirs_exist_ok=True)
    return destination


def edit_json(path: Path, **changes: Any) -> None:
    """Changes keys of a JSON file; `None` writes null, `REMOVED` takes the key out."""
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not REMOVED}))


def reference_model(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """What Hugging Face makes of a folder."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()


def reference_greedy(folder: Path, prompt_ids: list[int], num_tokens: int) -> list[int]:
    """Greedy ids of Hugging Face in float32, end of sequence ignored."""
    prompt = torch.tensor([prompt_ids])
    model = reference_model(folder)
    model.generation_config.eos_token_id = None  # min_new_tokens would keep it from being chosen
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=num_tokens, pad_token_id=0
    )
    ids: list[int] = output[0, len(prompt_ids) :].tolist()
    return ids
