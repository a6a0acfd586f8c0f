"""Loads the tokenizer that goes with a model: from GGUF metadata, Hugging Face files or a lone tokenizer.model.

Chooses the source and knows no library. What comes back is `engine.tokenizer_protocol.Tokenizer`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from vllm_lite.base_tokenizer import BaseTokenizer
from vllm_lite.config import hub_is_offline
from vllm_lite.errors import StartupError
from vllm_lite.gguf_tokenizer import tokenizer_from_gguf
from vllm_lite.sentencepiece_tokenizer import load_sentencepiece, read_json

HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
HUGGING_FACE_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "merges.txt")


def load_tokenizer(
    path: Path,
    *,
    mode: Literal["auto", "slow"],
    gguf_metadata: Mapping[str, Any] | None,
    trust_remote_code: bool,
    revision: str | None,
) -> BaseTokenizer:
    """The tokenizer in a folder, of a file in it, of GGUF metadata, or of a hub name where there is no such path.

    `gguf_metadata` goes before `path`. For a local path nothing touches the network. `slow` asks for sentencepiece's
    own library or for a Python tokenizer of transformers. Raises StartupError that names the path and the way out.
    """
    is_slow = mode == "slow"
    if gguf_metadata is not None:
        if is_slow and gguf_metadata.get("tokenizer.ggml.model") != "llama":
            raise StartupError(f"--tokenizer-mode slow: {path} has no slow tokenizer; leave --tokenizer-mode out.")
        return tokenizer_from_gguf(gguf_metadata)
    if not path.exists():
        if not HUB_NAME.fullmatch(str(path)):
            raise StartupError(f"There is no tokenizer at {path}: no such file or folder. Correct --tokenizer.")
        return _load_hugging_face(str(path), hub_is_offline(), is_slow, trust_remote_code, revision)
    folder = path if path.is_dir() else path.parent
    _refuse_custom_code(folder, trust_remote_code)
    model = folder / "tokenizer.model"
    has_files = any((folder / name).is_file() for name in HUGGING_FACE_FILES)
    wants_model = path == model or is_slow or not (folder / "tokenizer.json").is_file()
    if model.is_file() and wants_model and not _has_custom_code(folder):
        return load_sentencepiece(model)
    if not has_files:
        raise StartupError(
            f"{folder} holds no tokenizer (tokenizer.json, tokenizer.model or the like); pass --tokenizer with a"
            " folder or a hub name that has one."
        )
    return _load_hugging_face(str(folder), True, is_slow, trust_remote_code, None)


def _load_hugging_face(
    source: str, is_local: bool, is_slow: bool, trust_remote_code: bool, revision: str | None
) -> BaseTokenizer:
    # transformers takes more than two seconds to import, and a GGUF file needs none of it.
    module = importlib.import_module("vllm_lite.hf_tokenizer")
    tokenizer: BaseTokenizer = module.load_hugging_face(
        source, is_local=is_local, slow=is_slow, trust_remote_code=trust_remote_code, revision=revision
    )
    return tokenizer


def _has_custom_code(folder: Path) -> bool:
    auto_map = read_json(folder / "tokenizer_config.json").get("auto_map")
    return isinstance(auto_map, list) or (isinstance(auto_map, dict) and "AutoTokenizer" in auto_map)


def _refuse_custom_code(folder: Path, trust_remote_code: bool) -> None:
    """transformers would ask on the terminal, where nobody may sit."""
    read_json(folder / "tokenizer.json")
    if _has_custom_code(folder) and not trust_remote_code:
        raise StartupError(
            f"The tokenizer in {folder} brings its own Python code. If you have read it and trust it, pass"
            " --trust-remote-code; otherwise pass --tokenizer with another one."
        )
