"""The CPU kernels' library and its threads: what a machine may lack, what may happen to the cache, and idle threads."""

from __future__ import annotations

import errno
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.checkpoints import cached_checkpoint
from tests.helpers.cpu_kernels import missing_requirement
from tests.ops.tensors import tokens_shape
from vllm_lite.config import ModelConfig
from vllm_lite.errors import StartupError
from vllm_lite.kernels import cpu, cpu_library, topology
from vllm_lite.kernels.cache_folder import private_cache_folder
from vllm_lite.kernels.cpu import CpuKernels, load_cpu_kernels
from vllm_lite.kernels.cpu_library import CompileError, build_library, find_compiler
from vllm_lite.kernels.topology import physical_cores
from vllm_lite.worker.cpu import find_cpu_kernels
from vllm_lite.worker.hf_config import read_model_config

ROOT = Path(__file__).parents[2]
FLAGS = ("-O1", "-mavx2", "-std=c++17", "-fPIC")
NUM_CPUS = len(topology.available_cpus())
NEW_LAPTOP, OLD_LAPTOP = frozenset({"avx2", "fma", "sse2"}), frozenset({"sse2"})

# The team, and kernels that need its barrier: what a thread reads in `rotate`, others have written in `add`.
PROBE = """
#include "task.h"
namespace {
void add(const Task& task, int32_t* numbers, int64_t size, int64_t amount) {
  for (int64_t i = task.begin(size); i < task.begin(size, 1); ++i) numbers[i] += amount;
}
void rotate(const Task& task, const int32_t* from, int32_t* to, int64_t size) {
  for (int64_t i = task.begin(size); i < task.begin(size, 1); ++i) to[i] = from[(i + size / 2) % size];
}
void threads(const Task& task, int32_t* seen) { seen[task.take()] = task.thread; }
}
EXPORT(add, add)
EXPORT(rotate, rotate)
EXPORT(threads, threads)
"""

pytestmark = pytest.mark.skipif(missing_requirement() is not None, reason=str(missing_requirement()))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    private_cache_folder.cache_clear()
    yield tmp_path / "home"
    private_cache_folder.cache_clear()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    return folder


def compiler() -> str:
    path = find_compiler()
    assert path is not None
    return path


def wrapper(folder: Path, before: str) -> str:
    """A compiler that runs lines of shell before it compiles a file."""
    path = folder / "wrapper"
    path.write_text(f'#!/bin/sh\ncase " $* " in *" -c "*)\n{before}\n;; esac\nexec {compiler()} "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A library that takes no time to compile."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "answer.h").write_text("#define ANSWER 42\n")
    (folder / "answer.cpp").write_text('#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n')
    (folder / "other.cpp").write_text('extern "C" int other() { return 1; }\n')
    return folder


def put_in_path(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Compilers by name, `_` for `+`, and no others."""
    folder = folder / "bin"
    folder.mkdir()
    for name, script in scripts.items():
        path = folder / name.replace("_", "+")
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_a_compiler_that_does_not_run_hides_none_that_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_path(tmp_path, monkeypatch, c__="exit 127", g__='[ "$1" = --version ]')
    assert find_compiler() == str(tmp_path / "bin" / "g++")


def test_the_first_compiler_that_runs_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_path(tmp_path, monkeypatch, c__="exit 0", g__="exit 0")
    assert find_compiler() == str(tmp_path / "bin" / "c++")


def test_where_no_compiler_runs_the_first_is_left_to_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_path(tmp_path, monkeypatch, g__="exit 127")
    path = find_compiler()
    assert path == str(tmp_path / "bin" / "g++")
    with pytest.raises(CompileError, match="failed with exit code 127"):
        build_library(path, tmp_path, FLAGS)
    put_in_path(tmp_path / "bin", monkeypatch)
    assert find_compiler() is None


@dataclass(frozen=True)
class _Team:
    library: Path
    sources: Path


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> _Team:
    """The real team with the probe's kernels, compiled in a moment."""
    folder = tmp_path_factory.mktemp("team")
    for name in ("task.h", "team.cpp"):
        shutil.copy(cpu_library.source_folder() / name, folder)
    (folder / "probe.cpp").write_text(PROBE)
    return _Team(build_library(compiler(), tmp_path_factory.mktemp("cache"), FLAGS, folder), folder)


@pytest.fixture
def cheap(team: _Team, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The team's sources instead of the kernels', for what a server does at its start."""
    monkeypatch.setattr(cpu, "FLAGS", FLAGS)
    monkeypatch.setattr(cpu_library, "source_folder", lambda: team.sources)


def answer_of(library: Path) -> int:
    """In another process, for a library that is no good may end it."""
    code = f"import ctypes; print(ctypes.CDLL({str(library)!r}).answer())"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def assert_torch_computes(caplog: pytest.LogCaptureFixture, *words: str) -> None:
    """No kernels, and one warning that says what is lost and why."""
    assert load_cpu_kernels(1, []) is None
    (warning,) = warnings_of(caplog)
    assert "torch computes everything, at a fraction of the speed" in warning
    for word in words:
        assert word in warning, warning


# What a machine may lack.


def test_no_compiler(home: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(home))
    assert_torch_computes(caplog, "no C++ compiler", "apt install g++")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("#!/bin/sh\necho 'cc1plus: it is broken' >&2\nexit 1\n", ["exit code 1", "cc1plus: it is broken"]),
        ("#!/no/such/interpreter\n", ["cannot be run", "No such file"]),
        ("no program\n", ["cannot be run", "Exec format error"]),
    ],
)
def test_a_broken_compiler(
    text: str, words: list[str], home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path = tmp_path / "c++"
    path.write_text(text)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert_torch_computes(caplog, str(path), *words)


def test_sources_that_do_not_compile_end_in_the_compilers_own_words(
    sources: Path, home: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sources / "answer.cpp").write_text("int broken = nonsense;\n")
    monkeypatch.setattr(cpu_library, "source_folder", lambda: sources)
    assert_torch_computes(caplog, "answer.cpp", "nonsense", "was not declared" if "g++" in compiler() else "")
    assert list((home / "vllm_lite" / "cpu").iterdir()) == []


def test_a_compiler_that_hangs_is_ended_with_all_it_started(
    sources: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = wrapper(tmp_path, f"echo $$ >> {tmp_path}/pids; sleep 1000 & echo $! >> {tmp_path}/pids; wait")
    monkeypatch.setattr(cpu_library, "COMPILER_TIMEOUT_S", 1.5)
    with pytest.raises(CompileError, match=r"wrapper .*answer\.cpp.* had not finished after 1\.5 s"):
        build_library(path, cache, FLAGS, sources)
    assert_gone([int(pid) for pid in (tmp_path / "pids").read_text().split()])
    assert list(cache.iterdir()) == []


def test_when_one_file_fails_the_others_are_not_waited_for(sources: Path, cache: Path, tmp_path: Path) -> None:
    if NUM_CPUS == 1:
        pytest.skip("on one core files are compiled one after the other")
    (sources / "answer.cpp").write_text("int broken = nonsense;\n")
    path = wrapper(tmp_path, f'case "$*" in *other.cpp*) echo $$ > {tmp_path}/pid; exec sleep 1000;; esac')
    started = time.monotonic()
    with pytest.raises(CompileError, match="nonsense"):
        build_library(path, cache, FLAGS, sources)
    assert time.monotonic() - started < 60
    if (tmp_path / "pid").exists():
        assert_gone([int((tmp_path / "pid").read_text())])


def assert_gone(pids: Sequence[int]) -> None:
    """Killed processes; whoever inherits them reaps them a moment later."""
    deadline = time.monotonic() + 20
    for pid in pids:
        while (stat := Path(f"/proc/{pid}/stat")).exists() and ") Z " not in stat.read_text():
            assert time.monotonic() < deadline, f"process {pid} still runs"
            time.sleep(0.02)


@pytest.mark.parametrize(
    ("system", "machine", "flags", "reason"),
    [
        ("Linux", "x86_64", OLD_LAPTOP, "AVX2 and FMA"),
        ("Linux", "x86_64", frozenset(), "AVX2 and FMA"),
        ("Linux", "aarch64", NEW_LAPTOP, "Linux on x86-64, not Linux on aarch64"),
        ("Darwin", "arm64", frozenset(), "Linux on x86-64, not Darwin on arm64"),
    ],
)
def test_another_cpu(
    system: str, machine: str, flags: frozenset[str], reason: str, home: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(cpu, "cpu_flags", lambda: flags)
    assert_torch_computes(caplog, reason)


@pytest.mark.usefixtures("cheap")
def test_a_cache_that_cannot_be_written(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    home.touch()
    kernels = load_cpu_kernels(2, [])
    assert kernels is not None
    assert_adds(kernels)
    kernels.close()
    (warning,) = warnings_of(caplog)
    assert "compiled anew at every start" in warning


@pytest.mark.usefixtures("cheap")
def test_a_cache_on_a_full_disk(home: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(folder: Path) -> None:
        if folder.is_relative_to(home):
            raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    monkeypatch.setattr(cpu_library, "check_room", check)
    kernels = load_cpu_kernels(2, [])
    assert kernels is not None
    assert_adds(kernels)
    kernels.close()
    (warning,) = warnings_of(caplog)
    assert "compiled anew at every start" in warning and "No space left on device" in warning
    assert list((home / "vllm_lite" / "cpu").iterdir()) == []


# What may happen to the cache.


def test_the_library_is_compiled_once_with_a_line_in_the_log(
    sources: Path, cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = wrapper(tmp_path, f"echo >> {tmp_path}/runs")
    with caplog.at_level(logging.INFO):
        libraries = {build_library(path, cache, FLAGS, sources) for _ in range(3)}
    assert list(cache.iterdir()) == list(libraries)
    assert answer_of(*libraries) == 42
    assert (tmp_path / "runs").read_text() == "\n" * 2
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"compiling the CPU kernels with {path} (once, ")


def test_everything_it_depends_on_gives_it_another_name(
    sources: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*flags: str, compiler_path: str = "") -> Path:
        return build_library(compiler_path or compiler(), cache, (*FLAGS, *flags), sources)

    libraries = [build(), build("-O2")]
    other_version = tmp_path / "other"
    other_version.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo 99 && exit\nexec {compiler()} "$@"\n')
    other_version.chmod(0o755)
    libraries.append(build(compiler_path=str(other_version)))
    for flags in (NEW_LAPTOP, NEW_LAPTOP | {"avx512f"}):  # a home folder that two machines share
        with monkeypatch.context() as patch:
            patch.setattr(cpu_library, "cpu_flags", lambda flags=flags: flags)
            libraries.append(build())
    (sources / "answer.h").write_text("#define ANSWER 43\n")
    libraries.append(build())
    assert len(set(libraries)) == len(libraries)
    assert [answer_of(library) for library in libraries] == [42] * 5 + [43]
    (sources / "answer.h").write_text("#define ANSWER 42\n")
    assert build() == libraries[0]


@pytest.mark.parametrize("damage", ["cut off", "empty", "a byte", "without its checksum"])
def test_a_damaged_library_is_made_again(
    damage: str, sources: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library = build_library(compiler(), cache, FLAGS, sources)
    content = library.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    damaged = {"cut off": content[: len(content) // 2], "empty": b"", "a byte": bytes(flipped)}
    library.write_bytes(damaged.get(damage, content[: -cpu_library.CHECKSUM_BYTES]))
    caplog.clear()
    assert build_library(compiler(), cache, FLAGS, sources) == library
    assert warnings_of(caplog) == [f"{library} is damaged and made again"]
    assert answer_of(library) == 42
    assert list(cache.iterdir()) == [library]


BUILD = """
import sys
from pathlib import Path
from vllm_lite.kernels.cpu_library import build_library
compiler, cache, folder, *flags = sys.argv[1:]
print(build_library(compiler, Path(cache), flags, Path(folder)))
"""


def start_build(compiler_path: str, cache: Path, sources: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-c", BUILD, compiler_path, str(cache), str(sources), *FLAGS]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_two_processes_that_build_at_once(sources: Path, cache: Path, tmp_path: Path) -> None:
    (sources / "other.cpp").unlink()
    # Neither goes on before both have begun to compile.
    both = f'echo >> {tmp_path}/begun; while [ "$(wc -l < {tmp_path}/begun)" -lt 2 ]; do sleep 0.05; done'
    path = wrapper(tmp_path, both)
    builds = [start_build(path, cache, sources) for _ in range(2)]
    libraries = [Path(build.communicate(timeout=60)[0].strip()) for build in builds]
    assert [build.returncode for build in builds] == [0, 0]
    assert libraries[0] == libraries[1]
    assert list(cache.iterdir()) == [libraries[0]]
    assert answer_of(libraries[0]) == 42
    assert cpu_library._is_whole(libraries[0])


def test_a_build_that_was_killed(sources: Path, cache: Path, tmp_path: Path) -> None:
    """What it leaves harms no other build, and goes once nobody can be at work on it."""
    (sources / "other.cpp").unlink()
    path = wrapper(tmp_path, f"echo $$ > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; exec sleep 1000")
    build = start_build(path, cache, sources)
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists():
        assert build.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    build.kill()
    build.communicate()
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    (left,) = cache.iterdir()
    assert left.name.startswith(cpu_library.BUILDING)

    library = build_library(compiler(), cache, FLAGS, sources)
    assert answer_of(library) == 42
    assert sorted(cache.iterdir()) == sorted([left, library])  # it might be in the making still
    hours_ago = time.time() - 2 * cpu_library.ABANDONED_AFTER_S
    os.utime(left, (hours_ago, hours_ago))
    (sources / "answer.h").write_text("#define ANSWER 43\n")
    assert sorted(cache.iterdir()) == sorted([left, library])
    newer = build_library(compiler(), cache, FLAGS, sources)
    assert sorted(cache.iterdir()) == sorted([library, newer])


# Threads.


def small_model() -> ModelConfig:
    return read_model_config(cached_checkpoint("llama"), trust_remote_code=False)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"head_dim": 258}, "heads of an even number of dimensions up to 256, the model has 258"),
        ({"head_dim": 5}, "the model has 5"),
        ({"intermediate_size": 53248}, "layers of even sizes up to 40000, the model has 64, 53248, 64"),
        ({"hidden_size": 63}, "the model has 63, 128, 64"),
        ({"word_embed_proj_dim": 33}, "the model has 64, 128, 64, 33"),
    ],
    ids=range(5),
)
def test_a_model_beyond_the_kernels_is_computed_by_torch(
    sizes: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert find_cpu_kernels(1, replace(small_model(), **sizes)) is None
    assert message in caplog.text


def write_group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


@pytest.mark.parametrize(
    ("listing", "groups", "expected"),
    [
        ("0::/a/b", {"a": {"cpu__max": "150000 100000"}, "a/b": {"cpu__max": "max 100000"}}, 2),
        ("0::/a/b", {"a": {"cpu__max": "400000 100000"}, "a/b": {"cpu__max": "50000 100000"}}, 1),
        ("0::/elsewhere", {".": {"cpu__max": "300000 100000"}}, 3),
        ("0::/a", {"a": {"cpu__max": "max 100000"}}, None),
        ("4:cpu,cpuacct:/c", {"cpu/c": {"cpu__cfs_quota_us": "200000", "cpu__cfs_period_us": "100000"}}, 2),
        ("4:cpu,cpuacct:/c", {"cpu/c": {"cpu__cfs_quota_us": "-1", "cpu__cfs_period_us": "100000"}}, None),
        ("5:memory:/c", {"cpu/c": {"cpu__max": "100000 100000"}}, None),
    ],
    ids=range(7),
)
def test_quota_of_control_groups(
    listing: str, groups: dict[str, dict[str, str]], expected: int | None, tmp_path: Path
) -> None:
    write_group(tmp_path / "proc" / "self", cgroup=listing)
    for name, files in groups.items():
        write_group(tmp_path / "groups" / name, **files)
    assert topology.cpu_quota(tmp_path / "proc", tmp_path / "groups") == expected


def test_a_system_without_control_groups_sets_no_limit(tmp_path: Path) -> None:
    assert topology.cpu_quota(tmp_path, tmp_path) is None


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_is_told_that_it_has_no_threads(team: _Team) -> None:
    kernels = CpuKernels(team.library, 2)
    child = os.fork()
    if child == 0:
        try:
            assert_adds(kernels)
        except RuntimeError as error:
            kernels.close()
            os._exit(0 if "forked process" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert_adds(kernels)
    kernels.close()


def test_an_empty_list_runs_nothing(team: _Team) -> None:
    kernels = CpuKernels(team.library, 2)
    with kernels.capture() as calls:
        pass
    for _ in range(100):
        kernels.replay(calls.finished(), tokens_shape(0))
        assert_adds(kernels)
    kernels.close()


@pytest.fixture
def two_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two cores of two CPUs each: 0 and 2, 1 and 3."""
    for number, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        folder = tmp_path / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    monkeypatch.setattr(topology, "available_cpus", lambda: [0, 1, 2, 3])
    return tmp_path


def test_one_cpu_of_each_core_that_the_process_may_use(two_cores: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert physical_cores(two_cores) == [0, 1]
    monkeypatch.setattr(topology, "available_cpus", lambda: [1, 2, 3])
    assert physical_cores(two_cores) == [1, 2]
    monkeypatch.setattr(topology, "available_cpus", lambda: [3])
    assert physical_cores(two_cores) == [3]
    assert physical_cores(two_cores / "a system that does not say") == [3]


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize(
    ("asked", "quota", "expected"),
    [(None, None, 2), (1, None, 1), (2, None, 2), (4, None, 4), (None, 1, 1), (None, 3, 2), (4, 1, 4)],
)
def test_number_of_threads(
    asked: int | None, quota: int | None, expected: int, team: _Team, two_cores: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "private_cache_folder", lambda name: team.library.parent)
    monkeypatch.setattr("vllm_lite.worker.cpu.available_cpus", lambda: [0, 1, 2, 3])
    monkeypatch.setattr("vllm_lite.worker.cpu.physical_cores", lambda: physical_cores(two_cores))
    monkeypatch.setattr("vllm_lite.worker.cpu.cpu_quota", lambda: quota)
    kernels = find_cpu_kernels(asked, small_model())
    assert kernels is not None
    assert kernels.num_threads == expected
    assert_adds(kernels)
    kernels.close()


def test_more_threads_than_the_process_has_cores_are_refused() -> None:
    with pytest.raises(
        StartupError, match=f"--num-threads {NUM_CPUS + 1} is more than the {NUM_CPUS} cores .* or less"
    ):
        find_cpu_kernels(NUM_CPUS + 1, small_model())


WITHOUT_MEMORY = """
import os, resource, sys
from pathlib import Path
from vllm_lite.errors import StartupError
from vllm_lite.kernels.cpu import CpuKernels

library, free_bytes = Path(sys.argv[1]), int(sys.argv[2])
num_threads = len(os.listdir("/proc/self/task"))
num_pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = num_pages * resource.getpagesize() + free_bytes
resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
try:
    CpuKernels(library, 40)
except StartupError as error:
    print(error)
assert len(os.listdir("/proc/self/task")) == num_threads
"""


@pytest.mark.parametrize("free_mib", [60, 420])
def test_threads_that_there_is_no_memory_for(team: _Team, free_mib: int) -> None:
    """None for the scratch memory of 40 threads (320 MiB), or for their stacks too (312 MiB).

    In a process of its own: this one has memory at hand that earlier tests have freed.
    """
    command = [sys.executable, "-c", WITHOUT_MEMORY, str(team.library), str(free_mib * 2**20)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "40 threads cannot be started: lower --num-threads" in done.stdout


def assert_adds(kernels: CpuKernels, num_runs: int = 1) -> None:
    size = 97
    numbers, rotated = torch.arange(size, dtype=torch.int32), torch.zeros(size, dtype=torch.int32)
    with kernels.capture() as calls:
        for _ in range(3):
            kernels.call("add", tokens_shape(0), numbers, size, 5)
            kernels.call("rotate", tokens_shape(0), numbers, rotated, size)
            kernels.call("rotate", tokens_shape(0), rotated, numbers, size)
    finished = calls.finished()
    for _ in range(num_runs):
        kernels.replay(finished, tokens_shape(0))
    expected = np.roll(np.arange(size), -2 * (size // 2) * 3 * num_runs) + 5 * 3 * num_runs
    assert numbers.tolist() == expected.tolist()


@pytest.mark.parametrize("num_threads", [1, 2, 3, 2 * NUM_CPUS + 1])
def test_all_threads_run_every_call(team: _Team, num_threads: int) -> None:
    kernels = CpuKernels(team.library, num_threads, topology.available_cpus())
    seen = torch.full((num_threads,), -1, dtype=torch.int32)
    kernels.call("threads", tokens_shape(0), seen)
    assert sorted(seen.tolist()) == list(range(num_threads))
    assert_adds(kernels, 200)
    kernels.close()


def num_threads_of_process() -> int:
    return len(os.listdir("/proc/self/task"))


def test_no_thread_is_left_after_close(team: _Team) -> None:
    before = num_threads_of_process()
    kernels = CpuKernels(team.library, 3)
    assert num_threads_of_process() == before + 2
    assert_adds(kernels)
    kernels.close()
    assert num_threads_of_process() == before
    kernels.close()
    CpuKernels(team.library, 3)  # dropped without a run and without a close
    assert num_threads_of_process() == before


@pytest.mark.skipif(NUM_CPUS < 2, reason="needs two CPUs")
def test_a_caller_is_pinned_unless_it_is_the_main_thread(team: _Team) -> None:
    cpus = topology.available_cpus()
    kernels = CpuKernels(team.library, 2, cpus)
    kernels.pin_caller()
    assert topology.available_cpus() == cpus

    def pin() -> list[int]:
        kernels.pin_caller()
        return topology.available_cpus()

    with ThreadPoolExecutor(max_workers=1) as pool:
        assert [pool.submit(pin).result() for _ in range(2)] == [cpus[:1], cpus[:1]]
    assert topology.available_cpus() == cpus
    kernels.close()


def test_idle_threads_take_no_processor_time(team: _Team) -> None:
    kernels = CpuKernels(team.library, 3)
    assert_adds(kernels)
    time.sleep(0.02)  # the workers spin for 0.2 ms before they sleep
    begin = time.process_time()
    time.sleep(0.6)
    assert time.process_time() - begin < 0.006
    assert_adds(kernels)
    kernels.close()


def test_sleeping_and_spinning_workers_wake_up(team: _Team) -> None:
    """Pauses around the moment in which workers go to sleep: a wake-up that is lost would hang this."""
    kernels = CpuKernels(team.library, 2)
    for pause_us in [*range(0, 400, 4), 1000, 5000, 20000]:
        end = time.perf_counter_ns() + 1000 * pause_us
        while time.perf_counter_ns() < end:
            pass
        assert_adds(kernels)
    kernels.close()
