"""Which architectures run. Knows their names and what of their configurations is supported."""

from __future__ import annotations

import torch

from vllm_lite.config import ModelConfig
from vllm_lite.errors import StartupError
from vllm_lite.layers.context import LayerOptions, NewMemory
from vllm_lite.models.llama import LlamaForCausalLM
from vllm_lite.models.mistral import MistralForCausalLM
from vllm_lite.models.qwen2 import Qwen2ForCausalLM
from vllm_lite.models.qwen3 import Qwen3ForCausalLM

MODELS: dict[str, type[LlamaForCausalLM]] = {
    cls.__name__: cls for cls in (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
}


def model_class(architecture: str) -> type[LlamaForCausalLM]:
    """Raises StartupError for an architecture that does not run here."""
    if architecture not in MODELS:
        raise StartupError(
            f"architecture {architecture!r} is not supported; those that run are {', '.join(sorted(MODELS))}."
        )
    return MODELS[architecture]


def build_model(
    config: ModelConfig,
    dtype: torch.dtype,
    max_model_len: int,
    device: torch.device | None = None,
    panel_rows: int = 1,
    new_memory: NewMemory | None = None,
) -> LlamaForCausalLM:
    """The model with uninitialised parameters; `panel_rows` and `new_memory` as in `LayerOptions`.

    Raises StartupError for what does not run here.
    """
    cls = model_class(config.architecture)
    if config.hidden_act not in ("silu", "swish"):
        raise StartupError(
            f"{config.architecture} with hidden_act {config.hidden_act!r} is not supported; only silu is."
        )
    options = LayerOptions(dtype, device or torch.device("cpu"), panel_rows, new_memory=new_memory)
    return cls(config, options, max_model_len)
