"""Allocation of runs of pages: best fit over sorted free extents, neighbours joined at once.

Any process that maps an arena, under its lock. An entry takes exactly its pages: slabs or buddies would
waste a quarter of an arena on embeddings of any length, and this state follows from the used runs alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transom.shared_cache.layout import Tables, Word


class Extents:
    """The free extents of an arena: sorted, apart from each other, in shared memory."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._rows = tables.extents

    @property
    def free(self) -> NDArray[Any]:
        """The free extents as (count, [start, pages])."""
        return self._rows[: self._tables.words[Word.FREE_EXTENTS]]

    def take(self, pages: int) -> int | None:
        """Take a run from the smallest extent that holds it; None if none does."""
        free = self.free
        lengths = free[:, 1]
        fitting = np.flatnonzero(lengths >= pages)
        if not len(fitting):
            return None
        at = int(fitting[lengths[fitting].argmin()])
        start, length = int(free[at, 0]), int(free[at, 1])
        if length == pages:
            self._remove(at)
        else:
            free[at] = (start + pages, length - pages)
        self._tables.count(Word.USED_PAGES, pages)
        return start

    def give(self, start: int, pages: int) -> None:
        """Return a run, joining it with its free neighbours."""
        free = self.free
        count = len(free)
        at = int(np.searchsorted(free[:, 0], start))
        end = start + pages
        joins_left = at > 0 and int(free[at - 1, 0]) + int(free[at - 1, 1]) == start
        joins_right = at < count and int(free[at, 0]) == end
        self._tables.count(Word.USED_PAGES, -pages)
        if joins_left and joins_right:
            free[at - 1, 1] += pages + int(free[at, 1])
            self._remove(at)
        elif joins_left:
            free[at - 1, 1] += pages
        elif joins_right:
            free[at] = (start, int(free[at, 1]) + pages)
        else:
            self._rows[at + 1 : count + 1] = self._rows[at:count].copy()
            self._rows[at] = (start, pages)
            self._tables.words[Word.FREE_EXTENTS] = count + 1

    def _remove(self, at: int) -> None:
        count = self._tables.words[Word.FREE_EXTENTS]
        self._rows[at : count - 1] = self._rows[at + 1 : count].copy()
        self._tables.words[Word.FREE_EXTENTS] = count - 1

    def reset(self, used: NDArray[Any]) -> None:
        """Set the free extents to what the used runs leave."""
        free = gaps(used, self._tables.geometry.pages)
        self._rows[: len(free)] = free
        self._tables.words[Word.FREE_EXTENTS] = len(free)
        self._tables.words[Word.USED_PAGES] = int(used[:, 1].sum())


def gaps(used: NDArray[Any], pages: int) -> NDArray[Any]:
    """Return the extents that used runs (count, [start, pages]), sorted and apart, leave of `pages`."""
    ends = np.concatenate([[0], used[:, 0] + used[:, 1]])
    starts = np.concatenate([used[:, 0], [pages]])
    between = np.stack([ends, starts - ends], axis=1)
    return between[between[:, 1] > 0]


def choose_victims(
    free: NDArray[Any], coldest: Iterable[tuple[int, int, int]], pages: int
) -> list[int] | None:
    """Choose which entries to evict for a run of `pages`; None when all of them would not do.

    `coldest` yields (slot, start, pages) from the least recently used on. The smallest number of coldest
    entries that can make a run is looked at, and of those only the ones that the run needs are named,
    the fewest bytes first: a cold entry that would help nobody stays.
    """
    free_starts = free[:, 0]
    free_ends = free_starts + free[:, 1]
    # Runs of looked-at entries and the free extents beside them, by either end.
    run_start: dict[int, int] = {}
    run_end: dict[int, int] = {}
    looked_at: list[tuple[int, int, int]] = []
    for entry in coldest:
        looked_at.append(entry)
        low, high = entry[1], entry[1] + entry[2]
        if low in run_start:
            low = run_start.pop(low)
            del run_end[low]
        else:
            at = int(np.searchsorted(free_ends, low))
            if at < len(free) and int(free_ends[at]) == low:
                low = int(free_starts[at])
        if high in run_end:
            high = run_end.pop(high)
            del run_start[high]
        else:
            at = int(np.searchsorted(free_starts, high))
            if at < len(free) and int(free_starts[at]) == high:
                high = int(free_ends[at])
        run_start[high], run_end[low] = low, high
        if high - low >= pages:
            members = sorted((start, size, slot) for slot, start, size in looked_at if low <= start < high)
            return _cheapest(members, low, high, pages)
    return None


def _cheapest(members: list[tuple[int, int, int]], low: int, high: int, pages: int) -> list[int]:
    """Return the neighbouring members of a run whose eviction frees `pages` at the fewest bytes."""
    best: tuple[int, int, int] | None = None
    first = 0
    weight = 0
    for last, (_, size, _) in enumerate(members):
        weight += size
        right = members[last + 1][0] if last + 1 < len(members) else high
        while right - _left(members, first, low) >= pages:
            if best is None or weight < best[0]:
                best = (weight, first, last)
            if first == last:
                break
            weight -= members[first][1]
            first += 1
    assert best is not None
    return [slot for _, _, slot in members[best[1] : best[2] + 1]]


def _left(members: list[tuple[int, int, int]], first: int, low: int) -> int:
    return low if first == 0 else members[first - 1][0] + members[first - 1][1]


def coldest_first(slots: NDArray[Any], last_used: NDArray[Any], head: int = 64) -> Iterator[int]:
    """Yield slots from the least recently used on; the few that are needed come without a full sort."""
    if len(slots) > head:
        near = np.argpartition(last_used, head)[:head]
        yield from slots[near[np.argsort(last_used[near])]].tolist()
        yield from slots[np.argsort(last_used)[head:]].tolist()
    else:
        yield from slots[np.argsort(last_used)].tolist()
