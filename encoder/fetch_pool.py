"""The fetch workers of an encoder: who downloads what, and what becomes of it when one ends.

Encoder process (front), event loop. What a worker's end left undone is downloaded again: by another worker if
it was ended from outside, else as a suspect (fetch_trials), so that no neighbour pays.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from transom.encoder import fetch_wire as wire
from transom.encoder.fetch import FetchLimits, check_length
from transom.encoder.fetch_process import Download, FetchProcess, LostError
from transom.encoder.fetch_trials import Trials
from transom.encoder.gate import Signal
from transom.encoder.known_urls import Validator
from transom.encoder.ranks.policy import is_crash
from transom.errors import UnavailableError
from transom.log import QUIET
from transom.supervisor import describe_exit

logger = logging.getLogger(__name__)

# Importing takes a minute on a machine that is busy enough; a worker that dies is noticed at once.
_START_TIMEOUT_S = 300.0
_STABLE_S = 10.0
_MAX_BACKOFF_S = 5.0
_COMMON_TRIES = 2  # of an item whose worker was ended from outside


class FetchPool:
    """Downloads under limits. A worker that keeps an item longer than all limits and `grace_s` is ended."""

    def __init__(
        self,
        limits: FetchLimits,
        *,
        workers: int,
        grace_s: float = 5.0,
        log: Sequence[str] = QUIET,
    ) -> None:
        self._limits = limits
        self._encoded = wire.encode_limits(limits)
        self._count = workers
        self._grace_s = grace_s
        self._slots = asyncio.Semaphore(limits.concurrency)
        self._log = log
        self._trials = Trials(self._start_process, limits.total_s, grace_s)
        self._workers: list[FetchProcess] = []
        self._changed = Signal()
        self._tasks: set[asyncio.Task[None]] = set()
        self._backoff_s = 0.0
        self._over = asyncio.Event()
        self.crashes = 0

    async def start(self) -> None:
        """Start all workers; raise ConfigError when the settings can't be used."""
        for _ in range(self._count):
            self._spawn()
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                for worker in list(self._workers):
                    await asyncio.shield(worker.ready)
        except TimeoutError:
            raise UnavailableError("no fetch worker could be started: see the log") from None

    @property
    def pids(self) -> list[int]:
        """Process ids of the running workers, those of trials among them."""
        return [worker.process.pid for worker in (*self._workers, *self._trials.workers)]

    @property
    def running(self) -> int:
        """The number of downloads under way."""
        return sum(len(worker.pending) for worker in (*self._workers, *self._trials.workers))

    async def fetch(self, url: str, known: Validator | None = None) -> Download | None:
        """Return what is at a URL; None when its server says that it is still what `known` names.

        Raise MediaError that says what forbade or ended it, TransomError when workers were ended otherwise.
        """
        check_length(url)
        async with self._slots:
            company = 1
            for _ in range(_COMMON_TRIES):
                worker = await self._least_busy()
                try:
                    return await worker.fetch_within(url, known, self._limits.total_s, self._grace_s)
                except LostError as lost:
                    company = lost.company
                    if is_crash(lost.exit_code):
                        break  # by one of those that it was downloading
            return await self._trials.fetch(url, known, company)

    async def _least_busy(self) -> FetchProcess:
        while not (alive := [worker for worker in self._workers if not worker.ended.is_set()]):
            await self._changed.wait()
        return min(alive, key=lambda worker: len(worker.pending))

    def _start_process(self) -> FetchProcess:
        return FetchProcess(self._encoded, self._log)

    def _spawn(self) -> None:
        worker = self._start_process()
        self._workers.append(worker)
        self._track(self._keep(worker))
        self._changed.set()

    async def _keep(self, worker: FetchProcess) -> None:
        """Wait for a worker's end and start another in its place."""
        started_s = time.monotonic()
        await worker.ended.wait()
        code = await worker.reap()
        self._workers.remove(worker)
        if self._over.is_set():
            return
        logger.warning("fetch worker %d ended (%s) and is replaced", worker.process.pid, describe_exit(code))
        self.crashes += 1
        # Workers that can't even start must not be started in a tight loop.
        if time.monotonic() - started_s > _STABLE_S:
            self._backoff_s = 0.0
        wait_s, self._backoff_s = self._backoff_s, min(_MAX_BACKOFF_S, 2 * self._backoff_s + 0.1)
        try:
            async with asyncio.timeout(wait_s):
                await self._over.wait()
        except TimeoutError:
            self._spawn()

    def _track(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End all workers; downloads that are left fail."""
        self._over.set()
        for worker in self._workers:
            worker.kill()
        await self._trials.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
