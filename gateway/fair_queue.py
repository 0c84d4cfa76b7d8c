"""Who comes next when many keys wait for room: start-time fair queueing over keys.

Pure policy over plain data, used by the gateway's admission. Each key has a virtual time that its served
work moves on, by cost / weight; the entry that starts first in virtual time is next. A key that has waited
for nothing yet starts at the present, so that no backlog of another stands before it.
(Goyal, Vin, Cheng: Start-time Fair Queueing, SIGCOMM 1996.)
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Entry(Generic[T]):
    """One thing that waits. `order` tells entries of the same start apart."""

    key: str
    start: float
    cost: float
    order: int
    item: T


@dataclass(slots=True)
class _Flow(Generic[T]):
    weight: float = 1.0
    finish: float = 0.0  # where the key's next entry may start
    entries: deque[Entry[T]] = field(default_factory=deque)


class FairQueue(Generic[T]):
    """Entries of a key keep their order. Costs and weights are above zero."""

    def __init__(self) -> None:
        self._flows: dict[str, _Flow[T]] = {}
        self._now = 0.0
        self._orders = 0
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def waiting(self, key: str) -> int:
        """Return how many entries of a key wait."""
        flow = self._flows.get(key)
        return len(flow.entries) if flow is not None else 0

    def push(self, key: str, weight: float, cost: float, item: T) -> Entry[T]:
        """Let something wait."""
        assert cost > 0
        assert weight > 0
        flow = self._flows.setdefault(key, _Flow())
        flow.weight = weight
        entry = Entry(key, max(self._now, flow.finish), cost, self._orders, item)
        self._orders += 1
        flow.finish = entry.start + cost / weight
        flow.entries.append(entry)
        self._len += 1
        return entry

    def peek(self) -> Entry[T] | None:
        """Return what is next; it stays."""
        heads = [flow.entries[0] for flow in self._flows.values() if flow.entries]
        return min(heads, key=lambda entry: (entry.start, entry.order), default=None)

    def pop(self) -> Entry[T] | None:
        """Take what is next out; it counts as served."""
        entry = self.peek()
        if entry is not None:
            self._flows[entry.key].entries.popleft()
            self._len -= 1
            self._now = entry.start
            self._forget()
        return entry

    def serve(self, key: str, weight: float, cost: float) -> None:
        """Count something as served that never had to wait: nothing waits now."""
        assert not self._len
        flow = self._flows.setdefault(key, _Flow())
        self._now = max(self._now, flow.finish)
        flow.finish = self._now + cost / weight
        self._forget()

    def remove(self, entry: Entry[T]) -> None:
        """Take out what does not wait any more, unserved; later entries of the key move up.

        An entry that is out already stays out.
        """
        flow = self._flows.get(entry.key)
        if flow is None or entry not in flow.entries:
            return
        at = flow.entries.index(entry)
        del flow.entries[at]
        self._len -= 1
        following = entry.start
        for later in list(flow.entries)[at:]:
            later.start = max(self._now, following)
            following = later.start + later.cost / flow.weight
        flow.finish = following
        self._forget()

    def crowding(self, key: str) -> float:
        """Return how many entries of a key wait, by its weight."""
        flow = self._flows.get(key)
        return len(flow.entries) / flow.weight if flow is not None else 0.0

    def longest(self) -> Entry[T] | None:
        """Return the newest entry of the key that has most waiting, by its weight."""
        flows = [flow for flow in self._flows.values() if flow.entries]
        if not flows:
            return None
        return max(flows, key=lambda flow: len(flow.entries) / flow.weight).entries[-1]

    def _forget(self) -> None:
        """Drop keys whose past says nothing any more."""
        idle = [key for key, flow in self._flows.items() if not flow.entries and flow.finish <= self._now]
        for key in idle:
            del self._flows[key]

    def check_integrity(self) -> None:
        """Assert that counts agree, no start lies in the past and each key's entries are in order."""
        assert self._len == sum(len(flow.entries) for flow in self._flows.values())
        for flow in self._flows.values():
            starts = [entry.start for entry in flow.entries]
            assert starts == sorted(starts)
            assert all(start >= self._now for start in starts)
            if flow.entries:
                last = flow.entries[-1]
                assert flow.finish == last.start + last.cost / flow.weight
