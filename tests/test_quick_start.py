"""The README's commands, as a newcomer types them."""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
READY_WITHIN_S = 120
"""Generous: two test processes share two cores. What a quiet machine needs stands in the README."""


@contextmanager
def running(command: list[str], folder: Path) -> Iterator[str]:
    """Runs a server until its ready line, which is yielded; ends it with SIGTERM, and then it must exit with 0."""
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield first_line(process)
        finally:
            process.send_signal(signal.SIGTERM)
            _, stderr = process.communicate(timeout=60)
        assert process.returncode == 0, stderr


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    assert process.stderr is not None
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        readable, _, _ = select.select([process.stdout], [], [], 0.2)
        if readable and (line := process.stdout.readline()):
            return line
        if process.poll() is not None:
            pytest.fail(f"the server ended: {process.stderr.read()}")
    pytest.fail("no ready line")


def pasted(ready_line: str) -> str:
    """Runs the command of the ready line in a shell, as it is; returns the text."""
    command = ready_line[ready_line.index("curl ") :]
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    text: str = json.loads(result.stdout)["text"][0]
    return text


def test_serve_then_paste_the_ready_line(tmp_path: Path) -> None:
    with running([str(ROOT / "scripts" / "serve"), "--port", "0"], tmp_path) as ready_line:
        text = pasted(ready_line)
        assert text.startswith("The capital of France is")
        assert "Paris" in text
        code = re.search(r"<!-- stream example -->\n```python\n(.*?)```", README, flags=re.DOTALL)
        port = re.search(r"127\.0\.0\.1:(\d+)", ready_line)
        assert code and port
        example = code[1].replace("127.0.0.1:8000", f"127.0.0.1:{port[1]}")
        result = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=60, check=True)
        assert result.stdout.startswith("Once upon a time")
        assert result.stdout.count("Once upon a time") > 10
        client, load_test = (script_command(name) for name in ("client", "load_test"))
        assert "Candidate 0: 'Once upon a time" in run_script([*client, "--port", port[1]])
        fewer = ["--num-chunks", "3", "--chunk-tokens", "20", "--max-tokens", "4"]
        assert "3 answered, 0 failed" in run_script([*load_test, "--port", port[1], *fewer])


def test_the_openai_example_runs(tmp_path: Path) -> None:
    code = re.search(r"<!-- openai example -->\n```python\n(.*?)```", README, flags=re.DOTALL)
    assert code
    with running([str(ROOT / "scripts" / "serve"), "--port", "0", "--openai"], tmp_path) as ready_line:
        command = ready_line[ready_line.index("curl ") :]
        result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
        assert "Paris" in json.loads(result.stdout)["choices"][0]["text"]
        port = re.search(r"127\.0\.0\.1:(\d+)", ready_line)
        assert port
        example = code[1].replace("127.0.0.1:8000", f"127.0.0.1:{port[1]}")
        result = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=60, check=True)
    assert "Paris" in result.stdout


def script_command(name: str) -> list[str]:
    """As the README has it."""
    block = re.search(r"<!-- scripts -->\n```bash\n(.*?)```", README, flags=re.DOTALL)
    assert block
    (command,) = [line for line in block[1].splitlines() if line.startswith(f"scripts/{name} ")]
    return shlex.split(command)


def run_script(command: list[str]) -> str:
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=READY_WITHIN_S)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_offline_script_runs() -> None:
    lines = run_script(script_command("offline_inference")).splitlines()
    assert [line.split(", text: ")[0] for line in lines] == [
        "Prompt: 'The capital of France is'",
        "Prompt: 'Once upon a time'",
    ]


def test_the_offline_example_runs(tmp_path: Path) -> None:
    code = re.search(r"<!-- offline example -->\n```python\n(.*?)```", README, flags=re.DOTALL)
    assert code
    command = [sys.executable, "-c", code[1]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()
    assert first.startswith("'The capital of France is' -> ' Paris")
    assert second.startswith("'Once upon a time' -> ")


def test_readme_and_ready_line_show_the_same_command() -> None:
    assert 'curl http://127.0.0.1:8000/generate -d \'{"prompt": "The capital of France is"' in README


def test_installed_package_serves_from_another_folder(tmp_path: Path) -> None:
    """`pip install .` into an environment whose packages are there already, then the README's module command."""
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True, symlinks=True)
    python = environment / "bin" / "python"
    site_packages = next((environment / "lib").glob("python*/site-packages"))
    # A path in a .pth file brings the packages of the tests' environment, but not its editable installs.
    dependencies = next(path for path in sys.path if path.endswith("site-packages"))
    source = tmp_path / "source"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(source)], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", str(source)]
    subprocess.run(install, check=True, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    (site_packages / "dependencies.pth").write_text(dependencies + "\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    where = [str(python), "-c", "import vllm_lite; print(vllm_lite.__file__)"]
    location = subprocess.run(where, cwd=elsewhere, capture_output=True, text=True, check=True).stdout
    assert location.startswith(str(environment))
    command = [str(python), "-m", "vllm_lite.entrypoints.api_server", "--port", "0"]
    with running(command, elsewhere) as ready_line:
        assert "Paris" in pasted(ready_line)
