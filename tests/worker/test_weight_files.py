"""Which files of a checkpoint are read, decided by their names."""

from __future__ import annotations

import pytest

from vllm_lite.errors import StartupError
from vllm_lite.worker.config_values import ConfigValues
from vllm_lite.worker.weight_files import choose_weight_files

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
SAFE_INDEX = "model.safetensors.index.json"
BIN_SHARDS = ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin")
BIN_INDEX = "pytorch_model.bin.index.json"
INDEXES = {
    SAFE_INDEX: {"weight_map": {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[0]}},
    BIN_INDEX: {"weight_map": {"a": BIN_SHARDS[0], "b": BIN_SHARDS[1]}},
}


def choose(
    names: list[str], load_format: str = "auto", indexes: dict[str, dict[str, object]] | None = None
) -> list[str]:
    content = indexes or INDEXES
    files = choose_weight_files(names, load_format, lambda name: ConfigValues(content[name], name), "the folder")
    return list(files.names)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["model.safetensors"], ["model.safetensors"]),
        (["weights.safetensors"], ["weights.safetensors"]),
        (["pytorch_model.bin"], ["pytorch_model.bin"]),
        (["consolidated.00.pth"], ["consolidated.00.pth"]),
        (["model.gguf"], ["model.gguf"]),
        (["model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        (["model.safetensors", "model-q4.gguf"], ["model.safetensors"]),
        (["pytorch_model.bin", "model-q4.gguf"], ["pytorch_model.bin"]),
        ([*SHARDS, SAFE_INDEX], list(SHARDS)),
        ([*SHARDS, SAFE_INDEX, "model.safetensors"], list(SHARDS)),
        ([*SHARDS, SAFE_INDEX, "consolidated.safetensors"], list(SHARDS)),
        ([*SHARDS, SAFE_INDEX, "model-00003-of-00002.safetensors"], list(SHARDS)),
        ([*SHARDS, SAFE_INDEX, *BIN_SHARDS, BIN_INDEX], list(SHARDS)),
        (["model.safetensors", "consolidated.safetensors"], ["model.safetensors"]),
        ([*BIN_SHARDS, BIN_INDEX, "pytorch_model.bin"], list(BIN_SHARDS)),
        (["pytorch_model.bin", "training_args.bin", "optimizer.bin", "scheduler.pt"], ["pytorch_model.bin"]),
        (["weights.pt", "optimizer.pt", "rng_state_0.pth", "scaler.pt", "training_args.bin"], ["weights.pt"]),
        (["about-safetensors.json", "pytorch_model.bin"], ["pytorch_model.bin"]),
        (["notes.safetensors.json", "model.safetensors"], ["model.safetensors"]),
        (["old/model.safetensors", "onnx/model.bin", "pytorch_model.bin"], ["pytorch_model.bin"]),
    ],
    ids=str,
)
def test_auto_takes_safetensors_first_and_only_what_an_index_names(names: list[str], expected: list[str]) -> None:
    assert choose(names) == expected


@pytest.mark.parametrize(
    ("load_format", "expected"),
    [
        ("safetensors", "model.safetensors"),
        ("pt", "pytorch_model.bin"),
        ("npcache", "pytorch_model.bin"),
        ("gguf", "m.gguf"),
    ],
)
def test_the_load_format_decides(load_format: str, expected: str) -> None:
    assert choose(["model.safetensors", "pytorch_model.bin", "m.gguf"], load_format) == [expected]


@pytest.mark.parametrize(
    ("names", "load_format", "named"),
    [
        ([], "auto", "the folder holds no weights that --load-format auto reads .*safetensors, .bin"),
        (["config.json", "training_args.bin"], "auto", "holds no weights"),
        (["pytorch_model.bin"], "safetensors", "holds no weights that --load-format safetensors reads"),
        (["a.Q4_0.gguf", "a.Q8_0.gguf"], "auto", r"several .gguf files \(a.Q4_0.gguf, a.Q8_0.gguf\)"),
        ([SHARDS[0], SAFE_INDEX], "auto", f"shards that are not there: {SHARDS[1]}"),
    ],
)
def test_no_choice_is_an_error_that_says_why(names: list[str], load_format: str, named: str) -> None:
    with pytest.raises(StartupError, match=named):
        choose(names, load_format)


@pytest.mark.parametrize("weight_map", [None, "model.safetensors", {"a": 1}, {}, {"a": "../../etc/model.safetensors"}])
def test_a_broken_index_is_named(weight_map: object) -> None:
    with pytest.raises(StartupError, match=SAFE_INDEX):
        choose([*SHARDS, SAFE_INDEX], indexes={SAFE_INDEX: {"weight_map": weight_map}})
