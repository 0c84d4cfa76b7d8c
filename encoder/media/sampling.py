"""Which frames of a video the model sees; pure arithmetic.

Runs in decode workers, and wherever a clip's cost must be known. Knows nothing of codecs or pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Times rounded to milliseconds make a clip of 10 s one of 9.9993 s.
_COUNT_ROUNDING = 0.01


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """Frames to decode: ascending indices in presentation order, and their times from the clip's start."""

    indices: tuple[int, ...]
    timestamps: tuple[float, ...]  # seconds


def sampled_count(
    total_frames: int,
    duration_s: float,
    *,
    fps: float,
    min_frames: int,
    max_frames: int,
    multiple: int = 2,
) -> int:
    """Return how many of `total_frames` frames to take, before duplicates are dropped.

    `fps` frames a second, within the limits and what exists, floored to a multiple of the temporal
    patch. A clip shorter than one temporal patch gives all that it has.
    """
    if total_frames < 1:
        raise ValueError("a clip without frames")
    wanted = max(duration_s * fps, float(min_frames))
    wanted = min(wanted, max_frames, total_frames)
    count = int(wanted + _COUNT_ROUNDING) // multiple * multiple
    return min(max(count, multiple), total_frames)


def sample_frames(
    times_s: Sequence[float],
    *,
    fps: float,
    min_frames: int,
    max_frames: int,
    multiple: int = 2,
    duration_s: float | None = None,
) -> SamplePlan:
    """Spread the sampled frames evenly over the frame indices, first and last frame included.

    `times_s` are the presentation times of all frames that exist, ascending, from any origin.
    Without `duration_s` the last frame is taken to last as long as the frames do on average.
    """
    total = len(times_s)
    if total < 1:
        raise ValueError("a clip without frames")
    start = times_s[0]
    if duration_s is None:
        span = times_s[-1] - start
        duration_s = span + (span / (total - 1) if total > 1 else 0.0)
    count = sampled_count(
        total, duration_s, fps=fps, min_frames=min_frames, max_frames=max_frames, multiple=multiple
    )
    indices = np.unique(np.linspace(0, total - 1, count).round().astype(np.int64))
    return SamplePlan(
        tuple(int(index) for index in indices),
        tuple(float(times_s[index] - start) for index in indices),
    )
