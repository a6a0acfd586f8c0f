"""The benchmark of the whole: its statistics, its clients, and all of it on a tiny model."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from scripts import bench_serving
from scripts.bench import busy, quiet, server
from scripts.bench.client import Address, Response, TimedBytes, exchange, post_bytes, split_messages
from scripts.bench.contenders import InProcess, OverHttp
from scripts.bench.figures import Run, figures, ratios, spread, spreads
from scripts.bench.prompts import PromptMaker
from scripts.bench.protocols import NativeProtocol, OpenAIProtocol, first_model
from scripts.bench.quiet import Limits, Sample, undisturbed
from scripts.bench.rounds import Rounds
from scripts.bench.workloads import Prompt, Workload, engine_options
from tests.helpers.byte_tokenizer import ByteTokenizer
from tests.helpers.checkpoints import cached_checkpoint
from tests.helpers.fake_openai_server import MODEL, running_openai_server
from tests.helpers.server import ROOT, running_server
from vllm_lite.config import EngineConfig, parse_command_line

SINGLE = Workload("single", num_prompts=1, prompt_len=3, output_len=5)
BATCH = Workload("batch", num_prompts=2, prompt_len=3, output_len=3)
PROMPTS = [Prompt("one two three", [1, 2, 3]), Prompt("four five six", [4, 5, 6])]
FAKE_SERVER = [sys.executable, "-m", "tests.helpers.fake_server"]


# From times to figures


def test_figures_of_a_single_stream() -> None:
    run = Run(seconds=2.0, num_tokens=5, token_times=[[0.5, 0.6, 0.7, 1.3, 1.5]])
    assert figures(SINGLE, run) == {
        "tokens_per_s": 2.5,
        "first_token_ms": 500.0,
        "decode_tokens_per_s": 4.0,
        "longest_gap_ms": pytest.approx(600.0),
    }


def test_figures_of_whole_answers_and_of_several_streams() -> None:
    assert figures(SINGLE, Run(0.5, 5, [])) == {"tokens_per_s": 10.0}
    streams = Run(3.0, 6, [[0.5, 1.0, 1.25], [1.0, 2.0, 3.0]])
    assert figures(BATCH, streams) == {"tokens_per_s": 2.0, "longest_gap_ms": 1000.0}


def test_no_speed_of_decoding_where_all_tokens_came_at_once() -> None:
    assert "decode_tokens_per_s" not in figures(SINGLE, Run(1.0, 5, [[0.5] * 5]))


def test_too_few_tokens_are_no_measurement() -> None:
    with pytest.raises(RuntimeError, match="6 tokens were asked for, 5 came"):
        figures(BATCH, Run(1.0, 5, []))


def test_ratios_are_taken_within_a_round() -> None:
    ours = [{"tokens_per_s": 10.0, "first_token_ms": 4.0}, {"tokens_per_s": 40.0}, {"tokens_per_s": 30.0}]
    theirs = [{"tokens_per_s": 5.0}, {"tokens_per_s": 10.0}, {"tokens_per_s": 10.0}]
    assert ratios(ours, theirs) == {"tokens_per_s": {"median": 3.0, "min": 2.0, "max": 4.0}}
    assert spreads(ours) == {"tokens_per_s": {"median": 30.0, "min": 10.0, "max": 40.0}}
    assert spread([1.0, 4.0]) == {"median": 2.5, "min": 1.0, "max": 4.0}


# Disturbed runs


def samples(*foreign: float) -> Iterator[Sample]:
    """Two samples for each run of a second, during which others used so many cores and we used one."""
    machine_s = own_s = 0.0
    for start_s, cores in enumerate(foreign):
        yield Sample(start_s, machine_s, own_s)
        machine_s, own_s = machine_s + cores + 1, own_s + 1
        yield Sample(start_s + 1, machine_s, own_s)


def measured(*foreign: float, max_tries: int) -> quiet.Measured[int]:
    runs, clock = iter(range(100)), samples(*foreign)
    return undisturbed(lambda: next(runs), lambda: next(clock), Limits(0.05, 0.0, max_tries))


def test_a_quiet_run_counts_at_once() -> None:
    found = measured(0.02, max_tries=3)
    assert (found.value, found.is_disturbed, found.num_discarded) == (0, False, 0)


def test_a_disturbed_run_is_repeated() -> None:
    found = measured(0.8, 0.3, 0.01, max_tries=5)
    assert (found.value, found.is_disturbed, found.num_discarded) == (2, False, 2)
    assert found.foreign == pytest.approx(0.01)


def test_the_least_disturbed_run_counts_and_is_marked() -> None:
    found = measured(0.8, 0.3, 0.5, max_tries=3)
    assert (found.value, found.is_disturbed, found.num_discarded) == (1, True, 2)
    assert found.foreign == pytest.approx(0.3)


@pytest.mark.parametrize(("foreign", "num_samples"), [((0.9, 0.9, 0.0, 0.9), 4), ((0.9,) * 8, 6)])
def test_waiting_for_an_idle_machine_is_bounded(
    foreign: tuple[float, ...], num_samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quiet, "WINDOW_S", 0.0)
    machine_s = 0.0
    found = [Sample(0.0, 0.0, 0.0)]
    for time_s, cores in enumerate(foreign, start=1):
        machine_s += cores
        found.append(Sample(time_s, machine_s, 0.0))
    clock = iter(found)
    last = quiet.wait_until_idle(lambda: next(clock), Limits(0.05, 5.0, 1))
    assert last is found[num_samples - 1]
    assert len(found) - len(list(clock)) == num_samples


def test_cpu_time_of_the_machine_and_of_a_tree_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "TICKS_PER_S", 10)
    (tmp_path / "stat").write_text("cpu  100 20 30 4000 500 6000 7000 8 9 10\ncpu0 1 2 3\n")
    # The four numbers: user and system time of the process, and of its children that have ended.
    processes = {
        10: ("root", 1, "1 2 3 4"),
        11: ("a (child) 7 8", 10, "10 0 0 0"),
        12: ("grandchild", 11, "0 20 0 0"),
        13: ("other", 1, "500 0 0 0"),
    }
    for process_id, (name, parent, times) in processes.items():
        (tmp_path / str(process_id)).mkdir()
        stat = f"{process_id} ({name}) S {parent} 0 0 0 0 0 0 0 0 0 {times} 20 0 1 0"
        (tmp_path / str(process_id) / "stat").write_text(stat)
    assert quiet.machine_cpu_s(tmp_path) == 15.8  # no interrupts, but what the host took
    assert quiet.tree_cpu_s([10], tmp_path) == 4.0
    assert quiet.tree_cpu_s([11, 13, 99], tmp_path) == 53.0


def test_the_busy_process_is_one_of_ours() -> None:
    before = quiet.take_sample([os.getpid()])
    with busy.busy_process():
        time.sleep(0.3)
        after = quiet.take_sample([os.getpid()])
    assert after.own_s - before.own_s > 0.02  # what a crowded machine leaves it
    assert after.machine_s > before.machine_s


# Prompts and options


@pytest.mark.parametrize("length", [1, 3, 128])
def test_prompts_have_the_same_ids_as_text(length: int) -> None:
    tokenizer = ByteTokenizer()
    maker = PromptMaker(tokenizer)
    prompts = maker.make(Workload("", 4, length, 2))
    assert all(tokenizer.encode(prompt.text) == prompt.token_ids for prompt in prompts)
    assert {len(prompt.token_ids) for prompt in prompts} == {length}
    if length > 100:
        others = maker.make(Workload("", 4, length, 2))
        assert len({prompt.text for prompt in prompts + others}) == 8


def test_prompts_are_made_of_words_where_words_are_tokens() -> None:
    class Words(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            return [0, *(500 for _ in text.split())]  # a token of its own before the first

    words = [" w" + chr(97 + i) * 3 for i in range(26)]
    (prompt,) = PromptMaker(Words(words)).make(Workload("", 1, 10, 2))
    assert len(prompt.token_ids) == 10
    assert len(prompt.text.split()) == 9


def test_a_tokenizer_that_merges_everything_is_refused() -> None:
    class Merging(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            return [0]

    with pytest.raises(ValueError, match="no prompt of exactly 5 tokens"):
        PromptMaker(Merging()).make(Workload("", 1, 5, 2))


def test_engine_and_server_get_the_same_options() -> None:
    workloads = [Workload("batch", 32, 128, 128), Workload("long", 1, 1500, 128)]
    options = engine_options(workloads, model="folder", dtype="bfloat16", threads=2)
    config: Mapping[str, Any] = options
    assert options["num_kv_blocks"] == 32 * 16
    assert options["max_model_len"] == 1628
    assert parse_command_line(server.flags(options))[0] == EngineConfig(**config)


# Clients


def response(*pieces: bytes) -> Response:
    return Response([(float(time_s), piece) for time_s, piece in enumerate(pieces)])


def test_chunks_have_the_time_at_which_their_end_came() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    found = response(head + b"3\r\na", b"\0b\r\n3\r", b"\nc\0d\r\n2;x=y\r\ne\0\r\n0\r\n\r\n")
    body = found.body()
    assert body == [(1.0, b"a\0b"), (2.0, b"c\0d"), (2.0, b"e\0")]
    assert split_messages(body, b"\0") == [(1.0, b"a"), (2.0, b"bc"), (2.0, b"de")]
    assert found.end_s == 2.0


def test_bodies_without_chunks() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n"
    assert response(head[:10], head[10:] + b"ab", b"cd").body() == [(1.0, b"ab"), (2.0, b"cd")]
    assert response(b"HTTP/1.0 200 OK\r\n\r\n", b"all").body() == [(1.0, b"all")]


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ((b"",), "closed the connection after"),
        ((b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc",), "in the middle of its answer"),
        ((b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",), "in the middle of its answer"),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc",), "after 3 of 9 bytes"),
        ((b'HTTP/1.1 400 Bad Request\r\n\r\n{"detail": "no"}',), '400 Bad Request.*"no"'),
    ],
    ids=["nothing", "half a chunk", "no last chunk", "short", "refused"],
)
def test_broken_answers_are_no_measurement(pieces: tuple[bytes, ...], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        response(*pieces).body()


def test_half_a_message_is_no_measurement() -> None:
    body: TimedBytes = [(0.0, b"a\0b")]
    with pytest.raises(RuntimeError, match="ends in b'b'"):
        split_messages(body, b"\0")


@pytest.mark.parametrize("delimiter", ["null", "newline"])
def test_a_server_of_the_native_protocol(delimiter: str) -> None:
    with running_server("--stream-delimiter", delimiter, script={"delay_s": 0.01}) as fake:
        address = Address("127.0.0.1", fake.port)
        stream = OverHttp("stream", address, NativeProtocol(), is_stream=True).run(BATCH, PROMPTS)
        whole = OverHttp("whole", address, NativeProtocol(), is_stream=False).run(BATCH, PROMPTS)
    assert stream.num_tokens == 6
    assert [len(times) for times in stream.token_times] == [3, 3]
    assert all(times == sorted(times) and 0.03 <= times[-1] <= stream.seconds for times in stream.token_times)
    assert (whole.num_tokens, whole.token_times) == (6, [])
    assert whole.seconds >= 0.03


def test_a_silent_server_times_out() -> None:
    with running_server(script={"delay_s": 5.0}) as fake:
        address = Address("127.0.0.1", fake.port)
        with pytest.raises(TimeoutError, match=r"sent nothing for 0\.2 s"):
            exchange(address, [post_bytes(address, "/generate", {"prompt": "x"})], timeout_s=0.2)


@pytest.mark.parametrize("counts_tokens", [True, False], ids=["usage", "no usage"])
def test_a_server_of_the_openai_protocol(counts_tokens: bool) -> None:
    with running_openai_server(counts_tokens=counts_tokens) as fake:
        address = Address("127.0.0.1", fake.port)
        protocol = OpenAIProtocol(first_model(address), extra={"cache_prompt": False})
        stream = OverHttp("peer-stream", address, protocol, is_stream=True).run(BATCH, PROMPTS)
        whole = OverHttp("peer", address, OpenAIProtocol(MODEL, takes_text=True), is_stream=False).run(BATCH, PROMPTS)
    assert (stream.num_tokens, whole.num_tokens) == (6, 6)
    assert [len(times) for times in stream.token_times] == [3, 3]
    assert whole.token_times == []
    by_ids, by_text = fake.requests[:2], fake.requests[2:]
    assert sorted(fields["prompt"] for fields in by_ids) == [[1, 2, 3], [4, 5, 6]]
    assert all(fields["ignore_eos"] and fields["cache_prompt"] is False and fields["stream"] for fields in by_ids)
    assert sorted(fields["prompt"] for fields in by_text) == ["four five six", "one two three"]


def test_a_server_that_sends_too_little_is_not_measured() -> None:
    with running_openai_server(missing=1) as fake:
        address = Address("127.0.0.1", fake.port)
        contender = OverHttp("peer", address, OpenAIProtocol(MODEL), is_stream=True)
        with pytest.raises(RuntimeError, match="6 tokens were asked for, 4 came"):
            figures(BATCH, contender.run(BATCH, PROMPTS))
        wrong = OverHttp("peer", address, OpenAIProtocol("another"), is_stream=True)
        with pytest.raises(RuntimeError, match=r"404.*no such model"):
            wrong.run(BATCH, PROMPTS)


def test_a_process_that_has_ended_is_named() -> None:
    contender = InProcess("engine", os._exit, 3)
    with pytest.raises(RuntimeError, match="the process of engine has ended"):
        contender.run(SINGLE, PROMPTS[:1])
    contender.close()


# Beside a busy process, and our own server


def test_slowdown_and_gaps_beside_a_busy_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    is_busy = False

    @contextmanager
    def switch() -> Iterator[None]:
        nonlocal is_busy
        is_busy = True
        yield
        is_busy = False

    class Slowed:
        name = "http-stream"

        def run(self, workload: Workload, prompts: Sequence[Prompt]) -> Run:
            slow = 2 if is_busy else 1
            return Run(slow * 1.0, 5, [[slow * 0.2 * (k + 1) for k in range(5)]])

    monkeypatch.setattr(busy, "busy_process", switch)
    result = busy.measure_busy(SINGLE, [Slowed()], [PROMPTS[:1]] * 3, Rounds(Limits(1e9, 0.0, 1)))
    assert result["http-stream"]["slowdown"]["median"] == 2.0
    assert result["http-stream"]["longest_gap_ms_quiet"]["max"] == pytest.approx(200.0)
    assert result["http-stream"]["longest_gap_ms_busy"]["max"] == pytest.approx(400.0)
    assert capsys.readouterr().out.count("single, busy") == 3


def test_ready_is_measured_without_and_with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    start = server.running

    def recorded(
        options: Mapping[str, Any], *, command: Sequence[str], environment: Mapping[str, str]
    ) -> AbstractContextManager[server.Server]:
        cache = Path(environment["XDG_CACHE_HOME"])
        seen.append([path.name for path in cache.iterdir()])
        (cache / f"kernels-{len(seen)}").touch()
        return start(options, command=command, environment=environment)

    monkeypatch.setattr(server, "running", recorded)
    times = server.ready_times({"max_num_seqs": 4}, FAKE_SERVER)
    assert seen == [[], ["kernels-1"]]
    assert all(0.05 < seconds < 60 for seconds in times)


def test_a_server_that_does_not_start_is_named() -> None:
    with (
        pytest.raises(RuntimeError, match=r"did not become ready(.|\n)*--max-num-seqs"),
        server.running({"max_num_seqs": 0}, command=FAKE_SERVER),
    ):
        pass


# The command


def test_everything_runs_and_the_figures_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    monkeypatch.setattr(server, "ready_times", lambda options: (20.0, 3.0))
    with running_server() as peer:
        model = ["--model", str(cached_checkpoint("llama")), "--dtype", "float32", "--threads", "1"]
        against = ["--compare-url", peer.url, "--compare-protocol", "native", "--compare-pid", str(peer.process.pid)]
        what = ["--workloads", "single,batch,long,ready", "--json", str(file)]
        assert bench_serving.main(["--quick", *model, *against, *what]) == 0
    found = json.loads(file.read_text())
    assert set(found) == {"machine", "settings", "workloads", "ready"}
    assert set(found["workloads"]) == {"single", "batch", "long"}
    for workload in found["workloads"].values():
        assert list(workload["contenders"]) == list(bench_serving.CONTENDERS)
        for contender in workload["contenders"].values():
            speed = contender["figures"]["tokens_per_s"]
            assert 0 < speed["min"] <= speed["median"] <= speed["max"]
            assert len(contender["rounds"]) == len(contender["foreign_cores"]) == len(contender["load"]) == 1
        for name in ("engine / transformers", "engine / peer", "http / engine", "http-stream / peer-stream"):
            assert workload["ratios"][name]["tokens_per_s"]["median"] > 0
    single = found["workloads"]["single"]
    assert (single["prompts"], single["prompt_tokens"], single["output_tokens"]) == (1, 8, 4)
    assert {"first_token_ms", "decode_tokens_per_s"} <= set(single["contenders"]["engine"]["figures"])
    assert found["workloads"]["long"]["contenders"]["transformers"]["figures"]["first_token_ms"]["median"] > 0
    assert found["ready"]["cached_s"]["median"] == 3.0
    output = capsys.readouterr().out
    assert output.count(" round 1 ") == 3 * len(bench_serving.CONTENDERS)
    assert "engine / transformers" in output and "seconds until ready" in output


def test_an_idle_server_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    monkeypatch.setattr(server, "running", partial(server.running, command=FAKE_SERVER))
    model = ["--model", str(cached_checkpoint("llama"))]
    assert bench_serving.main(["--quick", *model, "--workloads", "idle", "--json", str(file)]) == 0
    idle = json.loads(file.read_text())["idle"]
    assert idle["seconds"] == 0.5
    assert 0 <= idle["cores"] < 0.5
    assert "an idle server used" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--compare-url", "http://127.0.0.1:9"], "--compare-pid is needed"),
        (["--compare-url", "ftp://example.org"], "--compare-url must be like"),
        (["--output-len", "1"], "--output-len must be at least 2"),
        (["--contenders", "engine,other"], "other unknown; there are engine"),
        (["--pairs", "0"], "must be an integer of at least 1, got 0"),
    ],
    ids=["no pid", "no http", "one token", "unknown", "no rounds"],
)
def test_mistakes_are_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_serving.main(words)
    assert message in capsys.readouterr().err


def test_serve_is_where_it_is_looked_for() -> None:
    assert Path(server.SERVE[0]) == ROOT / "scripts" / "serve"
    assert Path(server.SERVE[0]).exists()
