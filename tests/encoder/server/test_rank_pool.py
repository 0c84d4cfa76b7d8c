"""The front's keeping of pieces, with ranks that live and die as hypothesis says: none is ever lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transom.encoder.config import EncoderConfig
from transom.encoder.encoding import Encoding
from transom.encoder.media.wire import MemoryFile
from transom.encoder.metrics import EncoderMetrics
from transom.encoder.ranks import pool as pool_module
from transom.encoder.ranks import wire
from transom.encoder.ranks.policy import MAX_MOVES
from transom.encoder.ranks.pool import Ranks
from transom.encoder.ranks.progress import Progress
from transom.encoder.spans import ItemSpans, Timeline
from transom.errors import MediaError, TransomError

RANKS = 2
HIDDEN = 4
SPAN = (0.0, 0.001)  # quick enough for whole batches


class Script:
    """A rank that does what the test says. Stands where the process stands; everything else is real."""

    alive: list[Script]

    def __init__(
        self,
        start: wire.Start,
        *,
        log: Sequence[str],
        on_answer: Callable[[wire.Answer, int | None], None],
        on_end: Callable[[], None],
    ) -> None:
        self.index = start.index
        self.progress = Progress()
        self.answer, self.end = on_answer, on_end
        self.pieces: set[int] = set()
        self.forward: tuple[int, ...] = ()
        self.code = 0
        self.dead = False
        Script.alive.append(self)

    def send(self, order: wire.Order, file: MemoryFile | None = None) -> None:
        if isinstance(order, (wire.Frames, wire.Sound)):
            assert file is not None
            assert file.fd >= 0
            self.pieces.add(order.number)
        elif isinstance(order, wire.Forward):
            assert not self.forward, "a second forward before the first was done"
            assert order.numbers
            assert set(order.numbers) <= self.pieces
            self.forward = order.numbers
        elif isinstance(order, wire.Drop):
            assert not set(order.numbers) & set(self.forward)
            self.pieces -= set(order.numbers)

    def finish(self) -> None:
        """Answer the running forward."""
        numbers, self.forward = self.forward, ()
        self.pieces -= set(numbers)
        self.answer(wire.Done(pieces=len(numbers), forward_s=SPAN), None)
        for number in numbers:
            file = MemoryFile(HIDDEN * 4)
            np.frombuffer(file.view, np.float32)[:] = number
            rows = wire.Rows(number=number, shape=(1, HIDDEN), prepared_s=SPAN, forward_s=SPAN)
            self.answer(rows, os.dup(file.fd))  # the receiver closes it
            file.close()

    def die(self, code: int) -> None:
        self.code, self.dead = code, True
        Script.alive.remove(self)
        self.end()

    def kill(self) -> None:
        if not self.dead:
            self.die(-signal.SIGKILL)

    async def reap(self) -> int:
        self.progress.close()
        return self.code


class Run:
    """One pool with its pieces, and what the test remembers of each."""

    def __init__(self) -> None:
        Script.alive = []
        config = EncoderConfig(ranks=RANKS, max_wait_ms=0, batch_patches=4)
        self.ranks = Ranks(config, Path(), EncoderMetrics(), Timeline())
        self.owners = [Encoding(f"{n:032x}", "image", 1, 1, spans=ItemSpans()) for n in range(6)]
        self.poison = self.owners[0]
        self.futures: dict[int, tuple[Encoding, asyncio.Future[Any]]] = {}
        self.worked_on: Counter[int] = Counter()  # deaths of ranks that were embedding the piece
        self.cancelled: set[int] = set()
        self.files: list[MemoryFile] = []
        self.poisoned = 0

    async def start(self) -> None:
        starting = asyncio.create_task(self.ranks.start())
        await asyncio.sleep(0)
        self.wake()
        await starting

    def wake(self) -> None:
        """Let new ranks say that they are ready."""
        for rank in list(Script.alive):
            if not self.ranks.seats[rank.index].ready:
                rank.answer(wire.Ready(device="cpu", dtype="float32"), None)

    def submit(self, owner: int, cost: int) -> None:
        file = MemoryFile(1)
        self.files.append(file)
        order = wire.Frames(number=0, frames=1, height=1, width=1, target=(1, 1))
        future = self.ranks.submit(self.owners[owner], order, cost, file)
        self.futures[len(self.futures) + 1] = self.owners[owner], future

    def cancel(self, owner: int) -> None:
        chosen = self.owners[owner]
        self.cancelled |= {
            n for n, (one, future) in self.futures.items() if one is chosen and not future.done()
        }
        self.ranks.cancel(chosen)

    def finish(self, which: int) -> None:
        rank = next((one for one in Script.alive if one.index == which and one.forward), None)
        if rank is None:
            return
        if any(self.futures[number][0] is self.poison for number in rank.forward):
            self.poisoned += 1
            self.die(rank, -signal.SIGSEGV)
        else:
            rank.finish()

    def kill(self, which: int) -> None:
        rank = next((one for one in Script.alive if one.index == which), None)
        if rank is not None and self.ranks.seats[which].ready:
            self.die(rank, -signal.SIGKILL)

    def die(self, rank: Script, code: int) -> None:
        self.worked_on.update(rank.forward)
        rank.die(code)

    async def settle(self) -> None:
        for _ in range(12):
            await asyncio.sleep(0)
        self.wake()
        self.ranks.check_integrity()

    async def to_the_end(self) -> None:
        for _ in range(20 * len(self.futures) + 20):
            for which in range(RANKS):
                self.finish(which)
            await self.settle()
        await self.ranks.close()


actions = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, 5), st.integers(1, 6)),
    st.tuples(st.just("submit"), st.integers(1, 5), st.integers(1, 2)),
    st.tuples(st.just("finish"), st.integers(0, RANKS - 1)),
    st.tuples(st.just("kill"), st.integers(0, RANKS - 1)),
    st.tuples(st.just("cancel"), st.integers(0, 5)),
)


@settings(max_examples=120, deadline=None)
@given(st.lists(actions, max_size=40))
def test_no_piece_is_lost_and_only_the_killers_item_fails(program: list[tuple[Any, ...]]) -> None:
    async def play() -> None:
        run = Run()
        await run.start()
        for name, *values in program:
            getattr(run, name)(*values)
            await run.settle()
        await run.to_the_end()
        deaths = run.poisoned + sum(name == "kill" for name, *_ in program)
        for number, (owner, future) in run.futures.items():
            assert future.done(), f"piece {number} was lost"
            if future.cancelled():
                assert number in run.cancelled
            elif future.exception() is None:
                assert owner is not run.poison
                assert (future.result() == number).all()
            elif owner is run.poison:
                # Its other pieces may have to move with each rank that one of them ends.
                assert (
                    isinstance(future.exception(), MediaError)
                    or run.worked_on[number] >= 2
                    or deaths > MAX_MOVES
                )
            else:
                error = future.exception()
                assert isinstance(error, TransomError)
                assert not isinstance(error, MediaError)
                # Ended from outside again and again: in work twice, or moved too often.
                assert run.worked_on[number] >= 2 or deaths > MAX_MOVES
        poison = [future for owner, future in run.futures.values() if owner is run.poison]
        # In the company of others a killer is found out by its trial, alone at once.
        assert run.poisoned <= 2 * len(poison)
        assert all(file.fd == -1 for file in run.files), "a descriptor is left"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_module, "RankProcess", Script)
        patch.setattr(pool_module, "restart_delay_s", lambda lives: 0.0)
        asyncio.run(play())


async def test_a_killer_is_quarantined_and_its_neighbours_come_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "RankProcess", Script)
    monkeypatch.setattr(pool_module, "restart_delay_s", lambda lives: 0.0)
    run = Run()
    await run.start()
    run.submit(1, 4)  # fills a forward on each rank, so that the next ones share one
    run.submit(2, 4)
    for owner in (0, 3, 4, 5):
        run.submit(owner, 1)
    await run.to_the_end()
    failed = [owner for owner, future in run.futures.values() if future.exception() is not None]
    assert failed == [run.poison]
    assert run.poisoned == 2
    with pytest.raises(MediaError, match="not tried again"):
        run.ranks.refuse_quarantined(run.poison.key)
    for owner in run.owners[1:]:
        run.ranks.refuse_quarantined(owner.key)
