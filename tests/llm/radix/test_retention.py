"""The retention policy: which windows stay, in which order the cap takes them, and what may be freed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transom.llm.radix.node import Rank
from transom.llm.radix.retention import RetentionPolicy, Window, complement, plan_retention, turn_ends


def test_each_kind_of_boundary_keeps_one_window() -> None:
    policy = RetentionPolicy(window=10, page_size=1, interval=100, interval_limit=250)
    plan = plan_retention(policy, 400, turn_ends=[50, 320], branch_points=[150])
    assert plan == [
        Window(39, 50, Rank.EXTRA),
        Window(89, 100, Rank.EXTRA),
        Window(139, 150, Rank.TAIL),
        Window(189, 200, Rank.EXTRA),
        Window(309, 320, Rank.EXTRA),
        Window(389, 400, Rank.TAIL),
    ]


@pytest.mark.parametrize(
    ("cap", "kept"), [(0, [400]), (11, [150, 400]), (22, [50, 150, 400]), (33, [50, 150, 320, 400])]
)
def test_the_cap_takes_branches_then_the_system_prompt_then_the_latest_turn(
    cap: int, kept: list[int]
) -> None:
    policy = RetentionPolicy(window=10, page_size=1, interval=100, max_extra_tokens=cap)
    plan = plan_retention(policy, 400, turn_ends=[50, 220, 320], branch_points=[150])
    assert [window.end for window in plan] == kept


def test_the_window_at_a_boundary_serves_a_repeat_of_the_same_prompt() -> None:
    policy = RetentionPolicy(window=8, page_size=4, interval=0)
    (window,) = plan_retention(policy, 32)
    assert window.end == 32
    assert window.start <= 28 - 8, "the repeat may only reuse 28 tokens: its last one must be computed"


def test_turn_ends_are_positions_after_the_token() -> None:
    assert turn_ends([5, 7, 5, 5, 7], 7) == [2, 5]


@given(
    page=st.sampled_from([1, 4, 16]),
    window=st.integers(1, 40),
    length=st.integers(1, 500),
    ends=st.lists(st.integers(-5, 520), max_size=5).map(sorted),
    points=st.lists(st.integers(-5, 520), max_size=3),
    interval=st.integers(0, 90),
    cap=st.integers(0, 200),
)
def test_plans_are_sorted_disjoint_paged_and_within_the_cap(
    page: int, window: int, length: int, ends: list[int], points: list[int], interval: int, cap: int
) -> None:
    policy = RetentionPolicy(window, page, interval, max_extra_tokens=cap)
    plan = plan_retention(policy, length, turn_ends=ends, branch_points=points)
    (end_alone,) = plan_retention(RetentionPolicy(window, page, 0), length) or (Window(0, 0, Rank.TAIL),)

    edges = [edge for kept in plan for edge in kept[:2]]
    assert edges == sorted(edges)
    assert all(kept.start < kept.end for kept in plan)
    assert all(edge % page == 0 for edge in edges)
    assert sum(kept.end - kept.start for kept in plan) <= cap + end_alone.end - end_alone.start
    if length >= page:
        assert plan[-1].end == length // page * page
        assert plan[-1].rank is Rank.TAIL
        assert plan[-1].start <= max(plan[-1].end - window, 0)
    gaps = complement(plan, 0, length)
    covered = {position for kept in plan for position in range(kept.start, kept.end)}
    assert {position for low, high in gaps for position in range(low, high)} == set(range(length)) - covered


@pytest.mark.parametrize(
    "wrong", [{"window": 0}, {"page_size": 0}, {"interval": -1}, {"max_extra_tokens": -1}]
)
def test_settings_out_of_range_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must"):
        RetentionPolicy(**({"window": 8, "page_size": 1} | wrong))
