"""One rank as the front sees it: what it holds, what it embeds, and how it fared.

Encoder process (front), event loop. Decides when a batch goes; which pieces a rank gets is not its business.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from transom.encoder.batcher import Batcher, Lane, Piece
from transom.encoder.encoding import Encoding
from transom.encoder.media.wire import MemoryFile
from transom.encoder.ranks import wire
from transom.encoder.ranks.handle import RankProcess


@dataclass(eq=False)
class Work:
    """One piece in the front's keeping, with all that a second rank would need to take it over."""

    owner: Encoding
    lane: Lane
    cost: int
    order: wire.Frames | wire.Sound
    file: MemoryFile
    result: asyncio.Future[NDArray[Any]]
    arrived_s: float
    moves: int = 0
    is_trial: bool = False

    @property
    def number(self) -> int:
        return self.order.number

    def close(self) -> None:
        """Let go of the pixels or samples."""
        self.file.close()


@dataclass(slots=True)
class Figures:
    """What a rank has done since the encoder started."""

    batches: int = 0
    pieces: int = 0
    restarts: int = 0
    busy_s: float = 0.0
    served: float = 0.0


@dataclass(eq=False)
class Seat:
    """The place of a rank; processes come and go. `outstanding` is in forwards, over both lanes."""

    index: int
    budgets: dict[Lane, int]
    max_wait_s: float
    forward_s: float
    timeout_s: float
    more_coming: Callable[[], bool]
    process: RankProcess | None = None
    ready: bool = False
    reserved: bool = False  # for trials: gets nothing else
    held: dict[int, Work] = field(default_factory=dict)
    running: tuple[Work, ...] = ()
    outstanding: float = 0.0
    figures: Figures = field(default_factory=Figures)
    device: str = ""
    started_s: float = 0.0
    short_lives: int = 0
    overdue: bool = False
    _timer: asyncio.TimerHandle | None = None
    _watchdog: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self.batcher: Batcher[Work] = Batcher(self.budgets, self.max_wait_s, self.forward_s)

    def _share(self, work: Work) -> float:
        return work.cost / self.budgets[work.lane]

    def take(self, work: Work) -> None:
        """Send a piece to the rank and queue it for a forward there."""
        assert self.process is not None
        self.held[work.number] = work
        self.outstanding += self._share(work)
        self.process.send(work.order, work.file)
        self.batcher.add(Piece(work.owner, work.lane, work.cost, work.arrived_s, work))
        self.pump()

    def release(self, number: int) -> Work | None:
        """Take a piece off the books, because it was answered or is not wanted any more."""
        work = self.held.pop(number, None)
        if work is not None:
            self.outstanding -= self._share(work)
        return work

    def cancel(self, owner: Encoding) -> None:
        """Drop the owner's pieces that wait for a forward; those in a running one come back unasked for."""
        dropped = [piece.payload for piece in self.batcher.cancel(owner)]
        for work in dropped:
            self.release(work.number)
            work.close()
        if dropped and self.process is not None:
            self.process.send(wire.Drop(tuple(work.number for work in dropped)))

    def pump(self) -> None:
        """Start the next forward if one is due, or see to it that it starts when it is."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.running or not self.ready or self.process is None:
            return
        now = time.monotonic()
        more = self.more_coming() and not self.reserved
        batch = self.batcher.next(now, more_coming=more)
        if not batch:
            wait_s = self.batcher.wait_s(now, more_coming=more)
            if wait_s is not None:
                self._timer = asyncio.get_running_loop().call_later(wait_s, self.pump)
            return
        self.running = tuple(piece.payload for piece in batch)
        self._watchdog = asyncio.get_running_loop().call_later(self.timeout_s, self._too_long)
        self.process.send(wire.Forward(tuple(work.number for work in self.running)))

    def _too_long(self) -> None:
        self.overdue = True
        if self.process is not None:
            self.process.kill()

    def done(self, message: wire.Done) -> tuple[Work, ...]:
        """Take note of the end of a forward and start the next; return what was in it."""
        batch, self.running = self.running, ()
        if self._watchdog is not None:
            self._watchdog.cancel()
        start_s, end_s = message.forward_s
        self.figures.batches += 1
        self.figures.pieces += message.pieces
        self.figures.busy_s += end_s - start_s
        self.figures.served += sum(self._share(work) for work in batch)
        if batch and message.pieces == len(batch):
            self.batcher.took(batch[0].lane, sum(work.cost for work in batch), end_s - start_s)
        self.pump()
        return batch

    def empty(self) -> tuple[list[Work], set[int]]:
        """After the rank's death: return what it held, and the numbers of what it was working on."""
        assert self.process is not None
        suspects = {work.number for work in self.running} | (self.process.progress.current() & set(self.held))
        held = list(self.held.values())
        for timer in (self._timer, self._watchdog):
            if timer is not None:
                timer.cancel()
        self._timer = self._watchdog = None
        self.batcher = Batcher(self.budgets, self.max_wait_s, self.forward_s)
        self.held = {}
        self.running = ()
        self.outstanding = 0.0
        self.ready = self.reserved = False
        return held, suspects
