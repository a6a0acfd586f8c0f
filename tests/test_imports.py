"""The directions of imports, the homes of foreign packages, and what a fresh interpreter loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import vllm_lite

PACKAGE = Path(vllm_lite.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
VALUES = {"errors", "sampling_params", "outputs", "config"}

# What each part may import of the others; itself is always allowed. `step` is all that the worker sees of the engine.
ALLOWED = {
    "values": set(),
    "tokenizer": {"values", "tokenizer_protocol"},
    "chat_template": {"values", "tokenizer"},
    "engine": {"values"},
    "kernels": {"values"},
    "ops": {"values", "kernels", "step"},
    "layers": {"values", "ops", "step"},
    "models": {"values", "ops", "layers", "step"},
    "worker": {"values", "kernels", "ops", "layers", "models", "step"},
    "build": {"values", "tokenizer", "chat_template", "engine", "step", "worker", "models", "tokenizer_protocol"},
    "entrypoints": {"values", "build", "chat_template", "engine", "step", "tokenizer_protocol"},
}

# The only files that may import a foreign package, as path prefixes inside the package.
HOMES = {
    "cupy": ("kernels/cuda.py",),
    "aiohttp": ("entrypoints/",),
    "prometheus_client": ("entrypoints/",),
    "jinja2": ("chat_template.py",),
    "gguf": ("worker/gguf_format.py",),
    "torch": ("ops/", "layers/", "models/", "worker/", "kernels/", "build.py"),
    "transformers": ("tokenizer.py", "hf_tokenizer.py"),
}


def part_of(module: str) -> str:
    """The part that a dotted module name below the package belongs to."""
    if module in ("engine.step", "engine.tokenizer_protocol"):
        return module.split(".")[1]
    first = module.split(".")[0]
    if first in VALUES:
        return "values"
    return "tokenizer" if "tokenizer" in first else first


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    """Absolute names of what a file imports; `from a import b` gives a.b where b is a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                is_module = (PACKAGE.parent / (name.replace(".", "/") + ".py")).exists()
                yield name if is_module else node.module


def internal_imports(path: Path) -> set[str]:
    names = {name for name in imports(path) if name.split(".")[0] == "vllm_lite"}
    return {name.removeprefix("vllm_lite").removeprefix(".") for name in names} - {""}


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_only_what_its_part_may_see(path: Path) -> None:
    part = part_of(module_name(path))
    if part == "":
        return  # the root package, which loads its names on demand
    seen = {part_of(name) for name in internal_imports(path)} - {part}
    if part == "step":
        part = "engine"
        seen -= {"engine"}
    if part == "engine":
        seen -= {"step", "tokenizer_protocol"}
    if part == "tokenizer_protocol":
        part = "engine"
    assert seen <= ALLOWED[part], f"{module_name(path)} imports {sorted(seen - ALLOWED[part])}"


@pytest.mark.parametrize("package", HOMES)
def test_foreign_package_stays_at_home(package: str) -> None:
    homes = HOMES[package]
    for path in MODULES:
        if any(name.split(".")[0] == package for name in imports(path)):
            relative = path.relative_to(PACKAGE).as_posix()
            assert relative.startswith(homes), f"{relative} imports {package}"


def test_environment_is_read_in_one_file() -> None:
    """By any name of it in the code; that of a client in a text is another's."""
    names = {"environ", "environb", "getenv", "getenvb"}
    readers = set()
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            used = {getattr(node, key, None) for key in ("attr", "id", "name")}
            if used & names:
                readers.add(path.name)
    assert readers == {"config.py"}


def test_no_cycles() -> None:
    graph = {module_name(path): internal_imports(path) for path in MODULES}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"cycle: {' -> '.join((*trail, module))}"
        if module not in done:
            for name in graph.get(module, set()):
                visit(name, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_no_global_statement_and_no_late_import() -> None:
    for path in MODULES:
        tree = ast.parse(path.read_text())
        for function in ast.walk(tree):
            if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            for node in ast.walk(function):
                assert not isinstance(node, ast.Global), f"{path.name}:{node.lineno}: global"
                is_late = isinstance(node, (ast.Import, ast.ImportFrom)) and path.name != "cuda.py"
                assert not is_late, f"{path.name}:{function.name}: late import"


def test_control_plane_starts_without_torch() -> None:
    code = (
        "import sys, vllm_lite.engine.llm_engine, vllm_lite.engine.async_llm_engine, vllm_lite\n"
        "vllm_lite.SamplingParams\n"
        "print([name for name in ('torch', 'transformers', 'cupy') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_public_names_exist() -> None:
    for name in vllm_lite.__all__:
        assert getattr(vllm_lite, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = vllm_lite.nonsense


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_module_says_what_it_does(path: Path) -> None:
    if path.read_text().strip():
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"
