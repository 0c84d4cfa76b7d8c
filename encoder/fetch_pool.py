"""The fetch workers of an encoder: their processes, what each is downloading, and what becomes of it.

Encoder process (front), event loop. What a worker's end left undone is downloaded again: by another worker if
it was ended from outside, else each item by a process that has nothing else, so that no neighbour pays.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from transom.encoder import fetch_wire as wire
from transom.encoder.fetch import FetchLimits, check_length
from transom.encoder.gate import Signal
from transom.encoder.known_urls import Validator
from transom.encoder.media.wire import MemoryFile
from transom.encoder.outbox import Outbox
from transom.encoder.ranks.policy import is_crash
from transom.errors import ConfigError, MediaError, TransomError, UnavailableError
from transom.supervisor import describe_exit

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0
_END_S = 2.0
_STABLE_S = 10.0
_MAX_BACKOFF_S = 5.0
_COMMON_TRIES = 2  # of an item whose worker was ended from outside
_TRIALS = 4  # at a time
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Download:
    """What a URL gave, and how to ask next time whether it changed. The file is the receiver's to close."""

    file: MemoryFile
    validator: Validator | None


class _LostError(Exception):
    """The worker ended before it answered."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class _Worker:
    """One fetch process. `ended` is set when its socket has closed; then it must be reaped."""

    def __init__(self, limits: bytes) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "transom.encoder.fetch_worker"]
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        loop = asyncio.get_running_loop()
        self.pending: dict[int, asyncio.Future[Download | None]] = {}
        self.ready: asyncio.Future[None] = loop.create_future()
        self.ended = asyncio.Event()
        self._sock = ours
        self._sock.setblocking(False)
        self._outbox: Outbox[wire.Order] = Outbox(ours, wire.send)
        self._loop = loop
        loop.add_reader(ours.fileno(), self._readable)
        file = MemoryFile.of(limits)
        self._outbox.put(wire.Start(), file)
        file.close()

    async def fetch(self, url: str, known: Validator | None) -> Download | None:
        """Have one URL downloaded; raise _LostError when the process ends first."""
        number = next(_numbers)
        future: asyncio.Future[Download | None] = self._loop.create_future()
        self.pending[number] = future
        self._outbox.put(wire.Fetch(number=number, url=url, known=known))
        try:
            return await future
        except asyncio.CancelledError:
            if not future.done() or future.cancelled():
                self._outbox.put(wire.Cancel(number))
            elif future.exception() is None and (download := future.result()) is not None:
                download.file.close()  # it came at the very moment
            raise
        finally:
            self.pending.pop(number, None)

    def _readable(self) -> None:
        try:
            while not self.ended.is_set():
                self._take(*wire.receive_answer(self._sock))
        except BlockingIOError:
            return
        except Exception as error:
            if not isinstance(error, (EOFError, OSError)):
                logger.warning("fetch worker %d broke its protocol: %s", self.process.pid, error)
            self.close()

    def _take(self, answer: wire.Answer, fd: int | None) -> None:
        if isinstance(answer, wire.Ready):
            self.ready.set_result(None)
        elif isinstance(answer, wire.Unready):
            self._refuse(ConfigError(answer.message))
        else:
            self._settle(answer, fd)

    def _refuse(self, error: TransomError) -> None:
        self.ready.set_exception(error)
        self.ready.exception()  # seen: nobody waits for a worker that was started again

    def _settle(self, answer: wire.Got | wire.Unchanged | wire.Failed, fd: int | None) -> None:
        file = None if fd is None else MemoryFile.adopt(fd)
        future = self.pending.get(answer.number)
        if future is None or future.done():
            if file is not None:
                file.close()
        elif isinstance(answer, wire.Got):
            if file is None:
                raise ValueError("a download without its bytes")
            try:
                file.map_sealed(answer.size_bytes)
            except BaseException:
                file.close()
                raise
            future.set_result(Download(file, answer.validator))
        elif isinstance(answer, wire.Unchanged):
            future.set_result(None)
        elif answer.is_media:
            future.set_exception(MediaError(answer.message))
        else:
            future.set_exception(TransomError(f"the encoder failed on this item ({answer.message})"))

    def close(self) -> None:
        """Hang up: the process ends."""
        if not self.ended.is_set():
            self._loop.remove_reader(self._sock.fileno())
            self._outbox.close()
            self._sock.close()
            self.ended.set()

    async def reap(self) -> int:
        """Once it has ended: release the process, tell who waits; return the exit code."""
        code = await asyncio.to_thread(self._wait)
        for future in self.pending.values():
            if not future.done():
                future.set_exception(_LostError(code))
        if not self.ready.done():
            self._refuse(UnavailableError(f"a fetch worker ended at its start ({describe_exit(code)})"))
        return code

    def _wait(self) -> int:
        try:
            # It has closed its socket: it is ending, and its own exit code says why.
            return self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class FetchPool:
    """Downloads under limits. A worker that keeps an item longer than all limits and `grace_s` is ended."""

    def __init__(self, limits: FetchLimits, *, workers: int, grace_s: float = 5.0) -> None:
        self._limits = limits
        self._encoded = wire.encode_limits(limits)
        self._count = workers
        self._patience_s = limits.total_s + grace_s
        self._slots = asyncio.Semaphore(limits.concurrency)
        self._trials = asyncio.Semaphore(_TRIALS)
        self._workers: list[_Worker] = []
        self._alone: set[_Worker] = set()
        self._spare: list[_Worker] = []  # of those, while there are further suspects
        self._suspects = 0
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
        """Process ids of the running workers, those that have one item alone among them."""
        return [worker.process.pid for worker in (*self._workers, *self._alone)]

    @property
    def running(self) -> int:
        """The number of downloads under way."""
        return sum(len(worker.pending) for worker in (*self._workers, *self._alone))

    async def fetch(self, url: str, known: Validator | None = None) -> Download | None:
        """Return what is at a URL; None when its server says that it is still what `known` names.

        Raise MediaError that says what forbade or ended it, TransomError when workers were ended otherwise.
        """
        check_length(url)
        async with self._slots:
            for _ in range(_COMMON_TRIES):
                try:
                    return await self._within(await self._least_busy(), url, known)
                except _LostError as lost:
                    if is_crash(lost.exit_code):
                        break  # by one of those that it was downloading
            self._suspects += 1
            try:
                async with self._trials:
                    return await self._by_itself(url, known)
            finally:
                self._suspects -= 1
                while self._spare and not self._suspects:
                    self._spare.pop().close()

    async def _within(self, worker: _Worker, url: str, known: Validator | None) -> Download | None:
        try:
            async with asyncio.timeout(self._patience_s):
                return await worker.fetch(url, known)
        except TimeoutError:
            worker.process.kill()  # it has limits of its own, and does not keep to them
            raise MediaError(f"download of the URL took over {self._limits.total_s:g} s, the limit") from None

    async def _least_busy(self) -> _Worker:
        while not (alive := [worker for worker in self._workers if not worker.ended.is_set()]):
            await self._changed.wait()
        return min(alive, key=lambda worker: len(worker.pending))

    async def _by_itself(self, url: str, known: Validator | None) -> Download | None:
        """Download in a process that has nothing else to do."""
        worker = self._spare_or_new()
        is_sound = False
        try:
            download = await self._within(worker, url, known)
            is_sound = True
            return download
        except MediaError:
            is_sound = True
            raise
        except _LostError as lost:
            how = describe_exit(lost.exit_code)
            if is_crash(lost.exit_code):
                raise MediaError(f"the download crashed on this item ({how})") from None
            raise TransomError(f"the processes that downloaded this item were ended ({how})") from None
        finally:
            if is_sound and not worker.ended.is_set():
                self._spare.append(worker)
            else:
                worker.close()

    def _spare_or_new(self) -> _Worker:
        while self._spare:
            worker = self._spare.pop()
            if not worker.ended.is_set():
                return worker
        worker = _Worker(self._encoded)
        self._alone.add(worker)
        self._track(self._bury(worker))
        return worker

    async def _bury(self, worker: _Worker) -> None:
        await worker.ended.wait()
        await worker.reap()
        self._alone.discard(worker)

    def _spawn(self) -> None:
        worker = _Worker(self._encoded)
        self._workers.append(worker)
        self._track(self._keep(worker))
        self._changed.set()

    async def _keep(self, worker: _Worker) -> None:
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
        for worker in (*self._workers, *self._alone):
            worker.process.kill()
            worker.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
