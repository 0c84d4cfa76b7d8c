"""The decode workers of an encoder: their processes, who works on what, and what comes back.

Encoder process, event loop. A worker that dies or falls silent fails its item alone and is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from types import TracebackType

from transom.encoder.media import wire
from transom.errors import MediaError, TransomError, UnavailableError
from transom.log import QUIET

logger = logging.getLogger(__name__)

# A decoder that ends so was ended by its input; others may have been ended from outside.
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP)
# Importing takes a minute on a machine that is busy enough; a worker that dies is noticed at once.
_START_TIMEOUT_S = 300.0
_MAX_BACKOFF_S = 5.0
_LONG_SOUND_BYTES = 4 * 1024 * 1024


class WorkerEndedError(TransomError):
    """A decode worker was ended from outside, with its item in the middle."""


class Worker:
    """One worker process and its socket. `parts` ends with None when the process is gone."""

    def __init__(self, memory_mb: int, log: Sequence[str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "transom.encoder.media.worker"]
            arguments = [str(theirs.fileno()), str(os.getpid()), str(memory_mb), *log]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            self.process = subprocess.Popen(
                command + arguments, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, env=environment
            )
        self.sock = ours
        self.sock.setblocking(False)
        self.parts: asyncio.Queue[tuple[wire.Reply, int | None] | None] = asyncio.Queue()
        self.killed_for: str | None = None
        self.awaited: deque[asyncio.Future[Worker]] = deque()  # by who wants this one and no other
        asyncio.get_running_loop().add_reader(ours.fileno(), self._readable)

    def _readable(self) -> None:
        try:
            while True:
                self.parts.put_nowait(wire.receive_reply(self.sock))
        except BlockingIOError:
            return
        except Exception as error:
            if not isinstance(error, (EOFError, OSError)):
                logger.warning("decode worker %d broke its protocol: %s", self.process.pid, error)
            self._forget()
            self.parts.put_nowait(None)

    def _forget(self) -> None:
        with contextlib.suppress(ValueError):
            asyncio.get_running_loop().remove_reader(self.sock.fileno())

    def kill(self, why: str) -> None:
        self.killed_for = self.killed_for or why
        self.process.kill()

    async def reap(self) -> int:
        """Release everything; return the exit code."""
        self._forget()
        self.sock.close()
        if self.process.poll() is None:
            self.process.kill()
        code = await asyncio.to_thread(self.process.wait)
        while not self.parts.empty():
            part = self.parts.get_nowait()
            if part is not None and part[1] is not None:
                os.close(part[1])
        return code


class DecodePool:
    """Hands jobs to workers in order of arrival; sounds and clips never take the last worker."""

    def __init__(self, *, workers: int, timeout_s: float, memory_mb: int, log: Sequence[str] = QUIET) -> None:
        self._count = workers
        self._timeout_s = timeout_s
        self._memory_mb = memory_mb
        self._log = log
        self._idle: deque[Worker] = deque()
        self._waiters: deque[asyncio.Future[Worker]] = deque()
        self._all: set[Worker] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.long_jobs = max(1, workers - 1)  # sounds and clips at a time
        self._long = asyncio.Semaphore(self.long_jobs)
        self._closed = False
        self._backoff_s = 0.0
        self.crashes = 0
        self.jobs = 0

    async def start(self) -> None:
        """Start all workers; return when the first is ready. Raise UnavailableError when none gets so."""
        for _ in range(self._count):
            self._spawn()
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                self._free(await self._wait())
        except TimeoutError:
            raise UnavailableError("no decode worker could be started: see the log") from None

    @property
    def pids(self) -> list[int]:
        """Process ids of the running workers."""
        return [worker.process.pid for worker in self._all]

    def busy(self) -> int:
        """Count the workers that have a job or are starting."""
        return len(self._all) - len(self._idle)

    def _spawn(self) -> None:
        worker = Worker(self._memory_mb, self._log)
        self._all.add(worker)
        self._settle(worker, _START_TIMEOUT_S)

    def _settle(self, worker: Worker, timeout_s: float) -> None:
        """Take the worker back once it says that it is done, or replace it."""
        task = asyncio.create_task(self._until_done(worker, timeout_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _until_done(self, worker: Worker, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while (part := await worker.parts.get()) is not None:
                    reply, fd = part
                    if fd is not None:
                        os.close(fd)
                        wire.send(worker.sock, wire.Ack())
                    if isinstance(reply, (wire.Finished, wire.Failed)):
                        self._backoff_s = 0.0
                        self._free(worker)
                        return
        except (TimeoutError, OSError):
            pass
        # Workers that can't even start must not be started in a tight loop.
        await asyncio.sleep(self._backoff_s)
        self._backoff_s = min(_MAX_BACKOFF_S, 2 * self._backoff_s + 0.1)
        await self._replace(worker)

    async def _replace(self, worker: Worker) -> int:
        """Bury a worker and start another in its place; return the exit code."""
        self._all.discard(worker)
        while worker.awaited:
            self._waiters.appendleft(worker.awaited.pop())
        code = await worker.reap()
        if not self._closed:
            logger.warning("decode worker %d ended with %d and is replaced", worker.process.pid, code)
            self.crashes += 1
            self._spawn()
        return code

    def _free(self, worker: Worker) -> None:
        for waiters in (worker.awaited, self._waiters):
            while waiters:
                waiter = waiters.popleft()
                if not waiter.done():
                    waiter.set_result(worker)
                    return
        self._idle.append(worker)

    async def _wait(self, near: Worker | None = None, *, insist: bool = False) -> Worker:
        """Take a worker: `near` if it is idle or, while it lives, if one insists."""
        if near is not None and near in self._idle:
            self._idle.remove(near)
            return near
        insist = insist and near in self._all
        if self._idle and not insist:
            return self._idle.popleft()
        waiter: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()
        (near.awaited if near is not None and insist else self._waiters).append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._free(waiter.result())
            raise

    def decode(
        self, job: wire.Job, file: wire.MemoryFile, *, near: Worker | None = None, insist: bool = False
    ) -> Decoding:
        """Return an async context manager that iterates over what the job gives.

        `near` is a worker that would have less to do than others; with `insist` it is waited for.
        """
        gate = None if isinstance(job, wire.ImageJob) else self._long
        return Decoding(self, job, file, self._timeout_s, gate, near, insist)

    def forget(self, clip: int) -> None:
        """Tell all workers that a clip is over."""
        for worker in self._all:
            with contextlib.suppress(OSError):
                wire.send(worker.sock, wire.Forget(clip))

    async def close(self) -> None:
        """End all workers."""
        self._closed = True
        for worker in self._all:
            worker.kill("close")
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in list(self._all):
            await worker.reap()
        self._all.clear()
        self._idle.clear()


class Decoding:
    """One job on a worker: `async with pool.decode(...) as parts: async for reply, fd in parts`.

    Yields data parts with their descriptor (the caller's to close) and heads; ends after Finished,
    whose notes stay in `notes`. Raises MediaError when the item is at fault, WorkerEndedError when the
    worker was ended from outside; one that gave nothing yet is replaced by another once. `worker` is
    who did it.
    """

    def __init__(
        self,
        pool: DecodePool,
        job: wire.Job,
        file: wire.MemoryFile,
        timeout_s: float,
        gate: asyncio.Semaphore | None,
        near: Worker | None,
        insist: bool,
    ) -> None:
        self._pool = pool
        self._job = job
        self._file = file
        self._timeout_s = timeout_s
        self._gate = gate
        self._near = near
        self._insist = insist
        self._worker: Worker | None = None
        self.worker: Worker | None = None
        self._given = False
        self._retried = False
        self.notes: tuple[str, ...] = ()

    async def __aenter__(self) -> Decoding:
        if self._gate is not None:
            await self._gate.acquire()
        try:
            await self._begin()
        except BaseException:
            if self._gate is not None:
                self._gate.release()
            raise
        return self

    async def _begin(self) -> None:
        while True:
            worker = await self._pool._wait(self._near, insist=self._insist)
            try:
                wire.send(worker.sock, self._job, self._file.fd)
            except OSError:  # it died while idle
                await self._pool._replace(worker)
                continue
            self._worker = self.worker = worker
            self._pool.jobs += 1
            return

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._gate is not None:
            self._gate.release()
        worker, self._worker = self._worker, None
        if worker is not None:
            with contextlib.suppress(OSError):
                wire.send(worker.sock, wire.Stop())
            self._pool._settle(worker, self._timeout_s)

    def __aiter__(self) -> Decoding:
        return self

    async def __anext__(self) -> tuple[wire.Reply, int | None]:
        while True:
            worker = self._worker
            if worker is None:
                raise StopAsyncIteration
            try:
                async with asyncio.timeout(self._timeout_s):
                    part = await worker.parts.get()
            except TimeoutError:
                worker.kill("timeout")
                part = None
            if part is None:
                await self._died(worker)
                continue
            reply, fd = part
            if isinstance(reply, (wire.Finished, wire.Failed)):
                self._worker = None
                self._pool._free(worker)
                if isinstance(reply, wire.Failed):
                    raise MediaError(reply.message)
                self.notes = reply.notes
                raise StopAsyncIteration
            if fd is not None:
                self._given = True
                with contextlib.suppress(OSError):
                    wire.send(worker.sock, wire.Ack())
            return reply, fd

    async def _died(self, worker: Worker) -> None:
        self._worker = None
        timed_out = worker.killed_for == "timeout"
        code = await self._pool._replace(worker)
        if timed_out:
            raise MediaError(f"decoding made no progress for {self._timeout_s:g} s, the limit")
        if -code in _CRASHES:
            raise MediaError(f"the decoder crashed on this item ({signal.Signals(-code).name})")
        if self._given or self._retried:
            raise WorkerEndedError("the process that decoded this item was ended from outside")
        self._retried = True
        await self._begin()
