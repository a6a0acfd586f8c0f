"""Where compiled kernels are kept between starts: a folder that nobody else can write to. Knows no compiler.

What lies in it is code that we run.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import stat
import tempfile
from functools import cache
from pathlib import Path

from vllm_lite.config import user_cache_dir
from vllm_lite.errors import StartupError

logger = logging.getLogger(__name__)

BUILD_BYTES = 8 * 2**20
"""More than the kernels take while they are made."""
OURS_ALONE = 0o700
GROUP_OR_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class _UntrustedFolderError(Exception):
    """Why kernels cannot be kept in a folder."""


@cache
def private_cache_folder(name: str) -> Path:
    """`vllm_lite/<name>` in the user's cache folder, made if need be; the same for the life of the process.

    Where that cannot be written or is not ours alone, a temporary folder that is removed at exit, and one warning that
    says why. Raises StartupError where there is no room for that either.
    """
    try:
        return _trusted_folder(user_cache_dir(), name)
    except (OSError, _UntrustedFolderError) as error:
        reason = error
    try:
        return temporary_folder(name, reason)
    except OSError as error:
        raise StartupError(
            f"there is no folder for compiled kernels: {reason}; nor a temporary one: {error}"
        ) from error


def temporary_folder(name: str, reason: Exception) -> Path:
    """A folder that is removed at exit, and a warning that gives the reason. Raises OSError where it has no room."""
    folder = Path(tempfile.mkdtemp(prefix=f"vllm_lite_{name}_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    check_room(folder)
    logger.warning("kernels are compiled anew at every start, into %s: %s", folder, reason)
    return folder


def check_room(folder: Path) -> None:
    """Raises OSError where kernels cannot be made: what a disk has left tells nothing of quotas and limits."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(BUILD_BYTES))
    except OSError as error:
        message = f"{error.strerror}, and kernels take {BUILD_BYTES // 2**20} MiB"
        raise OSError(error.errno, message, str(folder)) from error


def _trusted_folder(home: Path, name: str) -> Path:
    if not home.is_absolute():
        raise _UntrustedFolderError("there is no home folder; set XDG_CACHE_HOME")
    home.mkdir(mode=OURS_ALONE, parents=True, exist_ok=True)
    _check_surroundings(home)
    folder = home / "vllm_lite"
    for part in ("", name):
        folder = folder / part
        folder.mkdir(mode=OURS_ALONE, exist_ok=True)
        _check_ours_alone(folder)
    with tempfile.TemporaryFile(dir=folder):  # raises where nothing can be written
        pass
    return folder.resolve()  # a link on the way may point somewhere else later


def _check_surroundings(home: Path) -> None:
    """Whoever could rename our folder in it could put another in its place once it has been looked at."""
    status = home.stat()
    if status.st_uid not in (os.getuid(), 0):
        raise _UntrustedFolderError(f"{home} belongs to another user")
    if status.st_mode & GROUP_OR_OTHERS_WRITE and not status.st_mode & stat.S_ISVTX:
        raise _UntrustedFolderError(f"others may write to {home}; chmod go-w {home}")


def _check_ours_alone(folder: Path) -> None:
    """The folder itself, and the link to it where it is one."""
    if any(status.st_uid != os.getuid() for status in (folder.lstat(), folder.stat())):
        raise _UntrustedFolderError(f"{folder} belongs to another user")
    if folder.stat().st_mode & GROUP_OR_OTHERS_WRITE:
        raise _UntrustedFolderError(f"others may write to {folder}; chmod go-w {folder}")
