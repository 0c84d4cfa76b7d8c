"""The choice of frames: limits, order, ends, and agreement between rates and times."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transom.encoder.media.sampling import sample_frames, sampled_count


@given(
    total=st.integers(1, 5000),
    rate=st.floats(1, 120),
    fps=st.floats(0.1, 60),
    low=st.integers(1, 64),
    high=st.integers(1, 400),
    start=st.floats(-10, 10),
)
def test_sampled_frames_are_within_all_limits(
    total: int, rate: float, fps: float, low: int, high: int, start: float
) -> None:
    high = max(low, high)
    times = [start + number / rate for number in range(total)]
    plan = sample_frames(times, fps=fps, min_frames=low, max_frames=high)
    count = len(plan.indices)
    assert list(plan.indices) == sorted(set(plan.indices))
    assert plan.indices[0] == 0
    assert 0 <= plan.indices[-1] < total
    assert count <= max(high, 2)
    assert count == 1 or count % 2 == 0 or count == total
    if total >= 2:
        assert plan.indices[-1] == total - 1
        assert count >= 2
    assert plan.timestamps == pytest.approx([index / rate for index in plan.indices], abs=1e-6)


@pytest.mark.parametrize(
    ("total", "rate", "wanted"),
    [
        (300, 30, 10),
        (125, 25, 8),
        (9, 10, 8),
        (1, 25, 1),
        (2, 25, 2),
        (3, 25, 2),
        (330, 30, 10),
        (360, 30, 12),
    ],
)
def test_one_frame_a_second_rounded_down_to_even(total: int, rate: int, wanted: int) -> None:
    assert sampled_count(total, total / rate, fps=1, min_frames=8, max_frames=3600) == wanted


def test_times_rounded_to_milliseconds_change_nothing() -> None:
    for total in range(2, 1200, 7):
        exact = [number / 30 for number in range(total)]
        rounded = [round(time, 3) for time in exact]
        plans = [sample_frames(times, fps=1, min_frames=8, max_frames=3600) for times in (exact, rounded)]
        assert plans[0].indices == plans[1].indices, total


def test_more_frames_asked_than_exist() -> None:
    plan = sample_frames([n / 10 for n in range(9)], fps=1, min_frames=16, max_frames=16)
    assert plan.indices == (0, 1, 2, 3, 5, 6, 7, 8)


def test_indices_are_an_even_spread() -> None:
    plan = sample_frames([n / 25 for n in range(125)], fps=1, min_frames=8, max_frames=3600)
    assert plan.indices == tuple(np.linspace(0, 124, 8).round().astype(int))


def test_no_frames_is_refused() -> None:
    with pytest.raises(ValueError, match="without frames"):
        sample_frames([], fps=1, min_frames=1, max_frames=2)
