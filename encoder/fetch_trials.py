"""Downloads of which one ended a fetch worker: they are tried again apart, until the one is found.

Encoder process (front), event loop. Suspects are spread over processes of their own in groups an eighth as
large as the one that crashed, all at once; those of a group that crashes too are spread again. So an innocent
begins anew twice at most where 64 were in work, and never waits for the others, and what crashes a process
that has nothing else is the culprit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from transom.encoder.fetch_process import Download, FetchProcess, LostError
from transom.encoder.gate import Signal
from transom.encoder.known_urls import Validator
from transom.encoder.ranks.policy import is_crash
from transom.errors import MediaError, TransomError
from transom.supervisor import describe_exit

_SPLIT = 8
_ALONE = 32  # processes at a time with one item each


class _Seat:
    """A process for suspects, and how many it may have at once."""

    def __init__(self, worker: FetchProcess) -> None:
        self.worker = worker
        self.most = 1

    @property
    def usable(self) -> bool:
        """Whether it may be given something: not when it may be at work on what nobody waits for."""
        return not self.worker.ended.is_set() and not self.worker.given_up


class Trials:
    """Downloads suspects. `start` starts a worker; the limits are those of FetchProcess.fetch_within."""

    def __init__(self, start: Callable[[], FetchProcess], limit_s: float, grace_s: float) -> None:
        self._start = start
        self._limit_s = limit_s
        self._grace_s = grace_s
        self._seats: list[_Seat] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._suspects = 0
        self._changed = Signal()

    @property
    def workers(self) -> list[FetchProcess]:
        """Its processes."""
        return [seat.worker for seat in self._seats]

    async def fetch(self, url: str, known: Validator | None, company: int) -> Download | None:
        """Download an item that was one of `company` when a worker ended; else as FetchPool.fetch."""
        self._suspects += 1
        try:
            while True:
                seat = await self._seat(-(-company // _SPLIT))
                try:
                    return await seat.worker.fetch_within(url, known, self._limit_s, self._grace_s)
                except LostError as lost:
                    if lost.company == 1:
                        raise _verdict(lost.exit_code) from None
                    company = lost.company
                finally:
                    self._release(seat)
        finally:
            self._suspects -= 1
            if not self._suspects:
                for seat in self._seats:
                    seat.worker.close()

    async def _seat(self, most: int) -> _Seat:
        """Return a process that will have `most` items or fewer, the emptiest there is."""
        while True:
            usable = [seat for seat in self._seats if seat.usable]
            idle = next((seat for seat in usable if not seat.worker.company), None)
            limit = _ALONE if most == 1 else _SPLIT
            if idle is None and sum(seat.most <= most for seat in self._seats) < limit:
                idle = self._add()
            if idle is not None:
                idle.most = most
                return idle
            room = [seat for seat in usable if seat.worker.company < min(seat.most, most)]
            if room:
                seat = min(room, key=lambda one: one.worker.company)
                seat.most = min(seat.most, most)
                return seat
            await self._changed.wait()

    def _release(self, seat: _Seat) -> None:
        if seat.worker.given_up and not seat.worker.pending:
            seat.worker.close()
        self._changed.set()

    def _add(self) -> _Seat:
        seat = _Seat(self._start())
        self._seats.append(seat)
        task = asyncio.create_task(self._bury(seat))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return seat

    async def _bury(self, seat: _Seat) -> None:
        await seat.worker.ended.wait()
        await seat.worker.reap()
        self._seats.remove(seat)
        self._changed.set()

    async def close(self) -> None:
        """End all of them; downloads that are left fail."""
        for seat in self._seats:
            seat.worker.kill()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _verdict(exit_code: int) -> TransomError:
    how = describe_exit(exit_code)
    if is_crash(exit_code):
        return MediaError(f"the download crashed on this item ({how})")
    return TransomError(f"the processes that downloaded this item were ended ({how})")
