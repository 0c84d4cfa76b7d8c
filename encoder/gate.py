"""What tasks of one item wait with: a bound on a sum of costs, a signal; and a clock for its stages.

Encoder process, event loop. Knows nothing of what is paid for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from transom.encoder.spans import ItemSpans


@dataclass(slots=True)
class StageClock:
    """Books where an item's time goes, by stage."""

    spans: ItemSpans

    def add(self, what: str, since: float) -> float:
        """Book the time since a monotonic moment; return the present moment."""
        now = time.monotonic()
        self.spans.add(what, since, now)
        return now


class Signal:
    """Wakes all who wait for something to change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        """Wake them."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        """Return after the next change."""
        await self._event.wait()

    async def until(self, is_true: Callable[[], bool]) -> None:
        """Return once something is true; it is asked after every change."""
        while not is_true():
            await self.wait()


async def all_or_none(*work: Coroutine[Any, Any, None]) -> None:
    """Run side by side to the end; the first error ends the others and is raised."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # What is raised from here leads to this frame: it must not lead on to the tasks that raised it.
        tasks.clear()
        del task


class CostGate:
    """A bound on a sum of costs; first come first served; what is above the bound goes alone."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    def hold(self, cost: int) -> Hold:
        """Return an async context manager that holds `cost`."""
        return Hold(self, cost)

    async def acquire(self, cost: int) -> None:
        """Wait until `cost` fits, and hold it."""
        if not self._waiting and self._fits(cost):
            self._held += cost
            return
        entry = (cost, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        try:
            await entry[1]
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
            elif entry[1].done() and not entry[1].cancelled():
                self.release(cost)
            raise

    def _fits(self, cost: int) -> bool:
        return not self._held or self._held + cost <= self._limit

    def release(self, cost: int) -> None:
        """Give `cost` back."""
        self._held -= cost
        while self._waiting and self._fits(self._waiting[0][0]):
            waiting_cost, future = self._waiting.pop(0)
            if not future.done():
                self._held += waiting_cost
                future.set_result(None)


class Hold:
    """A held cost."""

    def __init__(self, gate: CostGate, cost: int) -> None:
        self._gate = gate
        self._cost = cost

    async def __aenter__(self) -> None:
        await self._gate.acquire(self._cost)

    async def __aexit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Give it back."""
        self._gate.release(self._cost)
