"""Loads the tokenizer that goes with a model: from GGUF metadata, Hugging Face files or a lone tokenizer.model.

Chooses the source and knows no library and no network. What comes back is `engine.tokenizer_protocol.Tokenizer`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from vllm_lite.base_tokenizer import BaseTokenizer
from vllm_lite.errors import StartupError
from vllm_lite.gguf_tokenizer import tokenizer_from_gguf
from vllm_lite.sentencepiece_tokenizer import load_sentencepiece
from vllm_lite.tokenizer_files import read_json

HUGGING_FACE_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "merges.txt")


def load_tokenizer(
    path: Path,
    *,
    mode: Literal["auto", "slow"],
    gguf_metadata: Mapping[str, Any] | None,
    trust_remote_code: bool,
) -> BaseTokenizer:
    """The tokenizer of GGUF metadata, or else of a folder or of the folder that a file lies in.

    A folder's tokenizer.json goes before its tokenizer.model, unless `path` is the latter. `slow` asks for the
    sentencepiece library, or else for a Python tokenizer of transformers. Nothing touches the network. Raises
    StartupError that names the path and the way out.
    """
    is_slow = mode == "slow"
    if gguf_metadata is not None:
        if is_slow and gguf_metadata.get("tokenizer.ggml.model") != "llama":
            raise StartupError(f"--tokenizer-mode slow: {path} has no slow tokenizer; leave --tokenizer-mode out.")
        return tokenizer_from_gguf(gguf_metadata)
    if not path.exists():
        raise StartupError(f"There is no tokenizer at {path}: no such file or folder. Correct --tokenizer.")
    folder = path if path.is_dir() else path.parent
    has_custom_code = _has_custom_code(folder)
    if has_custom_code and not trust_remote_code:
        # transformers would ask on the terminal, where nobody may sit.
        raise StartupError(
            f"The tokenizer in {folder} brings its own Python code. If you have read it and trust it, pass"
            " --trust-remote-code; otherwise pass --tokenizer with another one."
        )
    model, fast = folder / "tokenizer.model", folder / "tokenizer.json"
    prefers_model = is_slow or path == model or not fast.is_file()
    if model.is_file() and prefers_model and not has_custom_code:
        return load_sentencepiece(model)
    if not any((folder / name).is_file() for name in HUGGING_FACE_FILES):
        raise StartupError(
            f"{folder} holds no tokenizer (tokenizer.json, tokenizer.model or the like); pass --tokenizer with a"
            " folder or a hub name that has one."
        )
    read_json(fast)  # names the file if it is broken; transformers raises just any error
    # transformers takes more than two seconds to import, and neither GGUF nor a tokenizer.model needs any of it.
    module = importlib.import_module("vllm_lite.hf_tokenizer")
    tokenizer: BaseTokenizer = module.load_hugging_face(folder, is_slow=is_slow, trust_remote_code=trust_remote_code)
    return tokenizer


def _has_custom_code(folder: Path) -> bool:
    auto_map = read_json(folder / "tokenizer_config.json").get("auto_map")
    return isinstance(auto_map, list) or (isinstance(auto_map, dict) and "AutoTokenizer" in auto_map)
