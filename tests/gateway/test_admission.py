"""Room and turns: what is held is given back, and no key can keep another from its turn."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from transom.errors import OverloadedError, PayloadTooLargeError, UnavailableError
from transom.gateway.admission import ANYBODY, Admission, Caller
from transom.gateway.fair_queue import Entry, FairQueue

KEYS = "abcd"
COSTS = st.floats(0.01, 1.0)
WEIGHTS = st.floats(0.2, 5.0)


@given(
    backlogs=st.lists(st.tuples(COSTS, WEIGHTS, st.integers(1, 30)), min_size=1, max_size=6),
    served=st.integers(0, 40),
    cost=COSTS,
    weight=WEIGHTS,
)
def test_a_key_that_comes_waits_for_one_request_of_each_other_key(
    backlogs: list[tuple[float, float, int]], served: int, cost: float, weight: float
) -> None:
    queue: FairQueue[str] = FairQueue()
    for number, (each, its_weight, count) in enumerate(backlogs):
        for _ in range(count):
            queue.push(f"flood-{number}", its_weight, each, "flood")
    for _ in range(min(served, len(queue) - 1)):
        queue.pop()
    others = sum(queue.waiting(f"flood-{number}") > 0 for number in range(len(backlogs)))
    mine = queue.push("mine", weight, cost, "mine")
    before = 0
    while queue.pop() is not mine:
        before += 1
    assert before <= others


@given(
    weights=st.lists(WEIGHTS, min_size=2, max_size=4),
    costs=st.lists(COSTS, min_size=1, max_size=10),
    grants=st.integers(1, 120),
)
def test_keys_with_backlogs_are_served_by_weight(
    weights: list[float], costs: list[float], grants: int
) -> None:
    """The bound of start-time fair queueing: served work by weight differs by one request of each key."""
    queue: FairQueue[int] = FairQueue()
    for key, weight in enumerate(weights):
        for turn in range(grants + 1):  # nobody's backlog ends
            queue.push(str(key), weight, costs[(turn * (key + 1)) % len(costs)], key)
    work = [0.0] * len(weights)
    for _ in range(grants):
        entry = queue.pop()
        assert entry is not None
        work[entry.item] += entry.cost
    top = max(costs)
    for i, one in enumerate(weights):
        for j, other in enumerate(weights):
            assert abs(work[i] / one - work[j] / other) <= top / one + top / other + 1e-9


class QueueMachine(RuleBasedStateMachine):
    """Entries come, go and are taken out in any order; a key's own order holds throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[int] = FairQueue()
        self.waiting: list[Entry[int]] = []
        self.count = 0

    @rule(key=st.sampled_from(KEYS), cost=COSTS)
    def push(self, key: str, cost: float) -> None:
        self.waiting.append(self.queue.push(key, 1.0 + KEYS.index(key), cost, self.count))
        self.count += 1

    @precondition(lambda self: not self.waiting)
    @rule(key=st.sampled_from(KEYS), cost=COSTS)
    def serve(self, key: str, cost: float) -> None:
        self.queue.serve(key, 1.0 + KEYS.index(key), cost)

    @precondition(lambda self: self.waiting)
    @rule()
    def pop(self) -> None:
        entry = self.queue.pop()
        assert entry is not None
        assert entry is next(one for one in self.waiting if one.key == entry.key)
        self.waiting.remove(entry)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.waiting))
        self.queue.remove(entry)
        self.queue.remove(entry)
        self.waiting.remove(entry)

    @invariant()
    def adds_up(self) -> None:
        self.queue.check_integrity()
        assert len(self.queue) == len(self.waiting)
        counts = Counter(entry.key for entry in self.waiting)
        assert all(self.queue.waiting(key) == counts[key] for key in KEYS)
        longest = self.queue.longest()
        if longest is not None:
            most = max(counts[key] / (1.0 + KEYS.index(key)) for key in KEYS)
            assert self.queue.crowding(longest.key) == pytest.approx(most)


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def admission(**changes: float) -> Admission:
    limits = {"max_choices": 2, "max_tokens": 100, "max_bytes": 100, "max_waiting": 4, "max_wait_s": 5.0}
    return Admission(**(limits | changes))  # type: ignore[arg-type]


class Holder:
    """A request that holds its room until `leave`."""

    def __init__(self, room: Admission, key: str, log: list[str], choices: int = 1, tokens: int = 10) -> None:
        self.left = asyncio.Event()
        self.task = asyncio.create_task(self._run(room, key, log, choices, tokens))

    async def _run(self, room: Admission, key: str, log: list[str], choices: int, tokens: int) -> None:
        async with room.admit(Caller(key), choices, tokens):
            log.append(key)
            await self.left.wait()

    def leave(self) -> None:
        self.left.set()


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until something holds."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came true")


async def test_what_is_held_is_given_back() -> None:
    room = admission(max_choices=3, max_waiting=0)
    async with room.admit(ANYBODY, 1, 500):
        with pytest.raises(OverloadedError):
            async with room.admit(ANYBODY, 1, 1):  # alone, even a giant may run
                pass
    async with room.admit(ANYBODY, 2, 60):
        for choices, tokens in ((2, 1), (1, 41), (4, 1)):
            with pytest.raises(OverloadedError) as caught:
                async with room.admit(ANYBODY, choices, tokens):
                    pass
            assert caught.value.retry_after_s
    assert (room.choices, room.tokens, room.waiting) == (0, 0, 0)


async def test_a_flood_does_not_keep_another_key_out() -> None:
    room, log = admission(), list[str]()
    flood = [Holder(room, "flood", log) for _ in range(6)]
    await until(lambda: room.waiting == 4)
    late = Holder(room, "late", log)
    await until(lambda: flood[5].task.done())
    with pytest.raises(OverloadedError):  # the newest of the flood made way
        await flood[5].task
    assert room.waiting == 4
    flood[0].leave()
    await until(lambda: len(log) == 3)
    assert log == ["flood", "flood", "late"]
    for one in (*flood, late):
        one.leave()
    await asyncio.gather(*(one.task for one in flood[:5]), late.task)
    assert (room.choices, room.tokens, room.waiting) == (0, 0, 0)


async def test_a_flood_refuses_itself() -> None:
    room, log = admission(), list[str]()
    flood = [Holder(room, "flood", log) for _ in range(7)]
    await until(lambda: flood[6].task.done())
    with pytest.raises(OverloadedError):
        await flood[6].task
    for one in flood:
        one.leave()
    await asyncio.gather(*(one.task for one in flood[:6]))


async def test_a_large_request_is_not_overtaken_for_ever() -> None:
    room, log = admission(max_choices=9), list[str]()
    small = [Holder(room, "a", log, tokens=30) for _ in range(3)]
    large = Holder(room, "large", log, tokens=90)
    await until(lambda: room.waiting == 1)
    after = Holder(room, "after", log, tokens=1)
    for one in small:
        await until(lambda: room.waiting == 2)
        one.leave()
    await until(lambda: "large" in log)
    assert log.index("large") == 3
    large.leave()
    after.leave()
    await asyncio.gather(large.task, after.task, *(one.task for one in small))


async def test_who_gives_up_waiting_leaves_nothing_behind() -> None:
    short = admission(max_choices=1, max_wait_s=0.05)
    async with short.admit(Caller("a"), 1, 1):
        with pytest.raises(OverloadedError, match="choices are in work"):
            async with short.admit(Caller("b"), 1, 1):
                pass
        assert short.waiting == 0
    room, log = admission(max_choices=1), list[str]()
    first = Holder(room, "a", log)
    await until(lambda: log == ["a"])
    gone = Holder(room, "c", log)
    await until(lambda: room.waiting == 1)
    gone.task.cancel()
    await asyncio.gather(gone.task, return_exceptions=True)
    assert room.waiting == 0
    # Room that is given at the very moment in which its taker goes is not lost.
    going = Holder(room, "d", log)
    await until(lambda: room.waiting == 1)
    first.leave()
    await until(lambda: room.waiting == 0)
    going.task.cancel()
    await asyncio.gather(first.task, going.task, return_exceptions=True)
    assert (room.choices, room.tokens, room.waiting) == (0, 0, 0)


async def test_a_stop_sends_all_away_who_wait() -> None:
    room, log = admission(max_choices=1), list[str]()
    first, second = Holder(room, "a", log), Holder(room, "b", log)
    await until(lambda: room.waiting == 1)
    room.send_away(lambda: UnavailableError("closing"))
    with pytest.raises(UnavailableError):
        await second.task
    first.leave()
    await first.task
    assert (room.choices, room.waiting) == (0, 0)


async def come_and_go(steps: list[tuple[str, str, int]]) -> None:
    room, log = admission(max_choices=3, max_wait_s=60), list[str]()
    holders: list[Holder] = []
    for key, what, size in steps:
        if what == "come":
            holders.append(Holder(room, key, log, choices=1 + size % 2, tokens=size))
        elif holders:
            one = holders[size % len(holders)]
            one.leave() if what == "leave" else one.task.cancel()
        await asyncio.sleep(0)
        assert room.choices <= 3
        assert room.tokens <= 100 or room.choices <= 2
        assert room.waiting <= 4
        room._queue.check_integrity()
    for one in holders:
        one.leave()
    await asyncio.gather(*(one.task for one in holders), return_exceptions=True)
    assert (room.choices, room.tokens, room.waiting) == (0, 0, 0)


def test_any_coming_and_going_adds_up() -> None:
    @settings(max_examples=60, deadline=None)
    @given(
        steps=st.lists(
            st.tuples(
                st.sampled_from("abc"), st.sampled_from(["come", "leave", "cancel"]), st.integers(1, 60)
            ),
            max_size=40,
        )
    )
    def check(steps: list[tuple[str, str, int]]) -> None:
        asyncio.run(come_and_go(steps))

    check()


async def test_bodies_of_one_key_leave_room_for_others() -> None:
    room = admission(shared=True)
    async with AsyncExitStack() as stack:

        def body(key: str) -> Callable[[int], None]:
            return stack.enter_context(room.buffer(Caller(key)))

        for _ in range(5):
            body("flood")(10)
        with pytest.raises(OverloadedError):
            body("flood")(10)
        body("late")(20)
        body("other")(10)
    assert room.buffered_bytes == 0
    alone = admission()
    with alone.buffer() as first, alone.buffer() as second:
        first(80)
        second(20)
        with pytest.raises(OverloadedError):
            second(1)
    with alone.buffer() as only:
        only(99)
        only(1)
        with pytest.raises(PayloadTooLargeError, match="alone takes more than 100 bytes"):
            only(1)
    assert alone.buffered_bytes == 0


async def test_what_could_never_be_held_is_not_asked_to_come_back() -> None:
    room = admission(shared=True)
    with room.buffer(Caller("a")) as one, room.buffer(Caller("b")) as other:
        other(10)
        with pytest.raises(OverloadedError):
            one(100)
        with pytest.raises(PayloadTooLargeError):
            one(101)
