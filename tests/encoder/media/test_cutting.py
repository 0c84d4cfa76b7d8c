"""Runs and slices of any clip: nothing lost, nothing twice, each run begins at a keyframe of its own."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from transom.encoder.media.cutting import RUN_UNITS, cut, slices

STAMPS = st.sets(st.integers(0, 2000), min_size=1, max_size=200).map(sorted)


@given(STAMPS, STAMPS, st.integers(1, 3))
def test_runs_are_the_goals_in_order_and_need_nothing_of_each_other(
    goals: list[int], keyframes: list[int], patch: int
) -> None:
    runs = cut(goals, keyframes, patch)
    assert [goal for run in runs for goal in run.goals] == goals
    assert [run.first for run in runs] == [goals.index(run.goals[0]) for run in runs]
    assert [run.end for run in runs] == [run.goals[0] for run in runs[1:]] + [None]
    for run in runs:
        for goal, key in zip(run.goals, run.keys, strict=True):
            assert key in keyframes
            assert key == max((one for one in keyframes if one <= goal), default=keyframes[0])
    for before, run in itertools.pairwise(runs):
        assert run.first % patch == 0  # a unit is never cut
        assert run.keys[0] > before.goals[-1]  # decoding it passes none of the frames before
        assert len(before.goals) >= RUN_UNITS * patch


def test_one_keyframe_is_one_run_and_many_are_many() -> None:
    goals = list(range(0, 400, 10))
    assert len(cut(goals, [0], 2)) == 1
    assert len(cut(goals, goals, 2)) == 40 // 2 // RUN_UNITS


@given(st.integers(1, 300), st.integers(1, 20), st.integers(1, 3), st.integers(1, 20))
def test_slices_join_to_the_run(goals_len: int, units: int, patch: int, first: int) -> None:
    parts = slices(goals_len, units, patch, first_units=first)
    assert parts[0][0] == 0
    assert parts[-1][1] == goals_len
    assert all(left[1] == right[0] for left, right in itertools.pairwise(parts))
    assert all(0 < stop - begin <= max(units, first) * patch for begin, stop in parts)
    assert all(begin % patch == 0 for begin, _ in parts)
    assert parts[0][1] <= first * patch
