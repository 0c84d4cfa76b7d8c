"""The ranks of an encoder as one: pieces in, rows out, whatever becomes of single ranks meanwhile.

Encoder process (front), event loop. The front keeps fetching, decoding, caches and sending; a rank owns a
device with its towers, and gets each piece in the very memory that a decoder wrote it to. Equal items meet
in the front and in the embedding cache, before any rank is chosen: no rank has a cache that it could miss.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from transom.encoder.batcher import LANES, Lane
from transom.encoder.config import EncoderConfig
from transom.encoder.encoding import Encoding
from transom.encoder.media.wire import MemoryFile, map_array
from transom.encoder.metrics import EncoderMetrics
from transom.encoder.ranks import wire
from transom.encoder.ranks.handle import RankProcess
from transom.encoder.ranks.policy import (
    Quarantine,
    RankLoad,
    check_outstanding,
    choose_rank,
    fate,
    is_crash,
    restart_delay_s,
    split_threads,
)
from transom.encoder.ranks.seat import Seat, Work
from transom.encoder.spans import Event, Timeline
from transom.errors import CheckpointError, ConfigError, MediaError, TransomError, UnavailableError
from transom.log import log_arguments
from transom.messages import Dtype
from transom.supervisor import describe_exit, usable_cores

logger = logging.getLogger(__name__)

_STABLE_S = 30.0
_KINDS = {error.code: error for error in (CheckpointError, ConfigError)}


class Ranks:
    """All ranks of one encoder. `upstream` counts the items that may still hand in pieces."""

    def __init__(
        self, config: EncoderConfig, folder: Path, metrics: EncoderMetrics, timeline: Timeline
    ) -> None:
        self._config = config
        self._folder = folder
        self._metrics = metrics
        self._timeline = timeline
        self.upstream = 0
        self.dtype: Dtype = "float32"
        self.moved = 0
        self.trials = 0
        budgets: dict[Lane, int] = {"vision": config.batch_patches, "audio": config.batch_mel_frames}
        self.seats = [
            Seat(
                index=index,
                budgets=budgets,
                max_wait_s=config.max_wait_ms / 1000,
                forward_s=config.forward_ms / 1000,
                timeout_s=config.rank_timeout_s,
                more_coming=lambda: self.upstream > 0,
            )
            for index in range(config.ranks)
        ]
        self._threads = (
            [0] if config.ranks == 1 and not config.threads
            else split_threads(config.threads or usable_cores(), config.ranks)
        )  # fmt: skip
        self._numbers = 0
        self._unplaced: deque[Work] = deque()
        self._suspects: deque[Work] = deque()
        self._limbo: set[Work] = set()  # of a rank whose exit code is not known yet
        self._quarantine = Quarantine()
        self._starting: dict[int, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def start(self) -> None:
        """Start all ranks; return when all are ready, raise what keeps one from it."""
        loop = asyncio.get_running_loop()
        self._starting = {seat.index: loop.create_future() for seat in self.seats}
        for seat in self.seats:
            self._launch(seat)
        try:
            await asyncio.gather(*self._starting.values())
        finally:
            for future in self._starting.values():
                if future.done() and not future.cancelled():
                    future.exception()  # seen, even if another one was raised
            self._starting = {}

    def _launch(self, seat: Seat) -> None:
        config = self._config
        seat.started_s = time.monotonic()
        seat.overdue = False
        seat.process = RankProcess(
            wire.Start(
                index=seat.index,
                folder=str(self._folder),
                device=config.device,
                dtype=config.dtype,
                threads=self._threads[seat.index],
            ),
            log=log_arguments(config.log_level, config.log_json),
            on_answer=lambda answer, fd: self._answer(seat, answer, fd),
            on_end=lambda: self._spawn(self._bury(seat)),
        )

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Pieces

    def refuse_quarantined(self, key: str) -> None:
        """Raise MediaError when an item has ended a rank lately."""
        if self._quarantine.holds(key, time.monotonic()):
            raise MediaError("this item has ended the process that encoded it; it is not tried again for now")

    def submit(
        self, owner: Encoding, order: wire.Frames | wire.Sound, cost: int, file: MemoryFile
    ) -> asyncio.Future[NDArray[Any]]:
        """Hand in one piece; the future gives its rows, or the error of this piece alone. Takes the file."""
        self._numbers += 1
        work = Work(
            owner=owner,
            lane="vision" if isinstance(order, wire.Frames) else "audio",
            cost=cost,
            order=msgspec.structs.replace(order, number=self._numbers),
            file=file,
            result=asyncio.get_running_loop().create_future(),
            arrived_s=time.monotonic(),
        )
        self._place(work)
        return work.result

    def cancel(self, owner: Encoding) -> None:
        """Take the owner's waiting pieces out; those in a running forward are lost work."""
        for seat in self.seats:
            for work in seat.held.values():
                if work.owner is owner:
                    work.result.cancel()
            seat.cancel(owner)
        for waiting in (self._unplaced, self._suspects):
            for work in [one for one in waiting if one.owner is owner]:
                waiting.remove(work)
                work.result.cancel()
                work.close()
        for work in self._limbo:
            if work.owner is owner:
                work.result.cancel()
        # A rank that was kept for a suspect may be free again.
        self._place_waiting()

    def _choose(self) -> Seat | None:
        index = choose_rank(
            RankLoad(seat.index, seat.outstanding, seat.figures.served)
            for seat in self.seats
            if seat.ready and not seat.reserved
        )
        return None if index is None else self.seats[index]

    def _place(self, work: Work) -> None:
        seat = self._choose()
        if seat is None:
            self._unplaced.append(work)
        else:
            seat.take(work)

    def _place_waiting(self) -> None:
        """Place suspects, one at a time on a rank kept for them, then what found no rank before."""
        seat = next((one for one in self.seats if one.reserved), None)
        if self._suspects and seat is None and (seat := self._choose()) is not None:
            seat.reserved = True
        if seat is not None and not seat.held:
            if self._suspects:
                work = self._suspects.popleft()
                work.is_trial = True
                self.trials += 1
                seat.take(work)
            else:
                seat.reserved = False
        while self._unplaced and (place := self._choose()) is not None:
            place.take(self._unplaced.popleft())

    # Answers

    def _answer(self, seat: Seat, answer: wire.Answer, fd: int | None) -> None:
        if isinstance(answer, wire.Rows):
            self._rows(seat, answer, fd)
        elif isinstance(answer, wire.Done):
            start_s, end_s = answer.forward_s
            batch = seat.done(answer)
            if batch and answer.pieces:
                self._metrics.batch(batch[0].lane, answer.pieces, end_s - start_s)
                self._timeline.add(Event("forward", start_s, end_s, seat.index, answer.pieces))
        elif isinstance(answer, wire.Failed):
            work = seat.release(answer.number)
            if work is not None:
                text = (
                    answer.message
                    if answer.is_media
                    else f"the encoder failed on this item ({answer.message})"
                )
                self._fail(work, MediaError(text) if answer.is_media else TransomError(text))
            self._place_waiting()
        elif isinstance(answer, wire.Ready):
            self._ready(seat, answer)
        else:
            self._refused(seat, answer)

    def _rows(self, seat: Seat, answer: wire.Rows, fd: int | None) -> None:
        rows = map_array(fd, np.uint16 if self.dtype == "bfloat16" else np.float32, answer.shape)
        work = seat.release(answer.number)
        if work is not None:
            work.close()
            if not work.result.done():
                spans, (prepared_s, waited_s) = work.owner.spans, answer.prepared_s
                spans.add("preprocess", prepared_s, waited_s, rank=seat.index)
                spans.add("batch", waited_s, max(waited_s, answer.forward_s[0]), rank=seat.index)
                spans.add("forward", *answer.forward_s, rank=seat.index)
                work.result.set_result(rows)
        if seat.reserved or self._unplaced:
            self._place_waiting()

    def _ready(self, seat: Seat, answer: wire.Ready) -> None:
        self.dtype = answer.dtype
        seat.device, seat.ready = answer.device, True
        logger.info(
            "rank %d on %s in %s is ready after %.1f s",
            seat.index, answer.device, answer.dtype, time.monotonic() - seat.started_s,
        )  # fmt: skip
        started = self._starting.get(seat.index)
        if started is not None and not started.done():
            started.set_result(None)
        self._place_waiting()

    def _refused(self, seat: Seat, answer: wire.Unready | wire.Ready) -> None:
        assert isinstance(answer, wire.Unready)
        started = self._starting.get(seat.index)
        if started is not None and not started.done():
            started.set_exception(_KINDS.get(answer.code, TransomError)(answer.message))
        else:
            logger.error("rank %d can't start again: %s", seat.index, answer.message)

    @staticmethod
    def _fail(work: Work, error: TransomError) -> None:
        work.close()
        if not work.result.done():
            work.result.set_exception(error)
            # Its item may be gone: then nobody asks, and nobody has to.
            work.result.exception()

    # Deaths

    async def _bury(self, seat: Seat) -> None:
        """See to the pieces of a rank that is gone, and start its successor."""
        process, seat.ready = seat.process, False
        assert process is not None
        held, suspects = seat.empty()
        self._limbo.update(held)
        code = await process.reap()
        self._limbo.difference_update(held)
        seat.process = None
        if self._closed:
            for work in held:
                self._fail(work, UnavailableError("the encoder is shutting down"))
            return
        how = f"no answer for {self._config.rank_timeout_s:g} s" if seat.overdue else describe_exit(code)
        started = self._starting.get(seat.index)
        if started is not None:
            if not started.done():
                started.set_exception(UnavailableError(f"rank {seat.index} can't be started: {how}"))
            return
        logger.warning(
            "rank %d ended (%s) with %d pieces, %d of them in work", seat.index, how, len(held), len(suspects)
        )
        for work in held:
            self._decide(work, suspects, 1 if seat.overdue else code, how)
        self._place_waiting()
        await self._revive(seat)

    def _decide(self, work: Work, suspects: set[int], code: int, how: str) -> None:
        """Move a dead rank's piece to another rank, put it to the trial, or fail it."""
        if work.result.done():
            work.close()
            return
        was_worked_on = work.number in suspects
        what = fate(
            was_worked_on=was_worked_on,
            was_trial=work.is_trial,
            alone=len(suspects) == 1,
            exit_code=code,
            moves=work.moves,
        )
        if what == "fail":
            if was_worked_on:
                self._quarantine.add(work.owner.key, time.monotonic())
            crashed = was_worked_on and is_crash(code)
            text = (
                f"the encoder crashed on this item ({how})"
                if crashed
                else f"the encoder was lost twice ({how})"
            )
            self._fail(work, MediaError(text) if crashed else TransomError(text))
            return
        work.moves += 1
        self.moved += 1
        (self._suspects if what == "trial" else self._unplaced).append(work)

    async def _revive(self, seat: Seat) -> None:
        lived_s = time.monotonic() - seat.started_s
        seat.short_lives = seat.short_lives + 1 if lived_s < _STABLE_S else 1
        seat.figures.restarts += 1
        await asyncio.sleep(restart_delay_s(seat.short_lives))
        if not self._closed:
            self._launch(seat)

    # State

    @property
    def ready(self) -> int:
        """The number of ranks that take pieces."""
        return sum(seat.ready for seat in self.seats)

    @property
    def batches(self) -> int:
        """Forwards of all ranks."""
        return sum(seat.figures.batches for seat in self.seats)

    def queued(self) -> dict[Lane, int]:
        """Queued cost by lane: patches, mel frames."""
        waiting = [*self._unplaced, *self._suspects]
        return {
            lane: sum(seat.batcher.queued[lane] for seat in self.seats)
            + sum(work.cost for work in waiting if work.lane == lane)
            for lane in LANES
        }

    def load(self) -> dict[str, float]:
        """Return figures of all ranks together."""
        queued = self.queued()
        return {
            "ranks": len(self.seats),
            "ranks_ready": self.ready,
            "rank_restarts": sum(seat.figures.restarts for seat in self.seats),
            "moved_pieces": self.moved,
            "trials": self.trials,
            "quarantined_items": len(self._quarantine),
            "queued_patches": queued["vision"],
            "queued_mel_frames": queued["audio"],
            "batches": self.batches,
        }

    def works(self) -> Iterator[Work]:
        """Yield every piece in the front's keeping."""
        for seat in self.seats:
            yield from seat.held.values()
        yield from self._unplaced
        yield from self._suspects

    def check_integrity(self) -> None:
        """Assert that the books of all ranks agree with what they hold."""
        check_outstanding([seat.outstanding for seat in self.seats])
        for seat in self.seats:
            seat.batcher.check_integrity()
            assert seat.ready or not seat.held, f"rank {seat.index} is gone and holds {len(seat.held)} pieces"
            assert all(work.number in seat.held for work in seat.running), seat.index
        numbers = [work.number for work in self.works()]
        assert len(numbers) == len(set(numbers)), "a piece is in two places"

    async def close(self) -> None:
        """End all ranks; pieces that are left fail."""
        self._closed = True
        for seat in self.seats:
            if seat.process is not None and seat.ready is False:
                seat.process.kill()  # still loading: it does not listen
        for work in [*self._unplaced, *self._suspects]:
            self._fail(work, UnavailableError("the encoder is shutting down"))
        self._unplaced.clear()
        self._suspects.clear()
        busy = [seat for seat in self.seats if seat.process is not None]
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._end(seat) for seat in busy))

    @staticmethod
    async def _end(seat: Seat) -> None:
        process, seat.process = seat.process, None
        if process is None:
            return
        for work in list(seat.held.values()):
            Ranks._fail(work, UnavailableError("the encoder is shutting down"))
        if seat.running:
            process.process.send_signal(signal.SIGKILL)  # nobody waits for that forward
        await process.reap()
