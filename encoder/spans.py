"""When each stage worked: on one item for its trace, and on all items for the encoder's timeline.

Encoder process (front), event loop; times are of the machine's monotonic clock, which ranks share. Only
times and counts are kept: no ids, no addresses, no media.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

STAGES = ("fetch", "decode", "preprocess", "batch", "forward", "send")
_MERGE_ABOVE = 24  # spans of one stage of one item
_EVENTS = 16_384
Interval = tuple[float, float]


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as disjoint ones in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def overlap_s(left: Iterable[Interval], right: Iterable[Interval]) -> float:
    """Return how long both were at work at once."""
    one, other = merge(left), merge(right)
    both = one + other
    return length_s(one) + length_s(other) - length_s(merge(both))


def length_s(intervals: Iterable[Interval]) -> float:
    """Return the summed length of intervals."""
    return sum(end - start for start, end in intervals)


@dataclass(frozen=True, slots=True)
class Event:
    """One stretch of work of a stage; `rank` where a rank did it, `pieces` in one forward."""

    stage: str
    start_s: float
    end_s: float
    rank: int | None = None
    pieces: int = 1


class Timeline:
    """The last stretches of work of all stages."""

    def __init__(self, limit: int = _EVENTS) -> None:
        self._events: deque[Event] = deque(maxlen=limit)

    def add(self, event: Event) -> None:
        """Keep one stretch; the oldest goes when there are too many."""
        self._events.append(event)

    def summary(self) -> dict[str, Any]:
        """Return, by stage, how long it worked and how much of that while a forward was running."""
        by_stage = {name: [(e.start_s, e.end_s) for e in self._events if e.stage == name] for name in STAGES}
        window = (
            max(e.end_s for e in self._events) - min(e.start_s for e in self._events) if self._events else 0.0
        )
        forwards = by_stage["forward"]
        return {
            "window_s": round(window, 6),
            "stages": {
                name: {
                    "events": len(intervals),
                    "busy_s": round(length_s(merge(intervals)), 6),
                    "during_forward_s": round(overlap_s(intervals, forwards), 6),
                }
                for name, intervals in by_stage.items()
            },
        }

    def chrome(self) -> list[dict[str, Any]]:
        """Return events of the Trace Event Format, which Perfetto and chrome://tracing open.

        Stretches of a stage that overlap go to lanes of their own: a lane shows one thing at a time.
        """
        shown: list[dict[str, Any]] = []
        lanes: dict[tuple[int, str, int | None], list[float]] = {}
        threads: dict[tuple[int, str, int | None, int], int] = {}
        origin_s = min((event.start_s for event in self._events), default=0.0)
        for event in sorted(self._events, key=lambda one: one.start_s):
            row = (STAGES.index(event.stage), event.stage, event.rank)
            ends = lanes.setdefault(row, [])
            lane = next((n for n, end_s in enumerate(ends) if end_s <= event.start_s), len(ends))
            ends[lane : lane + 1] = [event.end_s]
            thread = threads.setdefault((*row, lane), len(threads) + 1)
            shown.append(
                {
                    "name": event.stage,
                    "ph": "X",
                    "ts": round((event.start_s - origin_s) * 1e6, 1),
                    "dur": round((event.end_s - event.start_s) * 1e6, 1),
                    "pid": 1,
                    "tid": thread,
                    "args": {"pieces": event.pieces},
                }
            )
        for (position, stage, rank, lane), thread in threads.items():
            name = stage if rank is None else f"{stage} rank {rank}"
            order = {"sort_index": 10_000 * position + 100 * (rank or 0) + lane}
            about = {"ph": "M", "pid": 1, "tid": thread}
            shown.append({"name": "thread_name", "args": {"name": name}, **about})
            shown.append({"name": "thread_sort_index", "args": order, **about})
        return shown


class ItemSpans:
    """The stretches of work on one item. What is added goes to the timeline too."""

    def __init__(self, timeline: Timeline | None = None) -> None:
        self._timeline = timeline
        self._spans: dict[str, list[Interval]] = {}
        self._total_s: dict[str, float] = {}

    def add(self, stage: str, start_s: float, end_s: float, *, rank: int | None = None) -> None:
        """Book a stretch of a stage."""
        self._total_s[stage] = self._total_s.get(stage, 0.0) + end_s - start_s
        spans = self._spans.setdefault(stage, [])
        spans.append((start_s, end_s))
        if len(spans) > 2 * _MERGE_ABOVE:
            self._spans[stage] = thin(spans, _MERGE_ABOVE)
        # A forward serves many items: whoever runs it tells the timeline once.
        if self._timeline is not None and stage != "forward":
            self._timeline.add(Event(stage, start_s, end_s, rank))

    def timings_ms(self) -> dict[str, float]:
        """Return the time of each stage; what it did at once for several parts of the item counts double."""
        return {stage: round(total * 1000, 3) for stage, total in self._total_s.items()}

    def show(self, origin_s: float) -> tuple[tuple[str, float, float], ...]:
        """Return (stage, start, duration) in ms since `origin_s`, in order; what was before is left out."""
        found = [
            (max(0.0, (start - origin_s) * 1000), (end - max(start, origin_s)) * 1000, stage)
            for stage, spans in self._spans.items()
            for start, end in thin(spans, _MERGE_ABOVE)
            if end > origin_s
        ]
        return tuple((stage, round(start, 3), round(length, 3)) for start, length, stage in sorted(found))


def thin(intervals: Iterable[Interval], limit: int) -> list[Interval]:
    """Return at most `limit` disjoint intervals that cover all of them, closing the smallest gaps."""
    merged = merge(intervals)
    if len(merged) <= limit:
        return merged
    gaps = sorted(range(1, len(merged)), key=lambda at: merged[at][0] - merged[at - 1][1])
    closed = set(gaps[: len(merged) - limit])
    thinned: list[Interval] = []
    for at, (start, end) in enumerate(merged):
        if at in closed:
            thinned[-1] = (thinned[-1][0], end)
        else:
            thinned.append((start, end))
    return thinned
