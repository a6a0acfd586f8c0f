"""`/metrics` tells exactly what was done: the real HTTP surface and engine in this process, on an executor of fakes."""

from __future__ import annotations

import asyncio
import io
import json
import re
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.helpers.byte_tokenizer import ByteTokenizer
from tests.helpers.doors import NATIVE, OPENAI, Door
from tests.helpers.engine_fakes import FakeExecutor, make_engine
from tests.helpers.fake_server import FakeModel
from tests.helpers.server import sample_name
from vllm_lite.config import EngineConfig, ServerConfig
from vllm_lite.engine.async_llm_engine import AsyncLLMEngine
from vllm_lite.engine.llm_engine import LLMEngine
from vllm_lite.engine.sequence import Request
from vllm_lite.engine.statistics import BOUNDS_S
from vllm_lite.engine.step import StepInput, StepOutput
from vllm_lite.entrypoints.native.routes import make_native_app
from vllm_lite.entrypoints.openai.program import make_openai_app
from vllm_lite.entrypoints.refusals import STATUSES
from vllm_lite.entrypoints.request_service import RequestService, ServerState

README = (Path(__file__).parents[2] / "README.md").read_text()
PATIENCE_S = 20.0
POISON = ByteTokenizer().encode("!")[0]
ANY_TOKEN = list(range(258))
PROMPT = "x" * 20
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
HISTOGRAMS = {
    "request_queue_time_seconds",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "step_time_seconds",
}


class Executor(FakeExecutor):
    """Waits at a gate where the test closes it, and raises for a prompt with an exclamation mark."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = threading.Event()
        self.may_end.set()
        self.is_broken = False

    def execute(self, step: StepInput) -> StepOutput:
        assert self.may_end.wait(PATIENCE_S)
        if self.is_broken:
            raise RuntimeError("the device is gone")
        if POISON in step.token_ids and step.shape.max_query_len > 1:
            raise RuntimeError("the device is on fire")
        return super().execute(step)


class Service:
    """A server and its client."""

    def __init__(
        self, client: TestClient[Any, Any], engine: AsyncLLMEngine, executor: Executor, key: str | None, path: str
    ) -> None:
        self.executor = executor
        self.path = path
        self.engine = engine
        self.key = {"Authorization": f"Bearer {key}"}
        self._client = client

    async def post(self, fields: dict[str, Any]) -> int:
        async with self._client.post(self.path, json={**GREEDY, **fields}) as response:
            await response.read()
            return response.status

    async def ask(
        self, method: str, headers: dict[str, str], body: bytes | io.BytesIO | None = None, path: str | None = None
    ) -> int:
        async with self._client.request(method, path or self.path, data=body, headers=headers) as response:
            await response.read()
            return response.status

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self._client.port)

    async def refused(self) -> dict[str, float]:
        """The counts that are not 0, by status."""
        counts = {sample.labels.get("status", ""): sample.value for sample in await self.samples()}
        return {status: count for status, count in counts.items() if status and count}

    async def text(self) -> str:
        async with self._client.get("/metrics", headers=self.key) as response:
            return await response.text()

    async def samples(self) -> list[Sample]:
        families = text_string_to_metric_families(await self.text())
        return [sample for family in families for sample in family.samples]

    async def metrics(self) -> dict[str, float]:
        return {sample_name(sample): sample.value for sample in await self.samples()}


@asynccontextmanager
async def running(
    door: Door = NATIVE,
    model_name: str = "tiny",
    state: ServerState | None = None,
    llm_engine: LLMEngine | None = None,
    **config: Any,
) -> AsyncGenerator[Service, None]:
    executor = Executor()
    engine = AsyncLLMEngine(llm_engine or make_engine(), executor)
    service = RequestService(
        FakeModel(engine, model_name), state or ServerState(), EngineConfig(), ServerConfig(**config)
    )
    server = TestServer((make_native_app if door is NATIVE else make_openai_app)(service))
    await server.start_server()
    engine.start()
    async with TestClient(server) as client:
        yield Service(client, engine, executor, config.get("api_key"), door.path)
    await engine.stop()


async def wait_until(condition: Callable[[], bool]) -> None:
    async def poll() -> None:
        while not condition():
            await asyncio.sleep(0.001)

    await asyncio.wait_for(poll(), PATIENCE_S)


async def leave_in_mid_step(service: Service) -> None:
    """A client that closes its connection while its request is computed."""
    service.executor.may_end.clear()
    client = asyncio.create_task(service.post({"prompt": "leaves", "max_tokens": 50}))
    await wait_until(lambda: service.engine.stats().num_running == 1)
    client.cancel()
    await wait_until(lambda: service.engine.stats().num_aborted == 1)
    service.executor.may_end.set()
    await wait_until(lambda: service.engine.stats().num_running == 0)


async def test_every_request_is_counted_as_what_became_of_it(door: Door) -> None:
    async with running(door) as service:
        assert await service.post({"prompt": PROMPT, "max_tokens": 5}) == 200
        assert await service.post({"prompt": PROMPT, "max_tokens": 7, "stream": True}) == 200
        assert await service.post({"prompt": "stop", "max_tokens": 7, "stop_token_ids": ANY_TOKEN}) == 200
        assert await service.post({"prompt": "many", "max_tokens": 3, "n": 4, "temperature": 1}) == 200
        assert await service.post({"prompt": "fails!"}) == 500
        assert await service.post({"prompt": "fails!", "stream": True}) == 500
        await leave_in_mid_step(service)
        for refused in ({}, {"prompt": "x", "top_p": 7}, {"prompt": ""}, {"prompt": "x" * 600}, {"prompt": 7}):
            assert await service.post(refused) == 400
        metrics = await service.metrics()
    expected = {
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0,
        "num_free_kv_blocks": 200,
        "num_total_kv_blocks": 200,
        "num_preemptions_total": 0,
        "num_requests_accepted_total": 7,
        'num_requests_refused_total{status="400"}': 5,
        **{f'num_requests_refused_total{{status="{status}"}}': 0 for status in STATUSES if status != 400},
        'request_success_total{finished_reason="length"}': 3,
        'request_success_total{finished_reason="stop"}': 1,
        "num_requests_failed_total": 2,
        "num_requests_aborted_total": 1,
        "prompt_tokens_total": 20 + 20 + 4 + 4,
        "generation_tokens_total": 5 + 7 + 1 + 4 * 3,
        "prefix_cache_queries_total": 20 + 20 + 4 + 4 + 6 + 6 + 6,
        "prefix_cache_hits_total": 16,
        "request_queue_time_seconds_count": 7,
        "time_to_first_token_seconds_count": 4,
        "inter_token_latency_seconds_count": 4 + 6 + 0 + 2,
        "e2e_request_latency_seconds_count": 4,
        'step_time_seconds_count{phase="schedule"}': 5 + 7 + 1 + 3 + 2 + 1,
        'step_time_seconds_count{phase="execute"}': 5 + 7 + 1 + 3 + 2 + 1,
        'step_time_seconds_count{phase="postprocess"}': 5 + 7 + 1 + 3 + 1,
    }
    assert {name: value for name, value in metrics.items() if "_bucket" not in name and "_sum" not in name} == expected


async def test_every_refusal_is_counted_once_by_its_status(door: Door) -> None:
    state = ServerState()
    async with running(door, state=state, api_key="key", max_body_mib=1, request_timeout_s=0.2) as service:
        key = service.key
        body = json.dumps({"prompt": PROMPT, "max_tokens": 2, **GREEDY}).encode()
        assert await service.ask("POST", key, body) == 200
        assert await service.ask("POST", {}, body) == 401
        assert await service.ask("POST", key | {"Origin": "http://page.example"}, body) == 403
        assert await service.ask("GET", key) == 405
        assert await service.ask("POST", key, b"[]") == 400
        assert await service.ask("POST", key, b"{") == 400
        assert await service.ask("POST", key, io.BytesIO(b" " * 2**20 + body)) == 413
        state.is_stopping = True
        assert await service.ask("POST", key, body) == 503
        state.is_stopping = False
        counts = {sample_name(sample): sample.value for sample in await service.samples()}
        assert await service.refused() == {"400": 2, "401": 1, "403": 1, "405": 1, "413": 1, "503": 1}
    assert counts["num_requests_accepted_total"] == 1


async def test_preflights_and_other_paths_are_no_refusals(door: Door) -> None:
    async with running(door, allowed_origins=("http://page.example",)) as service:
        page = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST"}
        assert await service.ask("OPTIONS", page) == 204
        assert await service.ask("GET", {}, path="/nothing") == 404
        assert await service.refused() == {}


@pytest.mark.parametrize("time_limit_s", [None, 600.0])
async def test_clients_that_leave_before_their_request_is_queued_are_counted(
    door: Door, time_limit_s: float | None
) -> None:
    async with running(door, request_timeout_s=time_limit_s) as service:
        _, writer = await service.connect()
        writer.write(b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{" % door.path.encode())
        await writer.drain()
        assert await service.post({"prompt": PROMPT, "max_tokens": 1}) == 200  # the other one has been seen by now
        writer.close()
        await leave_in_mid_step(service)
        assert await service.refused() == {"499": 1}
        assert (await service.metrics())["num_requests_accepted_total"] == 2


@pytest.mark.parametrize(
    "door, fields",
    [
        (NATIVE, {}),
        (NATIVE, {"stream": True}),
        (NATIVE, {"stream": True, "details": True}),
        (OPENAI, {}),
        (OPENAI, {"stream": True}),
        (OPENAI, {"prompt": ["a", "b"]}),
    ],
)
async def test_what_ends_while_it_is_tokenised_is_refused(
    door: Door, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm_engine, is_over = make_engine(), threading.Event()
    prepare = llm_engine.prepare

    def prepare_late(*arguments: Any, **keywords: Any) -> Request:
        assert is_over.wait(PATIENCE_S)
        return prepare(*arguments, **keywords)

    monkeypatch.setattr(llm_engine, "prepare", prepare_late)
    monkeypatch.setattr(llm_engine, "quick_size", lambda *_: None)
    async with running(door, llm_engine=llm_engine, request_timeout_s=0.05) as service:
        abort = service.engine.abort

        def abort_and_go_on(request_id: str) -> None:
            abort(request_id)
            is_over.set()

        monkeypatch.setattr(service.engine, "abort", abort_and_go_on)  # what the time limit does
        client = asyncio.create_task(service.post({"prompt": PROMPT, "max_tokens": 2, **fields}))
        assert await client == 504
        assert await service.refused() == {"504": 1}
        assert (await service.metrics())["num_requests_accepted_total"] == 0


async def test_a_full_queue_and_a_dead_engine_refuse_what_they_did_not_accept(door: Door) -> None:
    async with running(door, max_waiting_requests=1) as service:
        service.executor.may_end.clear()
        first = asyncio.create_task(service.post({"prompt": "a", "max_tokens": 2}))
        await wait_until(lambda: service.engine.stats().num_running == 1)
        service.executor.is_broken = True
        second = asyncio.create_task(service.post({"prompt": "b", "max_tokens": 2}))
        await wait_until(lambda: service.engine.stats().num_waiting == 1)
        assert await service.post({"prompt": "c"}) == 503
        service.executor.may_end.set()
        assert [await first, await second, await service.post({"prompt": "d"})] == [500, 500, 500]
        assert await service.post({"prompt": "e"}) == 503
        assert await service.refused() == {"503": 2}
        metrics = await service.metrics()
        assert metrics["num_requests_accepted_total"] == metrics["num_requests_failed_total"] == 3


@pytest.mark.parametrize("is_stream", [False, True])
async def test_each_prompt_of_a_list_is_counted_as_a_request(is_stream: bool) -> None:
    async with running(OPENAI) as service:
        assert await service.post({"prompt": ["a", "bc", "def"], "max_tokens": 5, "n": 2, "temperature": 1}) == 200
        metrics = await service.metrics()
        assert metrics["num_requests_accepted_total"] == metrics['request_success_total{finished_reason="length"}'] == 3
        assert metrics["prompt_tokens_total"] == 1 + 2 + 3
        assert metrics["generation_tokens_total"] == 3 * 2 * 5
        assert await service.post({"prompt": ["a", "fails!"], "max_tokens": 50, "stream": is_stream}) == 500
        metrics = await service.metrics()
        assert metrics["num_requests_accepted_total"] == 3 + 2
        assert metrics["num_requests_failed_total"] + metrics["num_requests_aborted_total"] == 2
        assert await service.refused() == {}


async def test_a_list_of_which_nothing_was_queued_is_one_refused_request() -> None:
    async with running(OPENAI, max_waiting_requests=4) as service:
        assert await service.post({"prompt": ["a", 7]}) == 400
        assert await service.post({"prompt": ["x" * 600, "x" * 700]}) == 400
        service.executor.may_end.clear()
        first = asyncio.create_task(service.post({"prompt": ["a", "b", "c"], "max_tokens": 2}))
        await wait_until(lambda: service.engine.stats().num_accepted == 3)
        assert await service.post({"prompt": ["a"] * 5}) == 400
        assert await service.refused() == {"400": 3}
        service.executor.may_end.set()
        assert await first == 200


async def test_what_was_queued_of_a_list_with_a_mistake_is_aborted() -> None:
    """The list is refused whole, and every one of its prompts is counted at most once."""
    async with running(OPENAI) as service:
        service.executor.may_end.clear()
        refused = asyncio.create_task(service.post({"prompt": ["a", "x" * 600, "b"], "max_tokens": 5}))
        assert await asyncio.wait_for(refused, PATIENCE_S) == 400
        service.executor.may_end.set()
        await wait_until(lambda: service.engine.stats().num_running == 0)
        metrics = await service.metrics()
        num_accepted = metrics["num_requests_accepted_total"]
        assert metrics["num_requests_aborted_total"] == num_accepted <= 2
        assert await service.refused() == ({} if num_accepted else {"400": 1})


async def test_gauges_tell_what_happens_now() -> None:
    async with running() as service:
        service.executor.may_end.clear()
        clients = [asyncio.create_task(service.post({"prompt": PROMPT, "max_tokens": 2})) for _ in range(65)]
        await wait_until(lambda: service.engine.stats().num_accepted == 65)
        metrics = await service.metrics()
        num_running = metrics["num_requests_running"]
        assert num_running > 0 and num_running + metrics["num_requests_waiting"] == 65
        assert 0 < metrics["kv_cache_usage_perc"] == 1 - metrics["num_free_kv_blocks"] / 200
        service.executor.may_end.set()
        assert await asyncio.gather(*clients) == [200] * 65
        metrics = await service.metrics()
        assert metrics["num_requests_running"] == metrics["num_requests_waiting"] == metrics["kv_cache_usage_perc"] == 0


async def test_histograms_are_cumulative_and_agree_with_their_counts() -> None:
    async with running() as service:
        for _ in range(3):
            assert await service.post({"prompt": PROMPT, "max_tokens": 4}) == 200
        samples = await service.samples()
        metrics = {sample_name(sample): sample.value for sample in samples}
    buckets: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for sample in samples:
        if sample.name.endswith("_bucket"):
            name = sample.name.removeprefix("vllm_lite:").removesuffix("_bucket")
            buckets.setdefault((name, sample.labels.get("phase", "")), []).append(
                (float(sample.labels["le"]), sample.value)
            )
    assert {name for name, _ in buckets} == HISTOGRAMS
    for (name, phase), pairs in buckets.items():
        label = f'{{phase="{phase}"}}' if phase else ""
        counts = [count for _, count in pairs]
        assert [bound for bound, _ in pairs] == [*BOUNDS_S, float("inf")]
        assert counts == sorted(counts) and counts[-1] == metrics[f"{name}_count{label}"] > 0
        assert 0 < metrics[f"{name}_sum{label}"] < PATIENCE_S


async def test_labels_name_the_model_and_do_not_grow() -> None:
    async with running() as service:
        before = [(sample.name, sample.labels) for sample in await service.samples()]
        assert {labels["model_name"] for _, labels in before} == {"tiny"}
        for number in range(20):
            await service.post({"prompt": f"{number} x", "max_tokens": 2, "n": 2, "temperature": 1})
            await service.post({"prompt": f"{number}!"})
        assert [(sample.name, sample.labels) for sample in await service.samples()] == before


async def test_any_folder_can_be_the_name_of_a_model() -> None:
    async with running(model_name='/models/\udcff"\n\\') as service:
        assert {sample.labels["model_name"] for sample in await service.samples()} == {'/models/?"\n\\'}


async def test_the_readme_lists_all_metrics_with_their_kinds() -> None:
    async with running() as service:
        kinds = dict(re.findall(r"^# TYPE (\S+) (\w+)$", await service.text(), flags=re.MULTILINE))
    rows = re.findall(r"^\| (`vllm_lite:.*) \| (gauge|counter|histogram)s? \|", README, flags=re.MULTILINE)
    assert kinds == {name: kind for names, kind in rows for name in re.findall(r"`(vllm_lite:\w+)", names)}
