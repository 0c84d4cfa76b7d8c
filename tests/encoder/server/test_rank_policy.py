"""The rules of ranks: who takes a piece, what becomes of a dead rank's pieces; and spans of stages."""

from __future__ import annotations

import itertools
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transom.encoder.ranks.policy import (
    MAX_MOVES,
    Quarantine,
    RankLoad,
    choose_rank,
    fate,
    restart_delay_s,
    split_threads,
)
from transom.encoder.spans import Event, ItemSpans, Timeline, length_s, merge, overlap_s, thin

SEGV, KILL = -signal.SIGSEGV, -signal.SIGKILL


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6))
def test_the_rank_with_the_least_in_work_takes_the_piece(loads: list[tuple[int, int]]) -> None:
    ranks = [RankLoad(index, outstanding, served) for index, (outstanding, served) in enumerate(loads)]
    chosen = choose_rank(ranks)
    if not ranks:
        assert chosen is None
        return
    assert chosen is not None
    assert all((ranks[chosen].outstanding, ranks[chosen].served) <= (r.outstanding, r.served) for r in ranks)


@pytest.mark.parametrize(
    ("was_worked_on", "was_trial", "alone", "code", "moves", "wanted"),
    [
        (False, False, False, SEGV, 0, "move"),  # it only waited there
        (False, False, False, KILL, MAX_MOVES, "fail"),
        (True, False, False, SEGV, 0, "trial"),  # one of several: nobody knows which
        (True, False, True, SEGV, 0, "fail"),  # nothing else can have done it
        (True, False, True, 1, 0, "fail"),
        (True, False, True, KILL, 0, "trial"),  # ended from outside, perhaps
        (True, True, True, KILL, 1, "fail"),  # twice
        (True, True, True, SEGV, 1, "fail"),
    ],
)
def test_what_becomes_of_a_piece_whose_rank_died(
    was_worked_on: bool, was_trial: bool, alone: bool, code: int, moves: int, wanted: str
) -> None:
    found = fate(was_worked_on=was_worked_on, was_trial=was_trial, alone=alone, exit_code=code, moves=moves)
    assert found == wanted


@given(st.integers(1, 6), st.integers(0, 5))
def test_one_killer_ends_two_ranks_at_most_and_no_neighbour_fails(pieces: int, killer: int) -> None:
    """Run the rules on a batch with one piece that always crashes its rank."""
    killer %= pieces
    batch, deaths = set(range(pieces)), 1
    fates = {
        piece: fate(was_worked_on=True, was_trial=False, alone=pieces == 1, exit_code=SEGV, moves=0)
        for piece in batch
    }
    for piece, first in fates.items():
        if first == "trial" and piece == killer:
            deaths += 1
            again = fate(was_worked_on=True, was_trial=True, alone=True, exit_code=SEGV, moves=1)
            assert again == "fail"
        assert piece == killer or first == "trial"
    assert deaths <= 2


def test_quarantine_is_bounded_in_number_and_time() -> None:
    quarantine = Quarantine(limit=2, ttl_s=10)
    for number, key in enumerate("abc"):
        quarantine.add(key, float(number))
    assert [quarantine.holds(key, 3.0) for key in "abc"] == [False, True, True]
    assert not quarantine.holds("b", 11.0)
    assert len(quarantine) == 1


@given(st.integers(1, 64), st.integers(1, 16))
def test_threads_are_shared_out(threads: int, ranks: int) -> None:
    shares = split_threads(threads, ranks)
    assert min(shares) >= 1
    assert max(shares) - min(shares) <= 1
    assert sum(shares) == max(threads, ranks)


def test_a_rank_comes_back_at_once_and_then_ever_later() -> None:
    delays = [restart_delay_s(lives) for lives in range(1, 20)]
    assert delays[0] == 0.0
    assert delays == sorted(delays)
    assert delays[-1] == 30.0


intervals = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda pair: (float(pair[0]), float(sum(pair)))),
    max_size=30,
)


def cells(found: list[tuple[float, float]]) -> set[int]:
    return {cell for start, end in found for cell in range(int(start), int(end))}


@given(intervals, intervals)
def test_overlaps_are_those_of_the_cells_covered(
    left: list[tuple[float, float]], right: list[tuple[float, float]]
) -> None:
    assert length_s(merge(left)) == len(cells(left))
    assert overlap_s(left, right) == len(cells(left) & cells(right))


@given(intervals, st.integers(1, 8))
def test_thinning_keeps_what_is_covered_and_the_bound(found: list[tuple[float, float]], limit: int) -> None:
    thinned = thin(found, limit)
    assert len(thinned) <= limit
    assert cells(found) <= cells(thinned)
    assert thinned == merge(thinned)


stretches = st.tuples(st.sampled_from(("fetch", "decode", "forward")), st.integers(0, 50), st.integers(1, 9))


@given(st.lists(stretches, max_size=40))
def test_a_lane_of_the_timeline_shows_one_thing_at_a_time(found: list[tuple[str, int, int]]) -> None:
    timeline = Timeline(limit=30)
    for stage, start, length in found:
        timeline.add(Event(stage, float(start), float(start + length), 0 if stage == "forward" else None))
    shown = [event for event in timeline.chrome() if event["ph"] == "X"]
    assert len(shown) == min(len(found), 30)
    for thread in {event["tid"] for event in shown}:
        lane = sorted((one["ts"], one["dur"]) for one in shown if one["tid"] == thread)
        assert all(a[0] + a[1] <= b[0] + 0.5 for a, b in itertools.pairwise(lane))


def test_spans_of_an_item_are_bounded_and_their_times_exact() -> None:
    timeline = Timeline()
    spans = ItemSpans(timeline)
    for number in range(500):
        spans.add("decode", 10.0 + number, 10.25 + number)
    spans.add("forward", 12.0, 13.0)
    assert spans.timings_ms() == {"decode": 125_000.0, "forward": 1000.0}
    shown = spans.show(10.0)
    assert len(shown) <= 25
    assert ("forward", 2000.0, 1000.0) in shown
    late = spans.show(509.0)
    assert late == (("decode", 0.0, 250.0),)
    assert timeline.summary()["stages"]["decode"]["events"] == 500
    assert timeline.summary()["stages"]["forward"]["events"] == 0  # whoever runs it tells once
