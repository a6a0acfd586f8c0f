"""Programs that a test needs and that a developer's machine may lack: nginx, a browser. On CI they have to be there."""

from __future__ import annotations

import os
import shutil

import pytest


def find_program(*names: str) -> str:
    """The path of the first that is installed; without any the test is skipped, and on CI it fails."""
    for name in names:
        if path := shutil.which(name, path=os.environ.get("PATH", os.defpath) + ":/usr/sbin"):
            return path
    message = f"this test needs one of {', '.join(names)}, and none is installed"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)
