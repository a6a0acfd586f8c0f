"""Reading many sources at once: in turn with everything else on the event loop, however many they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from vllm_lite.entrypoints.openai.merged import GROUP, merged

NUM_SOURCES = 20 * GROUP


class Sources:
    """As many sources, and how many of them began or ended between two turns of another task."""

    def __init__(self) -> None:
        self._num_events = 0
        self.most_begun = 0
        self.most_ended = 0
        self.is_ending = False

    async def source(self, number: int, *, waits: bool) -> AsyncGenerator[int, None]:
        self._num_events += 1
        try:
            if waits and number:
                await asyncio.Event().wait()
            yield number
        finally:
            self._num_events += self.is_ending

    async def watch(self) -> None:
        while True:
            num, self._num_events = self._num_events, 0
            if self.is_ending:
                self.most_ended = max(self.most_ended, num)
            else:
                self.most_begun = max(self.most_begun, num)
            await asyncio.sleep(0)


def test_thousands_begin_and_end_in_turn_with_others() -> None:
    async def run() -> Sources:
        sources = Sources()
        watcher = asyncio.create_task(sources.watch())
        async with aclosing(merged([sources.source(number, waits=True) for number in range(NUM_SOURCES)])) as items:
            assert await anext(items) == 0
            await asyncio.sleep(0)
            sources.is_ending = True
        watcher.cancel()
        return sources

    sources = asyncio.run(run())
    assert 0 < sources.most_begun <= 2 * GROUP
    assert 0 < sources.most_ended <= 2 * GROUP


def test_all_items_come_and_an_error_ends_all() -> None:
    async def broken() -> AsyncGenerator[int, None]:
        yield -1
        raise LookupError("broken")

    async def run() -> None:
        sources = Sources()
        every = [sources.source(number, waits=False) for number in range(NUM_SOURCES)]
        assert sorted([item async for item in merged(every)]) == list(range(NUM_SOURCES))
        waiting = [sources.source(number, waits=True) for number in range(1, GROUP)]
        with pytest.raises(LookupError, match="broken"):
            assert [item async for item in merged([*waiting, broken()])] == [-1]

    asyncio.run(run())
