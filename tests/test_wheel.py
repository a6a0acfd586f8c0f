"""What a wheel carries."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_wheel_carries_every_module_the_kernels_sources_and_the_page(tmp_path: Path) -> None:
    # In a copy, for a build leaves its files beside the sources.
    copy = tmp_path / "copy"
    for folder in ("vllm_lite", "cuda"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "--wheel-dir", str(tmp_path), str(copy)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    carried = {name for name in zipfile.ZipFile(wheel).namelist() if not name.split("/")[0].endswith(".dist-info")}
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "vllm_lite").rglob("*.py")}
    sources = {f"vllm_lite/cuda/{path.name}" for path in (ROOT / "cuda").iterdir()}
    sources |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "vllm_lite" / "cpu").iterdir()}
    sources |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "vllm_lite" / "entrypoints" / "docs").iterdir()}
    assert carried == modules | sources | {"vllm_lite/py.typed"}
    assert {Path(name).suffix for name in sources} == {".cu", ".cuh", ".cpp", ".h", ".html", ".css", ".js"}
