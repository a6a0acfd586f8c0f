"""The folder of compiled kernels: ours alone, or a temporary one and one warning that says why."""

from __future__ import annotations

import logging
import os
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from vllm_lite.config import user_cache_dir
from vllm_lite.errors import StartupError
from vllm_lite.kernels.cache_folder import private_cache_folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder of the user, and another folder for temporary ones."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    private_cache_folder.cache_clear()
    yield tmp_path / "home"
    private_cache_folder.cache_clear()


def mode_of(folder: Path) -> int:
    return stat.S_IMODE(folder.stat().st_mode)


def make(folder: Path, mode: int = 0o700) -> Path:
    folder.mkdir(parents=True)
    folder.chmod(mode)
    return folder


def test_made_for_us_alone_and_kept(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    old = os.umask(0)
    try:
        folder = private_cache_folder("cuda")
    finally:
        os.umask(old)
    assert folder == home / "vllm_lite" / "cuda"
    assert mode_of(folder) == mode_of(folder.parent) == 0o700
    (folder / "kernel").touch()
    private_cache_folder.cache_clear()
    assert (private_cache_folder("cuda") / "kernel").exists()
    assert private_cache_folder("cpu") == home / "vllm_lite" / "cpu"
    assert list(folder.iterdir()) == [folder / "kernel"]
    assert not caplog.records


def test_readable_by_others_is_no_harm(home: Path) -> None:
    folder = make(home / "vllm_lite" / "cuda", 0o755)
    assert private_cache_folder("cuda") == folder


@pytest.mark.parametrize("mode", [0o1777, 0o1775])
def test_a_sticky_folder_of_many_is_no_harm(home: Path, mode: int) -> None:
    make(home, mode)
    assert private_cache_folder("cuda") == home / "vllm_lite" / "cuda"


def test_a_link_to_a_folder_of_ours_is_followed_once(home: Path, tmp_path: Path) -> None:
    make(home)
    (home / "vllm_lite").symlink_to(make(tmp_path / "large disk"))
    folder = private_cache_folder("cuda")
    assert folder == tmp_path / "large disk" / "cuda"
    assert not any(part.is_symlink() for part in (folder, *folder.parents))


def parent_writable(home: Path) -> None:
    make(home / "vllm_lite", 0o770)


def folder_writable(home: Path) -> None:
    make(home / "vllm_lite" / "cuda", 0o702)


def surroundings_writable(home: Path) -> None:
    make(home, 0o707)


def surroundings_writable_by_the_group(home: Path) -> None:
    """As a umask of 002 leaves it."""
    make(home, 0o775)


def link_to_writable(home: Path) -> None:
    make(home)
    (home / "vllm_lite").symlink_to(make(home.parent / "open", 0o777))


def link_to_nowhere(home: Path) -> None:
    make(home)
    (home / "vllm_lite").symlink_to(home / "missing")


def a_file(home: Path) -> None:
    make(home)
    (home / "vllm_lite").touch()


def home_is_a_file(home: Path) -> None:
    home.touch()


@pytest.mark.parametrize(
    ("arrange", "reason"),
    [
        (parent_writable, r"others may write to \S+/vllm_lite; chmod go-w"),
        (folder_writable, r"others may write to \S+/vllm_lite/cuda; chmod go-w"),
        (surroundings_writable, r"others may write to \S+/home; chmod go-w \S+/home"),
        (surroundings_writable_by_the_group, r"others may write to \S+/home; chmod go-w \S+/home"),
        (link_to_writable, r"others may write to \S+/vllm_lite; chmod go-w"),
        (link_to_nowhere, r"File exists: '\S+/vllm_lite'"),
        (a_file, r"File exists: '\S+/vllm_lite'"),
        (home_is_a_file, r"File exists: '\S+/home'"),
    ],
)
def test_otherwise_a_temporary_folder_and_one_warning(
    home: Path, arrange: Callable[[Path], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    arrange(home)
    check_is_temporary(home, reason, caplog)


def test_of_another_user(home: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    make(home / "vllm_lite" / "cuda")
    monkeypatch.setattr(os, "getuid", lambda: home.stat().st_uid + 1)
    check_is_temporary(home, "belongs to another user", caplog)


def test_a_link_to_a_folder_of_another_user(
    home: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(home)
    (home / "vllm_lite").symlink_to("/")
    if os.getuid() == 0:
        monkeypatch.setattr(os, "getuid", lambda: 1)
    check_is_temporary(home, r"\S+/vllm_lite belongs to another user", caplog)


def test_that_cannot_be_written(home: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    new_file = tempfile.TemporaryFile

    def new_file_elsewhere(dir: Path) -> IO[bytes]:
        if dir.is_relative_to(home):
            raise OSError(28, "No space left on device", str(dir))
        return new_file(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", new_file_elsewhere)
    check_is_temporary(home, r"No space left on device: '\S+/vllm_lite/cuda'", caplog)


def check_is_temporary(home: Path, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = private_cache_folder("cuda")
    assert folder.parent == home.parent / "temporary"
    assert mode_of(folder) == 0o700
    assert private_cache_folder("cuda") == folder
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(folder) in record.getMessage()
    assert re.search(reason, record.getMessage())


def test_no_temporary_folder_either(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.touch()
    monkeypatch.setattr(tempfile, "tempdir", str(home.parent / "missing"))
    with pytest.raises(StartupError, match=r"no folder for compiled kernels: .*File exists.*; nor a temporary one: "):
        private_cache_folder("cuda")


def test_a_temporary_folder_is_gone_at_exit(home: Path) -> None:
    home.touch()
    code = "from vllm_lite.kernels.cache_folder import private_cache_folder; print(private_cache_folder('cuda'))"
    environment = {**os.environ, "TMPDIR": str(home.parent / "temporary")}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert Path(result.stdout.strip()).parent == home.parent / "temporary"
    assert not list((home.parent / "temporary").iterdir())


def test_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert user_cache_dir() == Path("/somewhere")
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative paths are to be ignored")
    assert user_cache_dir() == Path("/home/me/.cache")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert user_cache_dir() == Path("/home/me/.cache")


def test_a_user_without_a_home(home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    check_is_temporary(home, "no home folder; set XDG_CACHE_HOME", caplog)
