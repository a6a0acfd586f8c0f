"""Opens a checkpoint wherever it is: finds its files, reads its configuration, lists its tensors.

Reads no weight, but a head that should not be there: `Checkpoint.load_into` does, once the model has somewhere to put
them.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vllm_lite.config import EngineConfig, ModelConfig
from vllm_lite.errors import StartupError
from vllm_lite.models.registry import model_class
from vllm_lite.worker.config_values import ConfigValues, read_json
from vllm_lite.worker.gguf_format import read_gguf
from vllm_lite.worker.hf_config import read_model_config
from vllm_lite.worker.hub import HubRepo, default_model_path, local_path, small_files
from vllm_lite.worker.pickle_format import open_pickle
from vllm_lite.worker.safetensors_format import open_safetensors
from vllm_lite.worker.weight_files import FORMATS_OF, WeightFiles, choose_weight_files
from vllm_lite.worker.weights import FLOAT_DTYPES, HEADS, CheckpointTensor, fill_with_random, load_weights

__all__ = ["Checkpoint", "CheckpointTensor", "open_checkpoint", "tokenizer_path"]

logger = logging.getLogger(__name__)

DUMMY_SEED = 0


@dataclass(frozen=True)
class Checkpoint:
    """What was found. `path` is a folder or a .gguf file; `gguf_metadata` is None for the other formats."""

    config: ModelConfig
    path: Path
    gguf_metadata: Mapping[str, Any] | None = None
    is_dummy: bool = False
    """Whether `--load-format dummy` asks for random numbers instead of weights."""
    _tensors: list[CheckpointTensor] = field(default_factory=list, repr=False)

    def tensors(self) -> list[CheckpointTensor]:
        """Every tensor of the weight files, none of them read yet."""
        return self._tensors

    def load_into(self, targets: Mapping[str, torch.Tensor], ignored: Callable[[str], bool]) -> None:
        """Fills every target. Raises StartupError as `load_weights` does."""
        if self.is_dummy:
            fill_with_random(targets, DUMMY_SEED)
        else:
            load_weights(self._tensors, targets, ignored)


def open_checkpoint(config: EngineConfig) -> Checkpoint:
    """Resolves `--model` and reads what it says about itself. Makes no connection where the files are here already.

    Raises StartupError that names what is missing, broken or not supported, and the way out.
    """
    path = _find_model(config)
    if path.is_file():
        return _open_gguf(path, config)
    if config.load_format == "dummy":
        names = _file_names(path)
        if "config.json" not in names and (ggufs := [name for name in names if name.endswith(".gguf")]):
            return _open_gguf(path / ggufs[0], config)
        model = read_model_config(path, trust_remote_code=config.trust_remote_code)
        return Checkpoint(model, path, is_dummy=True)
    files = _weight_files(path, config.load_format)
    if files.format == "gguf":
        return _open_gguf(path / files.names[0], config)
    model = read_model_config(path, trust_remote_code=config.trust_remote_code)
    if config.load_format == "npcache":
        logger.info("--load-format npcache reads the same files as pt, and writes no cache")
    read = open_safetensors if files.format == "safetensors" else open_pickle
    tensors = _with_model_names(model, [tensor for name in files.names for tensor in read(path / name)])
    return Checkpoint(_with_own_head(_with_stored_dtype(model, tensors), tensors), path, _tensors=tensors)


def tokenizer_path(config: EngineConfig, checkpoint: Checkpoint) -> Path:
    """Where the tokenizer lies: the checkpoint itself, or what `--tokenizer` names. Raises StartupError."""
    if config.tokenizer is None:
        return checkpoint.path
    if path := local_path(config.tokenizer, "--tokenizer"):
        return path
    repo = HubRepo(config.tokenizer, config.tokenizer_revision, config.download_dir, "--tokenizer")
    folder = repo.cached_folder()
    if folder is not None and _has_tokenizer(folder):
        return folder
    return repo.download(small_files(repo.list_files(), with_code=config.trust_remote_code))


def _find_model(config: EngineConfig) -> Path:
    if config.model is None:
        return default_model_path()
    return local_path(config.model, "--model") or _from_hub(config.model, config)


def _from_hub(name: str, config: EngineConfig) -> Path:
    """The snapshot's folder, from the cache where that is complete; only the files that are needed are fetched."""
    repo = HubRepo(name, config.revision, config.download_dir)
    folder = repo.cached_folder()
    if folder is not None and _is_complete(folder, config):
        return folder
    names = repo.list_files()
    wanted = small_files(names, with_code=config.trust_remote_code)
    folder = repo.download(wanted)
    if config.load_format == "dummy":
        return folder
    files = choose_weight_files(names, config.load_format, lambda index: read_json(folder / index), repo.name)
    return repo.download([*wanted, *files.names])


def _is_complete(folder: Path, config: EngineConfig) -> bool:
    has_config = (folder / "config.json").is_file()
    has_tokenizer = config.tokenizer is not None or _has_tokenizer(folder)
    if config.load_format == "dummy":
        return has_config and has_tokenizer
    try:
        files = _weight_files(folder, config.load_format)
    except StartupError:
        return False
    return files.format == "gguf" or (has_config and has_tokenizer)


def _has_tokenizer(folder: Path) -> bool:
    return any(name.startswith(("tokenizer", "vocab.")) for name in _file_names(folder))


def _weight_files(folder: Path, load_format: str) -> WeightFiles:
    def read_index(name: str) -> ConfigValues:
        return read_json(folder / name)

    return choose_weight_files(_file_names(folder), load_format, read_index, str(folder))


def _file_names(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir() if path.is_file())
    except OSError as error:
        raise StartupError(f"{folder} cannot be read: {error}") from error


def _open_gguf(path: Path, config: EngineConfig) -> Checkpoint:
    if config.load_format != "dummy" and "gguf" not in FORMATS_OF[config.load_format]:
        raise StartupError(f"{path} is a file, which only --load-format auto and gguf read, not {config.load_format}.")
    model, metadata, tensors = read_gguf(path)
    is_dummy = config.load_format == "dummy"
    return Checkpoint(model, path, metadata, is_dummy, [] if is_dummy else tensors)


def _with_stored_dtype(model: ModelConfig, tensors: list[CheckpointTensor]) -> ModelConfig:
    """Where config.json does not say what the weights are in, the first tensor of floats does, as in transformers."""
    stored = next((tensor.dtype for tensor in tensors if tensor.dtype in FLOAT_DTYPES), None)
    if model.dtype is not None or stored is None:
        return model
    return dataclasses.replace(
        model, dtype="float32" if stored == torch.float64 else str(stored).removeprefix("torch.")
    )


def _with_model_names(model: ModelConfig, tensors: list[CheckpointTensor]) -> list[CheckpointTensor]:
    """Under the names that the model has for them.

    Older files may hold those of the base model, which lack what begins the others, beside a head.
    """
    cls = model_class(model.architecture)
    missing = "" if any(tensor.name.startswith(cls.base_prefix) for tensor in tensors) else cls.base_prefix
    return [
        dataclasses.replace(tensor, name=cls.head_name if tensor.name in HEADS else missing + tensor.name)
        for tensor in tensors
    ]


def _with_own_head(model: ModelConfig, tensors: list[CheckpointTensor]) -> ModelConfig:
    """Where the files hold a head that differs from the embedding, the two are not tied, as in transformers 5."""
    by_name = {tensor.name: tensor for tensor in tensors}
    names = model_class(model.architecture).head_name, model_class(model.architecture).embedding_name
    if not (model.tie_word_embeddings and all(name in by_name for name in names)):
        return model
    head, embedding = (by_name[name] for name in names)
    if (head.shape, head.dtype) == (embedding.shape, embedding.dtype) and all(
        torch.equal(head.read(rows), embedding.read(rows)) for rows in head.pieces(math.prod(head.shape))
    ):
        return model
    logger.warning("config.json ties %s to %s, but the checkpoint's differ: both are used as they are", *names)
    return dataclasses.replace(model, tie_word_embeddings=False)
