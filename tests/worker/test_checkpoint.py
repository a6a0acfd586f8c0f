"""Opening checkpoints of every layout from a local folder, and what a user gets to read when that fails."""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.checkpoints import (
    FAMILIES,
    REMOVED,
    cached_checkpoint,
    copy_checkpoint,
    edit_json,
    make_model,
    reference_model,
    save_checkpoint,
)
from tests.helpers.loading import assert_same_tensors, forbid_connections, load_tensors
from vllm_lite.config import EngineConfig
from vllm_lite.errors import StartupError
from vllm_lite.worker.checkpoint import Checkpoint, open_checkpoint, tokenizer_path


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """What Hugging Face's own reader finds in model.safetensors."""
    tensors: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return tensors


def to_pickle(folder: Path, name: str = "pytorch_model.bin", **options: Any) -> Path:
    torch.save(weights_of(folder), folder / name, **options)
    (folder / "model.safetensors").unlink()
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copy_checkpoint(cached_checkpoint(), tmp_path / "model")


def opened(model: Path | str, **options: Any) -> Checkpoint:
    return open_checkpoint(EngineConfig(model=str(model), **options))


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_tensor_equals_what_hugging_face_loads(family: str) -> None:
    folder = cached_checkpoint(family)

    assert_same_tensors(load_tensors(folder), reference_model(folder).state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_stored_dtype_is_read_into_any_other(dtype: torch.dtype) -> None:
    folder = cached_checkpoint(dtype=dtype)
    expected = weights_of(folder)

    assert opened(folder).config.dtype == str(dtype).removeprefix("torch.")
    for target_dtype in (torch.float32, torch.bfloat16):
        converted = {name: tensor.to(target_dtype) for name, tensor in expected.items()}
        assert_same_tensors(load_tensors(folder, dtype=target_dtype), converted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_config_without_dtype_takes_that_of_the_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = copy_checkpoint(cached_checkpoint(dtype=dtype), tmp_path)
    edit_json(folder / "config.json", dtype=REMOVED)

    assert opened(folder).config.dtype == str(dtype).removeprefix("torch.")


def test_only_floats_say_what_the_weights_are_in(folder: Path) -> None:
    weights = {"a.mask": torch.ones(4, dtype=torch.int64), **weights_of(folder)}
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    edit_json(folder / "config.json", dtype=REMOVED)

    assert opened(folder).config.dtype == "float32"


def test_shards_are_read_by_their_index_and_a_stale_file_beside_them_is_not(tmp_path: Path) -> None:
    model = make_model()
    save_checkpoint(tmp_path, model, max_shard_size="100KB")
    shards = sorted(path.name for path in tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    stale = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    save_file(stale, tmp_path / "model.safetensors")

    assert_same_tensors(load_tensors(tmp_path), model.state_dict())


def test_safetensors_win_over_a_bin_with_other_values(folder: Path) -> None:
    expected = weights_of(folder)
    torch.save({name: torch.zeros_like(tensor) for name, tensor in expected.items()}, folder / "pytorch_model.bin")

    assert_same_tensors(load_tensors(folder), expected)
    assert not any(tensor.any() for tensor in load_tensors(folder, load_format="pt").values())


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "before torch 1.6"])
@pytest.mark.parametrize("load_format", ["auto", "pt", "npcache"])
def test_a_bin_is_read(folder: Path, load_format: str, is_zip: bool) -> None:
    expected = weights_of(folder)
    to_pickle(folder, _use_new_zipfile_serialization=is_zip)

    assert_same_tensors(load_tensors(folder, load_format=load_format), expected)


def test_bin_shards_are_read_by_their_index(folder: Path) -> None:
    expected = weights_of(folder)
    names = sorted(expected)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2]), start=1):
        torch.save({name: expected[name] for name in part}, folder / f"pytorch_model-{i:05}-of-00002.bin")
        weight_map.update({name: f"pytorch_model-{i:05}-of-00002.bin" for name in part})
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model.safetensors").unlink()

    assert_same_tensors(load_tensors(folder), expected)


class Trap:
    """Pickles to an instruction that creates a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.canary),))


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(folder: Path, tmp_path: Path, is_zip: bool) -> None:
    to_pickle(folder)
    canary = tmp_path / "canary"
    trap = {"model.norm.weight": Trap(canary)}
    torch.save(trap, folder / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip)

    with pytest.raises(StartupError, match=r"pytorch_model.bin .*asks to run code. Nothing of it was run"):
        opened(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(trap, protocol=2))
    with pytest.raises(StartupError, match=r"pytorch_model.bin"):
        opened(folder)
    assert not canary.exists()


def test_files_that_training_leaves_are_not_opened(folder: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    to_pickle(folder)
    for name in ("training_args.bin", "optimizer.bin"):
        torch.save({"x": Trap(canary)}, folder / name)
    (folder / "safetensors-notes.json").write_text("{")

    assert len(load_tensors(folder)) == 30
    assert not canary.exists()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ([1, 2], "holds a list, not a state dict"),
        ({"state_dict": {"a": torch.zeros(1)}}, "'state_dict' is a dict; only plain tensors are read"),
        ({"step": 3}, "'step' is a int"),
        ({"a": torch.zeros(2).to_sparse()}, "'a' is a Tensor; only plain tensors are read"),
        ({"a": torch.zeros(2, device="meta")}, "'a' is a Tensor; only plain tensors are read"),
    ],
)
def test_a_pickle_without_named_tensors_is_refused(folder: Path, content: object, named: str) -> None:
    to_pickle(folder)
    torch.save(content, folder / "pytorch_model.bin")

    with pytest.raises(StartupError, match=named):
        opened(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("keep", [0.0, 0.01, 0.5, 0.999])
def test_a_file_that_was_cut_off_is_named(folder: Path, name: str, keep: float) -> None:
    if name == "pytorch_model.bin":
        to_pickle(folder)
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: int(len(content) * keep)])

    with pytest.raises(StartupError, match=name):
        opened(folder)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("name", ["model.safetensors", "zipped", "old"])
def test_a_damaged_file_loads_or_is_named(folder: Path, name: str) -> None:
    path = folder / name
    if name != "model.safetensors":
        path = folder / "pytorch_model.bin"
        to_pickle(folder)
        torch.save(torch.load(path), path, _use_new_zipfile_serialization=name == "zipped")
    content = path.read_bytes()
    choice = random.Random(0)
    places = [*range(0, 2000, 17), *range(len(content) - 2000, len(content), 17)]
    num_refused = 0
    for place in places:
        damaged = bytearray(content)
        damaged[place] = choice.randrange(256)
        path.write_bytes(damaged)
        try:
            load_tensors(folder)
        except StartupError as error:
            assert str(folder) in str(error) or "tensor" in str(error)
            num_refused += 1
    assert num_refused > 10


def test_garbage_instead_of_safetensors_is_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"<html>not found</html>" * 100)

    with pytest.raises(StartupError, match=r"model.safetensors cannot be read as safetensors"):
        opened(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, make_model(), max_shard_size="100KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()

    with pytest.raises(StartupError, match=shard.name):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"load_format": "gguf"}, "holds no weights that --load-format gguf reads"),
        ({"load_format": "pt"}, "holds no weights that --load-format pt reads"),
    ],
)
def test_a_format_that_is_not_there_is_named(folder: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(StartupError, match=named):
        opened(folder, **options)


def test_npcache_says_what_it_does(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    to_pickle(folder)
    with caplog.at_level(logging.INFO):
        opened(folder, load_format="npcache")

    assert "reads the same files as pt" in caplog.text


def test_dummy_needs_no_weight_files_and_is_repeatable(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    checkpoint = opened(folder, load_format="dummy")
    first, second = ({"a": torch.full((50,), torch.nan)} for _ in range(2))
    checkpoint.load_into(first, lambda name: False)
    checkpoint.load_into(second, lambda name: False)

    assert checkpoint.tensors() == []
    assert torch.equal(first["a"], second["a"])
    assert first["a"].isfinite().all()


@pytest.mark.parametrize("weights_format", ["safetensors", "bin"])
@pytest.mark.parametrize("is_equal", [True, False])
def test_case_l1_a_head_beside_a_tied_embedding_counts_where_it_differs(
    folder: Path, is_equal: bool, weights_format: str, caplog: pytest.LogCaptureFixture
) -> None:
    edit_json(folder / "config.json", tie_word_embeddings=True)
    tensors = weights_of(folder)
    if is_equal:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    if weights_format == "safetensors":
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    else:
        (folder / "model.safetensors").unlink()
        torch.save(tensors, folder / "pytorch_model.bin")
    checkpoint = opened(folder)

    reference: Any = reference_model(folder)
    assert (reference.lm_head.weight is reference.model.embed_tokens.weight) == is_equal
    assert checkpoint.config.tie_word_embeddings == is_equal
    assert ("lm_head.weight" in caplog.text) != is_equal
    assert "lm_head.weight" in [tensor.name for tensor in checkpoint.tensors()]


def test_an_untied_model_without_head_names_the_tensor(folder: Path) -> None:
    tensors = weights_of(folder)
    shape = tensors.pop("lm_head.weight").shape
    save_file(tensors, folder / "model.safetensors")
    targets = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}

    opened(folder).load_into(targets, lambda name: False)
    with pytest.raises(StartupError, match=r"lacks tensor lm_head.weight"):
        opened(folder).load_into({**targets, "lm_head.weight": torch.empty(shape)}, lambda name: False)


@pytest.mark.parametrize("spelling", ["absolute", "relative", "dotted", "trailing slash", "home"])
@pytest.mark.parametrize("name", ["model", "my model (1)"])
def test_a_local_folder_is_found_without_any_connection(
    spelling: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_checkpoint(cached_checkpoint(), tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    forbid_connections(monkeypatch)
    model = {
        "absolute": f"{tmp_path / name}",
        "relative": name,
        "dotted": f"./{name}",
        "trailing slash": f"{name}/",
        "home": f"~/{name}",
    }[spelling]
    checkpoint = opened(model)

    assert checkpoint.path == tmp_path / name
    assert checkpoint.gguf_metadata is None
    assert tokenizer_path(EngineConfig(model=model), checkpoint) == tmp_path / name


@pytest.mark.parametrize(
    "model", ["/no/such/folder", "./missing", "../missing", "~/missing", "a/b/c", "missing/", "a b", ""]
)
def test_a_path_to_nothing_is_an_immediate_error(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_connections(monkeypatch)

    with pytest.raises(StartupError, match="there is no such file or folder") as caught:
        opened(model)
    assert repr(model) in str(caught.value)


@pytest.mark.parametrize("model", ["a" * 5000, "./" + "a" * 300, "~no.such.user/model"])
def test_a_path_that_the_system_refuses_is_an_immediate_error(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_connections(monkeypatch)

    with pytest.raises(StartupError, match="cannot be looked up") as caught:
        opened(model)
    assert repr(model) in str(caught.value)


def test_the_tokenizer_may_lie_elsewhere(folder: Path, tmp_path: Path) -> None:
    checkpoint = opened(folder)

    assert tokenizer_path(EngineConfig(model=str(folder), tokenizer=str(tmp_path)), checkpoint) == tmp_path
    with pytest.raises(StartupError, match=r"--tokenizer './missing': there is no such file or folder"):
        tokenizer_path(EngineConfig(model=str(folder), tokenizer="./missing"), checkpoint)


def test_a_file_that_is_no_gguf_is_named(folder: Path) -> None:
    with pytest.raises(StartupError, match=r"model.safetensors cannot be loaded: it is not a GGUF file"):
        opened(folder / "model.safetensors")
    with pytest.raises(StartupError, match=r"--load-format auto and gguf read, not safetensors"):
        opened(folder / "model.safetensors", load_format="safetensors")
