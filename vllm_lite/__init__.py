"""A minimal native LLM API server: continuous batching over a paged KV cache behind one `POST /generate`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_lite.entrypoints.llm import LLM
    from vllm_lite.outputs import CompletionOutput, RequestOutput
    from vllm_lite.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": "vllm_lite.entrypoints.llm",
    "CompletionOutput": "vllm_lite.outputs",
    "RequestOutput": "vllm_lite.outputs",
    "SamplingParams": "vllm_lite.sampling_params",
}


def __getattr__(name: str) -> Any:
    """Loads a public name when it is asked for, so that importing a control-plane module stays free of torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
