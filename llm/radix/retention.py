"""Which SWA windows of a request to keep, so that later requests can hit inside of it: a pure policy.

Used by the workers when a prompt is admitted and when a request ends. Knows neither tree nor pools.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from transom.llm.radix.node import Rank


class Window(NamedTuple):
    """Token positions from start to end whose SWA pages are worth keeping."""

    start: int
    end: int
    rank: Rank


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """`window` in tokens as in RadixTree; one extra every `interval` tokens up to position `interval_limit`.

    `max_extra_tokens` caps what one request keeps beyond the window at its end. An interval of 0 keeps none.
    """

    window: int
    page_size: int
    interval: int = 4096
    interval_limit: int = 65536
    max_extra_tokens: int = 8192

    def __post_init__(self) -> None:
        if self.window < 1 or self.page_size < 1:
            raise ValueError(f"window {self.window} and page_size {self.page_size} must be at least 1")
        if min(self.interval, self.interval_limit, self.max_extra_tokens) < 0:
            raise ValueError("interval, interval_limit and max_extra_tokens must not be negative")

    def window_start(self, length: int) -> int:
        """Return the position from which SWA pages must stay for a request of `length` tokens.

        A further page is kept in front, because neither a cut at the last full page nor a repeat of the same
        prompt, which must compute its last token, ends exactly at `length`.
        """
        last_hit = max(length - 1, 0) // self.page_size * self.page_size
        return max(last_hit - self.window, 0) // self.page_size * self.page_size


def plan_retention(
    policy: RetentionPolicy,
    length: int,
    *,
    turn_ends: Sequence[int] = (),
    branch_points: Sequence[int] = (),
) -> list[Window]:
    """Return the windows to keep of the first `length` tokens: sorted, disjoint, cut at full pages.

    `turn_ends` are ascending boundaries where another request may leave this one; the first of them ends the
    system prompt. `branch_points` are places where requests are known to part: `Match.prefix_len` where it
    exceeds `Match.length`, or what an in-flight request shares with a waiting one. The end of the request is
    always kept; then, while the cap allows, branch points, system prompt, turns from the latest back, and
    intervals from the front.
    """
    wanted: list[tuple[int, Rank]] = [(point, Rank.TAIL) for point in branch_points]
    wanted += [(end, Rank.EXTRA) for end in (*turn_ends[:1], *reversed(turn_ends[1:]))]
    if policy.interval:
        last = min(policy.interval_limit, length)
        wanted += [(end, Rank.EXTRA) for end in range(policy.interval, last + 1, policy.interval)]
    budget = policy.max_extra_tokens
    chosen = [_window(policy, length, Rank.TAIL)]
    for boundary, rank in wanted:
        if not 0 < boundary <= length:
            continue
        window = _window(policy, boundary, rank)
        new = _uncovered(window, chosen)
        if 0 < new <= budget:
            budget -= new
            chosen.append(window)
        elif new == 0:
            chosen.append(window)
    return _disjoint(chosen)


def complement(windows: Iterable[Window], start: int, end: int) -> list[tuple[int, int]]:
    """Return the ranges of [start, end) outside of all sorted, disjoint windows: SWA pages that may go."""
    gaps = []
    for window in windows:
        if window.start >= end:
            break
        if window.start > start:
            gaps.append((start, window.start))
        start = max(start, window.end)
    if start < end:
        gaps.append((start, end))
    return gaps


def turn_ends(token_ids: ArrayLike, end_token_id: int) -> list[int]:
    """Return the positions right after each end-of-turn token, ascending."""
    positions = np.flatnonzero(np.asarray(token_ids) == end_token_id) + 1
    return [int(position) for position in positions]


def _window(policy: RetentionPolicy, boundary: int, rank: Rank) -> Window:
    return Window(policy.window_start(boundary), boundary // policy.page_size * policy.page_size, rank)


def _uncovered(window: Window, chosen: Sequence[Window]) -> int:
    covered = sorted(w for w in chosen if w.start < window.end and w.end > window.start)
    return sum(end - start for start, end in complement(covered, window.start, window.end))


def _disjoint(windows: Sequence[Window]) -> list[Window]:
    """Cut overlapping windows apart, the higher rank winning, and join neighbours of one rank."""
    cuts = sorted({edge for window in windows for edge in window[:2]})
    joined: list[Window] = []
    for start, end in pairwise(cuts):
        ranks = [window.rank for window in windows if window.start <= start and end <= window.end]
        if not ranks:
            continue
        rank = max(ranks)
        if joined and joined[-1].end == start and joined[-1].rank == rank:
            joined[-1] = Window(joined[-1].start, end, rank)
        else:
            joined.append(Window(start, end, rank))
    return joined
