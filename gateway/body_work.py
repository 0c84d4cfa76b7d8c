"""Where request bodies are worked on, so that neither the event loop nor small ones wait for large ones.

Gateway process. Knows nothing of what is done with them.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

from transom.gateway.admission import Caller

T = TypeVar("T")

_INLINE_BYTES = 8 * 1024  # smaller bodies cost less to work on than to hand to a thread
_LARGE_BYTES = 64 * 1024


class BodyWork:
    """Threads for bodies, by size. They end with it."""

    def __init__(self) -> None:
        # A parser keeps the interpreter for as long as it takes: the event loop gets it back between two of
        # them, from one thread soon, from many only when they have all had their turn.
        self._parser = ThreadPoolExecutor(1, "parse")
        self._builders = ThreadPoolExecutor(os.cpu_count() or 1, "build")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def parse(self, caller: Caller, size_bytes: int, work: Callable[[], T]) -> T:
        """Do what takes time for the size of a body and holds the interpreter; large ones in turn.

        One of each caller stands in the queue, so that nobody's many make others wait for more than one.
        """
        if size_bytes <= _LARGE_BYTES:
            return await self._run(self._parser, size_bytes, work)
        turn = self._turns.get(caller.id)
        if turn is None:
            turn = self._turns[caller.id] = asyncio.Lock()
        async with turn:
            return await self._run(self._parser, size_bytes, work)

    async def build(self, size_bytes: int, work: Callable[[], T]) -> T:
        """Do what takes time for what a body holds, mostly without the interpreter."""
        return await self._run(self._builders, size_bytes, work)

    async def _run(self, threads: ThreadPoolExecutor, size_bytes: int, work: Callable[[], T]) -> T:
        if size_bytes <= _INLINE_BYTES:
            return work()
        if size_bytes <= _LARGE_BYTES:
            return await asyncio.to_thread(work)
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(threads, lambda: context.run(work))
