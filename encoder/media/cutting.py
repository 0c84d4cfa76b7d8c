"""Cuts the sampled frames of a clip into runs that decode side by side; pure arithmetic.

Runs follow from the clip and the plan alone, never from how many workers there are. Knows nothing of
codecs or pixels.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from transom.encoder.media.wire import RunPlan

# A run costs a jump; runs of few units let more decoders share a clip.
RUN_UNITS = 4


def cut(goals: Sequence[int], keyframes: Sequence[int], temporal_patch: int) -> list[RunPlan]:
    """Cut at units that lie behind a keyframe of their own, every RUN_UNITS units or later.

    `keyframes` are ascending stamps, at least one. Frames before the first are reached from the first.
    """
    nearest = [max(bisect_right(keyframes, goal) - 1, 0) for goal in goals]
    starts = [0]
    for position in range(temporal_patch, len(goals), temporal_patch):
        is_free = nearest[position] > nearest[position - 1]
        if is_free and position - starts[-1] >= RUN_UNITS * temporal_patch:
            starts.append(position)
    runs = []
    for start, stop in zip(starts, [*starts[1:], len(goals)], strict=True):
        end = goals[stop] if stop < len(goals) else None
        keys = tuple(keyframes[number] for number in nearest[start:stop])
        runs.append(RunPlan(start, tuple(goals[start:stop]), keys, end))
    return runs


def slices(
    goals_len: int, slice_units: int, temporal_patch: int, *, first_units: int | None = None
) -> list[tuple[int, int]]:
    """Return (begin, stop) of what is decoded in one go of a run of so many goals."""
    first = (slice_units if first_units is None else first_units) * temporal_patch
    begins = [0, *range(first, goals_len, slice_units * temporal_patch)]
    return list(zip(begins, [*begins[1:], goals_len], strict=True))
