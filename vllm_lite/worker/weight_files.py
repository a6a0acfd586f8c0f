"""Decides which files of a checkpoint hold its weights, from their names alone. Reads nothing but an index."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from vllm_lite.errors import StartupError
from vllm_lite.worker.config_values import ConfigValues

WeightFormat = Literal["safetensors", "pickle", "gguf"]

FORMATS_OF: dict[str, tuple[WeightFormat, ...]] = {
    "auto": ("safetensors", "pickle", "gguf"),
    "safetensors": ("safetensors",),
    "pt": ("pickle",),
    "npcache": ("pickle",),
    "gguf": ("gguf",),
}
SUFFIXES: dict[WeightFormat, tuple[str, ...]] = {
    "safetensors": (".safetensors",),
    "pickle": (".bin", ".pt", ".pth"),
    "gguf": (".gguf",),
}
STEMS: dict[WeightFormat, str] = {"safetensors": "model", "pickle": "pytorch_model"}
"""What transformers calls its weights: `<stem><suffix>`, or shards and `<stem><suffix>.index.json`."""
OTHER_STATE = ("training_args", "optimizer", "scheduler", "scaler", "rng_state", "adapter_model", "trainer_state")
"""Beginnings of the names of files that training leaves beside the weights."""


@dataclass(frozen=True)
class WeightFiles:
    """The files to read, all of them in one format, relative to the checkpoint's folder."""

    format: WeightFormat
    names: tuple[str, ...]


def choose_weight_files(
    names: Collection[str], load_format: str, read_index: Callable[[str], ConfigValues], place: str
) -> WeightFiles:
    """Picks among the file names of the checkpoint at `place` (for messages): the first format that is there.

    An index beats an unsharded file beside it. Raises StartupError where there is nothing to read or no single choice.
    """
    for weight_format in FORMATS_OF[load_format]:
        if weight_format in STEMS:
            suffix = SUFFIXES[weight_format][0]
            index_name = f"{STEMS[weight_format]}{suffix}.index.json"
            if index_name in names:
                return WeightFiles(weight_format, _indexed(read_index(index_name), names))
            if (whole := STEMS[weight_format] + suffix) in names:
                return WeightFiles(weight_format, (whole,))
        candidates = sorted(name for name in names if _may_hold_weights(name, weight_format))
        if weight_format == "gguf" and len(candidates) > 1:
            raise StartupError(f"{place} holds several .gguf files ({', '.join(candidates)}): name one with --model.")
        if candidates:
            return WeightFiles(weight_format, tuple(candidates))
    wanted = ", ".join(suffix for kind in FORMATS_OF[load_format] for suffix in SUFFIXES[kind])
    raise StartupError(f"{place} holds no weights that --load-format {load_format} reads ({wanted}).")


def _may_hold_weights(name: str, weight_format: WeightFormat) -> bool:
    path = PurePosixPath(name)
    is_at_top = len(path.parts) == 1
    return is_at_top and path.suffix in SUFFIXES[weight_format] and not path.stem.startswith(OTHER_STATE)


def _indexed(index: ConfigValues, names: Collection[str]) -> tuple[str, ...]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise index.wrong("weight_map", "an object from tensor names to file names")
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if shard not in names]
    if missing or not shards:
        raise StartupError(
            f"{index.source} names shards that are not there: {', '.join(missing) or 'none at all'}; "
            "download the checkpoint again."
        )
    return tuple(shards)
