"""One fetch worker as its encoder sees it: the process, its socket, the downloads that it has in work.

Encoder process (front), event loop. Knows nothing of other workers.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from transom.encoder import fetch_wire as wire
from transom.encoder.known_urls import Validator
from transom.encoder.media.wire import MemoryFile
from transom.encoder.outbox import Outbox
from transom.errors import ConfigError, MediaError, TransomError, UnavailableError
from transom.supervisor import describe_exit

logger = logging.getLogger(__name__)

_END_S = 2.0
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Download:
    """What a URL gave, and how to ask next time whether it changed. The file is the receiver's to close."""

    file: MemoryFile
    validator: Validator | None


class LostError(Exception):
    """The worker ended before it answered. `company`: how many items it had in work, this one included."""

    def __init__(self, exit_code: int, company: int) -> None:
        super().__init__(exit_code, company)
        self.exit_code = exit_code
        self.company = company


class FetchProcess:
    """One fetch process. `ended` is set when its socket has closed; then it must be reaped."""

    def __init__(self, limits: bytes, log: Sequence[str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "transom.encoder.fetch_worker"]
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid()), *log],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        loop = asyncio.get_running_loop()
        self.pending: dict[int, asyncio.Future[Download | None]] = {}
        self.given_up = 0  # items that nobody waits for; it may be at work on them still
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
        """Have one URL downloaded; raise LostError when the process ends first."""
        number = next(_numbers)
        future: asyncio.Future[Download | None] = self._loop.create_future()
        self.pending[number] = future
        self._outbox.put(wire.Fetch(number=number, url=url, known=known))
        try:
            return await future
        except asyncio.CancelledError:
            if not future.done() or future.cancelled():
                self.given_up += 1
                self._outbox.put(wire.Cancel(number))
            elif future.exception() is None and (download := future.result()) is not None:
                download.file.close()  # it came at the very moment
            raise
        finally:
            self.pending.pop(number, None)
            # It holds the LostError, whose traceback holds our frame and, from Python 3.12 on, those of who
            # awaited us: a cycle that would keep what they download in the next try until gc finds it.
            del future

    async def fetch_within(
        self, url: str, known: Validator | None, limit_s: float, grace_s: float
    ) -> Download | None:
        """Fetch; a process that takes `grace_s` longer than the limit that it knows of itself is ended."""
        try:
            async with asyncio.timeout(limit_s + grace_s):
                return await self.fetch(url, known)
        except TimeoutError:
            self.process.kill()
            raise MediaError(f"download of the URL took over {limit_s:g} s, the limit") from None

    @property
    def company(self) -> int:
        """The number of items that would be suspects if it crashed."""
        return len(self.pending) + self.given_up

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

    def kill(self) -> None:
        """End the process, whatever it does."""
        self.process.kill()
        self.close()

    async def reap(self) -> int:
        """Once it has ended: release the process, tell who waits; return the exit code."""
        code = await asyncio.to_thread(self._wait)
        company = self.company
        for future in self.pending.values():
            if not future.done():
                future.set_exception(LostError(code, company))
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
