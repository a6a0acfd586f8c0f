"""The course of a soak: lives of a server one after the other, clients on each, quiet moments in between.

Each answer is checked when it comes; what needs the log is checked at the next quiet moment or at the life's end.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.soak_checks import (
    Solo,
    wrong_counts,
    wrong_counts_under_load,
    wrong_levels,
    wrong_memory,
)
from scripts.soak_client import Client, Result
from scripts.soak_judge import Circumstances, judge, wrong_lines
from scripts.soak_requests import WAYS, Visit, Way, make_pool, make_visit
from scripts.soak_server import Life, LifeOptions, Resources, living, resources

NUM_CLIENTS = 28
BURST_CLIENTS = 48
PLAIN: tuple[Way, ...] = ("read",)
LARGE: tuple[Way, ...] = ("malformed", "too large")
TOO_LONG: tuple[Way, ...] = ("too long",)
STALLING: tuple[Way, ...] = ("stop reading",)
WARM_UP: tuple[tuple[Collection[Way], int], ...] = (
    (LARGE, 60),
    (PLAIN, BURST_CLIENTS),
    (STALLING, 4),
    (WAYS, BURST_CLIENTS),
    *[(TOO_LONG, 2), (PLAIN, 8)] * 6,
)
"""How many clients at once behave in one of these ways, group after group. What a server makes once, and what its
allocator keeps of the largest bodies and streams, is there before memory is watched: it takes a few of them, between
others, until there are gaps that fit. Were they left to chance, a short run would meet its first ones at its end."""
BURST_EVERY_S = (3.0, 6.0)
BACK_OFF_S = 0.2
STALL_S = 4.0
"""How long a client stops reading: longer than the server's patience, SLOW_CLIENT_S."""
SLOW_CLIENT_S = 2
MAIN_SHARE = 0.8
"""Of the time is for the first life, whose memory is watched."""
WARM_UP_SHARE = 0.1
"""Of the first life's load is over when memory is looked at first."""
MAX_QUIET = 9
"""Moments that the first life's load has after that, the last at its end."""
QUIET_EVERY_S = 12.0
"""No more often than that, for clients that do not read keep a quiet moment waiting."""
SHORT_LIFE_S = (1.5, 8.0)
LEAST_LIFE_S = 5.0
"""With less time left no further life begins."""
SCRAPE_EVERY_S = 1.0
SETTLE_S = 10.0
SETTLE_POLL_S = 0.05
BEFORE_STOP_S = (0.5, 2.0)
HOPE_CHECK_S = 0.5
MAX_FINDINGS = 20
MAX_BODY_SHOWN = 2000
LATER_LIVES = (
    LifeOptions("time limit", timeout_s=0.3),
    LifeOptions("little grace", grace_s=0.2),
    LifeOptions("plain"),
)


@dataclass
class Report:
    """What came of it."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By kind and outcome."""
    findings: list[str] = field(default_factory=list)
    lives: list[dict[str, Any]] = field(default_factory=list)
    num_tracebacks: int = 0
    rss_kib: tuple[int, int] = (0, 0)
    """After the first tenth of the longest life's load, and at its end."""
    load_s: float = 0.0
    """Seconds with clients, over all lives."""

    def find(self, finding: str) -> None:
        """Takes a finding; of many the first are kept."""
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(finding)


class Soak:
    """One run."""

    def __init__(self, flags: Sequence[str], seconds: float, seed: int, pool_size: int, log_folder: Path) -> None:
        """`flags` choose and set up the model; logs of lives with findings are copied to `log_folder`."""
        self.report = Report()
        self.seed = seed
        self.solos: dict[int, Solo] = {}
        """By the number of the request in the pool; none of those that are not repeatable."""
        self.pool = make_pool(seed, pool_size)
        self.numbers = itertools.count()
        self._flags = [*flags, "--slow-client-s", str(SLOW_CLIENT_S)]
        self._seconds = seconds
        self._end_s = 0.0
        """When all is over, in monotonic seconds; known when the pool has been answered by an idle server."""
        self._dice = random.Random(f"{seed}/lives")
        self._log_folder = log_folder

    def run(self) -> None:
        """All lives, until the time is over."""
        self._live(LifeOptions("main"), is_main=True)
        for options in itertools.cycle(LATER_LIVES):
            if self._end_s - time.monotonic() < LEAST_LIFE_S or len(self.report.findings) >= MAX_FINDINGS:
                return
            self._live(options, is_main=False)

    def _live(self, options: LifeOptions, *, is_main: bool) -> None:
        num_findings = len(self.report.findings)
        with living(self._flags, options) as life:
            visitors = Visitors(self, life)
            asyncio.run(self._main_life(visitors) if is_main else self._short_life(visitors))
            self.report.num_tracebacks += sum("Traceback" in text for text in life.trouble)
            for text in life.trouble:
                self.report.find(f"{options.name}: the server's log has {text!r}")
            if len(self.report.findings) > num_findings:
                name = f"soak-{self.seed}-{len(self.report.lives)}.log"
                shutil.copy(life.server.log_path, self._log_folder / name)
                self.report.find(f"{options.name}: the server's log is in {name}")
            metrics = {name: value for name, value in visitors.last_metrics.items() if "_bucket" not in name}
            self.report.lives.append({"life": options.name, "samples": life.samples, "metrics": metrics})

    async def _main_life(self, visitors: Visitors) -> None:
        await visitors.ask_alone()
        await visitors.warm_up()
        await visitors.quiet("idle")
        begin_s = time.monotonic()
        self._end_s = begin_s + self._seconds
        load_s = self._seconds * MAIN_SHARE
        num_quiet = max(1, min(MAX_QUIET, int(load_s / QUIET_EVERY_S)))
        for share in (WARM_UP_SHARE + (1 - WARM_UP_SHARE) * k / num_quiet for k in range(num_quiet + 1)):
            await visitors.load_until(begin_s + load_s * share)
            await visitors.quiet(f"{share:.0%}")
        quiet = [sample for sample in visitors.life.samples if sample["at"].endswith("%")]
        self.report.rss_kib = (quiet[0]["rss_kib"], quiet[-1]["rss_kib"]) if quiet else (0, 0)
        for wrong in (
            wrong_memory(*self.report.rss_kib),
            wrong_levels("file descriptors", [sample["num_fds"] for sample in quiet]),
        ):
            if wrong is not None:
                self.report.find(f"main: {wrong}")
        await self._stop(visitors)

    async def _short_life(self, visitors: Visitors) -> None:
        await visitors.load_until(min(time.monotonic() + self._dice.uniform(*SHORT_LIFE_S), self._end_s - LEAST_LIFE_S))
        await visitors.quiet("quiet")
        await self._stop(visitors)

    async def _stop(self, visitors: Visitors) -> None:
        """SIGTERM in the middle of the load."""
        await visitors.load_until(time.monotonic() + self._dice.uniform(*BEFORE_STOP_S), is_left_running=True)
        await visitors.stop()


class Visitors:
    """The clients of one life."""

    def __init__(self, soak: Soak, life: Life) -> None:
        self.life = life
        self.last_metrics: dict[str, float] = {}
        self._soak = soak
        self._report = soak.report
        self._hurry = asyncio.Event()
        self._is_over = False
        """Whether no visit begins any more."""
        self._tasks: list[asyncio.Task[None]] = []
        self._num_sent = 0
        self._num_served = 0
        """Answered to their ends for certain."""
        self._unchecked: list[tuple[Result, str]] = []
        """What visits have come to, whose lines in the log have not been looked at yet."""
        self._idle_fds: int | None = None

    async def ask_alone(self) -> None:
        """Has an idle server answer each request of the pool."""
        client = self._client()
        for asked in self._soak.pool:
            if not asked.is_repeatable:
                continue
            before = self.life.server.metrics()
            visit = Visit(asked.number, "read", asked, False, 0.0, True, asked.body)
            result = await client.make(visit, f"alone-{asked.number}")
            if result.outcome != "answered" or result.status != 200:
                self._find(result, f"alone it was {result.outcome} with {result.status}: {result.body[:500]!r}")
                continue
            after = self.life.server.metrics()
            grown = {
                name for name, value in after.items() if name.startswith("request_success") and value > before[name]
            }
            tokens = [int(after[name] - before[name]) for name in ("prompt_tokens_total", "generation_tokens_total")]
            outcome = "".join(grown).partition('"')[2].rstrip('"}')
            self._soak.solos[asked.number] = Solo(result.body, tokens[0], tokens[1], outcome)
            self._num_sent += 1
            self._num_served += 1
        client.close()

    async def warm_up(self) -> None:
        """Has the server do once all that it will have to do."""
        for ways, number in WARM_UP:
            await self._visit_at_once([self._next_visit(ways) for _ in range(number)])

    async def load_until(self, end_s: float, *, is_left_running: bool = False) -> None:
        """Clients come and go until then, and the last ones have been served, unless they are left running."""
        begin_s = time.monotonic()
        self._is_over = False
        self._hurry.clear()
        self._tasks = [asyncio.create_task(self._visit_again_and_again()) for _ in range(NUM_CLIENTS)]
        self._tasks += [asyncio.create_task(self._burst_now_and_then()), asyncio.create_task(self._watch())]
        while (left_s := end_s - time.monotonic()) > 0 and not self._is_hopeless:
            await asyncio.sleep(min(left_s, HOPE_CHECK_S))
        if not is_left_running:
            await self._end_visits()
        self._report.load_s += time.monotonic() - begin_s

    async def quiet(self, label: str) -> None:
        """Nobody asks: everything must be as at the beginning, and the counters exact."""
        now, is_settled = await self._settle()
        if now is None:
            return
        self.life.note(label, now)
        if not is_settled:
            self._report.find(
                f"{self.life.options.name}, {label}: {SETTLE_S:g} s after the last request there are {now.num_fds} "
                f"file descriptors, {self._idle_fds} when idle; requests: {self.last_metrics['num_requests_running']:g}"
            )
        self._idle_fds = now.num_fds if self._idle_fds is None else self._idle_fds
        self.life.read_log()
        for wrong in wrong_counts(self.last_metrics, self.life.lines):
            self._report.find(f"{self.life.options.name}, {label}: {wrong}")
        self._check_lines()

    async def stop(self) -> None:
        """SIGTERM: those that run are served, new ones are not."""
        begin_s = time.monotonic()
        name = self.life.options.name
        if (code := self.life.server.process.poll()) is not None:
            self._report.find(f"{name}: the server has ended by itself with {code}")
            await self._end_visits()
            return
        self._is_over = True
        self.life.tell_to_stop()
        if not await asyncio.to_thread(self.life.says_that_it_stops):
            self._report.find(f"{name}: the log does not say that the server stops")
        elif await asyncio.to_thread(self.life.takes_new_ones):
            self._report.find(f"{name}: a new connection was served though the server had said that it stops")
        wrong_end = await asyncio.to_thread(self.life.wrong_end)
        await self._end_visits()
        for wrong in wrong_end:
            self._report.find(f"{name}: {wrong}")
        self.life.read_log()
        self._check_lines()
        self._report.load_s += time.monotonic() - begin_s

    def _client(self) -> Client:
        return Client("127.0.0.1", self.life.server.port, self._hurry, STALL_S)

    async def _visit_again_and_again(self) -> None:
        client = self._client()
        while not self._is_over:
            await self._visit(client, self._next_visit(WAYS))
        client.close()

    async def _burst_now_and_then(self) -> None:
        """More clients at once than the server lets wait."""
        dice = random.Random(self._num_sent)
        while not self._is_over:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), dice.uniform(*BURST_EVERY_S))
            if not self._is_over:
                await self._visit_at_once([self._next_visit(PLAIN) for _ in range(BURST_CLIENTS)])

    def _next_visit(self, ways: Collection[Way]) -> Visit:
        return make_visit(self._soak.seed, next(self._soak.numbers), self._soak.pool, ways=ways)

    async def _visit_at_once(self, visits: Sequence[Visit]) -> None:
        await asyncio.gather(*map(self._visit_once, visits))

    async def _visit_once(self, visit: Visit) -> None:
        client = self._client()
        await self._visit(client, visit)
        client.close()

    async def _visit(self, client: Client, visit: Visit) -> None:
        self._num_sent += 1
        result = await client.make(visit, f"visit-{visit.number}")
        outcome, wrong = judge(result, self._soak.solos.get(visit.asked.number), self._circumstances)
        self._num_served += outcome == "right" and visit.asked.is_repeatable and visit.way != "other route"
        kind = visit.asked.kind if visit.way == "read" else visit.way
        self._report.counts[kind, outcome] += 1
        self._unchecked.append((result, outcome))
        if wrong is not None:
            self._find(result, wrong)
        if outcome in ("503", "no connection"):
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), BACK_OFF_S)

    async def _watch(self) -> None:
        """Scrapes the metrics and looks at the process under load."""
        before: dict[str, float] | None = None
        while not self._is_over:
            num_served = self._num_served
            metrics = await self._scrape()
            if metrics is None:
                return
            for wrong in wrong_counts_under_load(before, metrics, num_served, self._num_sent):
                self._report.find(f"{self.life.options.name}, under load: {wrong}")
            before = metrics
            self.life.note("load", resources(self.life.process_id))
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), SCRAPE_EVERY_S)

    async def _scrape(self) -> dict[str, float] | None:
        """None where there is no answer any more, which only one that is stopping may do."""
        try:
            metrics = await asyncio.to_thread(self.life.server.metrics)
        except (OSError, AssertionError) as error:  # the latter where the connection ends before an answer
            if not self.life.is_stopping:
                code = self.life.server.process.poll()
                self._report.find(f"{self.life.options.name}: no /metrics, exit code of the server {code}: {error!r}")
            return None
        return None if self.life.is_stopping else metrics

    @property
    def _is_hopeless(self) -> bool:
        """Whether there is no sense in going on."""
        return self.life.server.process.poll() is not None or len(self._report.findings) >= MAX_FINDINGS

    async def _end_visits(self) -> None:
        self._is_over = True
        self._hurry.set()
        await asyncio.gather(*self._tasks)
        self._tasks = []

    async def _settle(self) -> tuple[Resources | None, bool]:
        """Waits until the server has noticed that all have left; False where it does not in time.

        The metrics come from after the moment when no connection was open any more, so that they have every request.
        Nothing where the server has ended.
        """
        end_s = time.monotonic() + SETTLE_S
        num_fds_before = -1
        while self.life.server.process.poll() is None:
            now = resources(self.life.process_id)
            if (metrics := await self._scrape()) is None:
                break
            self.last_metrics = metrics
            is_idle = not metrics["num_requests_running"] and not metrics["num_requests_waiting"]
            most_fds = num_fds_before if self._idle_fds is None else self._idle_fds
            if is_idle and now.num_fds <= most_fds:
                return now, True
            if time.monotonic() > end_s:
                return now, False
            num_fds_before = now.num_fds
            await asyncio.sleep(SETTLE_POLL_S)  # what clients have left is closed within a step
        return None, False

    def _check_lines(self) -> None:
        """What the log says of each request must fit what its client saw."""
        for result, outcome in self._unchecked:
            solo = self._soak.solos.get(result.visit.asked.number)
            lines = self.life.lines_of.pop(result.request_id, [])
            if (wrong := wrong_lines(result, outcome, solo, lines, self._circumstances)) is not None:
                self._find(result, wrong)
        self._unchecked.clear()

    @property
    def _circumstances(self) -> Circumstances:
        options, is_stopping = self.life.options, self.life.is_stopping
        return Circumstances(options.timeout_s is not None, is_stopping, is_stopping and options.has_little_grace)

    def _find(self, result: Result, wrong: str) -> None:
        visit, body = result.visit, result.visit.body
        shown = repr(body) if len(body) <= MAX_BODY_SHOWN else f"{body[:200]!r}... of {len(body)} bytes"
        self._report.find(
            f"{self.life.options.name}: {result.request_id} of seed {self._soak.seed} ({visit.way}, {visit.asked.kind} "
            f"{visit.asked.number}, {result.outcome} {result.status} after {result.end_s - result.begin_s:.2f} s) "
            f"{wrong}\n  {shown}"
        )
