"""Reads several async iterators at once. Knows nothing of what they give."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

Item = TypeVar("Item")


async def merged(sources: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """What they give, in the order in which it comes, until all have ended. The first error of any of them ends all."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as only:
            async for item in only:
                yield item
        return
    queue: asyncio.Queue[tuple[int, list[Item]]] = asyncio.Queue()
    tasks = [asyncio.create_task(_read(source, index, queue)) for index, source in enumerate(sources)]
    num_open = len(tasks)
    try:
        while num_open:
            index, items = await queue.get()
            if items:
                yield items[0]
            else:
                num_open -= 1
                await tasks[index]  # raises what its source has raised
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _read(source: AsyncGenerator[Item, None], index: int, queue: asyncio.Queue[tuple[int, list[Item]]]) -> None:
    """Puts what a source gives into the queue, one by one, and nothing at its end."""
    try:
        async with aclosing(source) as items:
            async for item in items:
                queue.put_nowait((index, [item]))
    finally:
        queue.put_nowait((index, []))
