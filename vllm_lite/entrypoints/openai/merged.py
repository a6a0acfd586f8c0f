"""Reads several async iterators at once. Knows nothing of what they give."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

Item = TypeVar("Item")

GROUP = 64
"""How many are started or ended before others on the event loop have their turn: thousands would take a second."""


async def merged(sources: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """What they give, in the order in which it comes, until all have ended. The first error of any of them ends all."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as only:
            async for item in only:
                yield item
        return
    queue: asyncio.Queue[tuple[int, list[Item]]] = asyncio.Queue()
    tasks: list[asyncio.Task[None]] = []
    num_open = len(sources)
    try:
        for index, source in enumerate(sources):
            tasks.append(asyncio.create_task(_read(source, index, queue)))
            if len(tasks) % GROUP == 0:
                await asyncio.sleep(0)
        while num_open:
            index, items = await queue.get()
            if items:
                yield items[0]
            else:
                num_open -= 1
                await tasks[index]  # raises what its source has raised
    finally:
        for begin in range(0, len(tasks), GROUP):
            group = tasks[begin : begin + GROUP]
            for task in group:
                task.cancel()
            await asyncio.gather(*group, return_exceptions=True)


async def _read(source: AsyncGenerator[Item, None], index: int, queue: asyncio.Queue[tuple[int, list[Item]]]) -> None:
    """Puts what a source gives into the queue, one by one, and nothing at its end."""
    try:
        async with aclosing(source) as items:
            async for item in items:
                queue.put_nowait((index, [item]))
    finally:
        queue.put_nowait((index, []))
