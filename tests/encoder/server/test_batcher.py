"""The batching policy: budgets, order, fairness, waiting; under any sequence of arrivals."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from transom.encoder.batcher import Batcher, Lane, Piece

BUDGETS: dict[Lane, int] = {"vision": 100, "audio": 50}


def piece(owner: object, cost: int, number: int = 0, at: float = 0.0, lane: Lane = "vision") -> Piece[int]:
    return Piece(owner, lane, cost, at, number)


def taken(batcher: Batcher[int], now: float = 100.0) -> list[tuple[object, int]]:
    return [(p.owner, p.payload) for p in batcher.next(now, more_coming=False)]


def test_pieces_of_many_items_share_a_batch() -> None:
    batcher: Batcher[int] = Batcher(BUDGETS, 0.0)
    for owner in range(5):
        batcher.add(piece(owner, 20))
    assert len(taken(batcher)) == 5
    assert taken(batcher) == []


def test_a_thumbnail_waits_for_one_batch_of_a_long_video_at_most() -> None:
    batcher: Batcher[int] = Batcher(BUDGETS, 0.0)
    for number in range(1800):
        batcher.add(piece("video", 40, number))
    assert taken(batcher) == [("video", 0), ("video", 1)]
    batcher.add(piece("thumbnail", 9, at=1.0))
    batch = taken(batcher)
    assert ("thumbnail", 0) in batch
    assert ("video", 2) in batch


def test_a_piece_above_the_budget_goes_alone() -> None:
    batcher: Batcher[int] = Batcher(BUDGETS, 0.0)
    batcher.add(piece("big", 500))
    batcher.add(piece("small", 1))
    assert taken(batcher) == [("big", 0)]
    assert taken(batcher) == [("small", 0)]


def test_who_did_not_fit_is_first_next_time() -> None:
    batcher: Batcher[int] = Batcher(BUDGETS, 0.0)
    for owner, cost in (("a", 60), ("b", 70), ("c", 30)):
        batcher.add(piece(owner, cost))
    assert taken(batcher) == [("a", 0), ("c", 0)]
    batcher.add(piece("d", 50))
    assert taken(batcher) == [("b", 0)]
    assert taken(batcher) == [("d", 0)]


def test_lanes_do_not_mix_and_the_older_goes_first() -> None:
    batcher: Batcher[int] = Batcher(BUDGETS, 0.0)
    batcher.add(piece("picture", 10, at=2.0))
    batcher.add(piece("sound", 10, at=1.0, lane="audio"))
    assert taken(batcher) == [("sound", 0)]
    assert taken(batcher) == [("picture", 0)]


def test_it_waits_only_while_arrivals_are_dense_and_more_are_coming() -> None:
    batcher: Batcher[int] = Batcher(BUDGETS, max_wait_s=0.010)
    batcher.add(piece("a", 10, at=0.0))
    assert batcher.wait_s(0.0, more_coming=True) == 0.0  # no rhythm known yet
    batcher.add(piece("b", 10, at=0.001))
    assert batcher.wait_s(0.002, more_coming=True) == pytest.approx(0.008)
    assert batcher.next(0.002, more_coming=True) == []
    assert batcher.wait_s(0.002, more_coming=False) == 0.0
    assert len(batcher.next(0.0101, more_coming=True)) == 2
    for number in range(10):
        batcher.add(piece(f"late {number}", 1, at=10.0 + number))
    assert batcher.wait_s(20.0, more_coming=True) == 0.0  # a second apart: waiting brings nobody
    assert Batcher[int](BUDGETS, 1.0).wait_s(0.0, more_coming=True) is None


def test_a_full_budget_does_not_wait() -> None:
    batcher: Batcher[int] = Batcher(BUDGETS, max_wait_s=1.0)
    for owner in range(12):
        batcher.add(piece(owner, 10, at=owner / 1000))
    assert batcher.wait_s(0.012, more_coming=True) == 0.0
    assert len(batcher.next(0.012, more_coming=True)) == 10


def test_cancelled_items_leave_with_all_their_pieces() -> None:
    batcher: Batcher[int] = Batcher(BUDGETS, 0.0)
    for number in range(3):
        batcher.add(piece("gone", 10, number))
    batcher.add(piece("stays", 10))
    assert [p.payload for p in batcher.cancel("gone")] == [0, 1, 2]
    assert batcher.cancel("gone") == []
    assert taken(batcher) == [("stays", 0)]
    batcher.check_integrity()


def test_batches_shrink_to_the_time_that_a_forward_should_take() -> None:
    batcher: Batcher[int] = Batcher(BUDGETS, 0.0, forward_s=0.5)
    for owner in range(40):
        batcher.add(piece(owner, 4))
    assert len(taken(batcher)) == 3  # an eighth of the budget until the device is known
    batcher.took("vision", 12, 1.0)  # 12 a second: 6 in half a second
    assert len(taken(batcher)) == 1
    batcher.took("audio", 12, 0.01)  # another lane
    assert len(taken(batcher)) == 1
    for _ in range(30):
        batcher.took("vision", 12, 0.12)  # 100 a second
    assert len(taken(batcher)) == 12
    for _ in range(30):
        batcher.took("vision", 12, 0.001)
    assert len(taken(batcher)) == 40 - 17  # 12,000 a second: all that is left, below the budget of 100
    batcher.check_integrity()


def test_the_time_of_a_forward_never_raises_the_budget() -> None:
    batcher: Batcher[int] = Batcher(BUDGETS, 0.0, forward_s=0.5)
    batcher.took("vision", 1000, 0.001)
    for owner in range(12):
        batcher.add(piece(owner, 10))
    assert len(taken(batcher)) == 10
    batcher.took("vision", 0, 0.0)
    assert len(taken(batcher)) == 2


def test_a_piece_that_takes_longer_than_a_forward_should_still_goes() -> None:
    batcher: Batcher[int] = Batcher(BUDGETS, 0.0, forward_s=0.1)
    batcher.took("vision", 1, 100.0)
    batcher.add(piece("slow", 90))
    batcher.add(piece("thumbnail", 1))
    assert [taken(batcher), taken(batcher)] == [[("slow", 0)], [("thumbnail", 0)]]


class Arrivals(RuleBasedStateMachine):
    """Nothing is lost, doubled, reordered within an owner, or above the budget."""

    def __init__(self) -> None:
        super().__init__()
        self.batcher: Batcher[int] = Batcher(BUDGETS, max_wait_s=0.005, forward_s=0.1)
        self.now = 0.0
        self.next_number = 0
        self.expected: dict[tuple[Lane, int], list[int]] = {}

    @rule(owner=st.integers(0, 6), cost=st.integers(1, 130), lane=st.sampled_from(["vision", "audio"]))
    def arrive(self, owner: int, cost: int, lane: Lane) -> None:
        self.batcher.add(Piece(owner, lane, cost, self.now, self.next_number))
        self.expected.setdefault((lane, owner), []).append(self.next_number)
        self.next_number += 1

    @rule(seconds=st.floats(0, 0.01))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(owner=st.integers(0, 6))
    def cancel(self, owner: int) -> None:
        dropped = sorted(p.payload for p in self.batcher.cancel(owner))
        wanted = sorted(n for lane in BUDGETS for n in self.expected.pop((lane, owner), []))
        assert dropped == wanted

    @rule(lane=st.sampled_from(["vision", "audio"]), cost=st.integers(1, 130), seconds=st.floats(1e-4, 10))
    def embed(self, lane: Lane, cost: int, seconds: float) -> None:
        self.batcher.took(lane, cost, seconds)

    @precondition(lambda self: any(self.expected.values()))
    @rule(more=st.booleans())
    def take(self, more: bool) -> None:
        wait = self.batcher.wait_s(self.now, more_coming=more)
        assert wait is not None
        batch = self.batcher.next(self.now, more_coming=more)
        assert bool(batch) == (wait == 0.0)
        if not batch:
            return
        lane = batch[0].lane
        assert all(p.lane == lane for p in batch)
        assert len(batch) == 1 or sum(p.cost for p in batch) <= BUDGETS[lane]
        for p in batch:
            assert self.expected[(lane, p.owner)].pop(0) == p.payload  # type: ignore[index]

    @invariant()
    def books_agree(self) -> None:
        self.batcher.check_integrity()


TestArrivals = Arrivals.TestCase
TestArrivals.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
