"""Which pieces of which items go into the next forward; pure policy with an injected clock.

Encoder process. Pieces are costed (patches, mel frames), never counted in requests. Knows no tensors.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

Lane = Literal["vision", "audio"]
LANES: tuple[Lane, ...] = ("vision", "audio")
T = TypeVar("T")
# Weight of the newest gap between arrivals in their running mean, and of the newest forward in its rate's.
_GAP_WEIGHT = 0.3
_RATE_WEIGHT = 0.3
# Share of a budget that is taken before the rate is known: a slow device should not start with its longest.
_FIRST_SHARE = 1 / 8


@dataclass(frozen=True, slots=True)
class Piece(Generic[T]):
    """One indivisible piece of an item: a picture, a video unit, a sound segment."""

    owner: Hashable
    lane: Lane
    cost: int
    arrived_s: float
    payload: T


@dataclass(slots=True)
class _Queue(Generic[T]):
    most: int  # no batch costs more, whatever the device does
    budget: int
    rate: float | None = None  # cost a second in recent forwards
    owners: OrderedDict[Hashable, deque[Piece[T]]] = field(default_factory=OrderedDict)
    cost: int = 0
    gap_s: float = float("inf")
    last_arrival_s: float | None = None

    @property
    def oldest_s(self) -> float:
        return min(pieces[0].arrived_s for pieces in self.owners.values())


class Batcher(Generic[T]):
    """Queues pieces and forms batches of one lane up to its budget.

    Owners take turns, one piece each, so that a long video delays a thumbnail by one batch at most.
    The pieces of one owner keep their order. A piece above the budget goes alone.

    With `forward_s` the budget is what the device embeds in that time as `took` told, and at most the
    given one: on a slow device a thumbnail must not wait for a batch that was made for a fast one.
    """

    def __init__(self, budgets: dict[Lane, int], max_wait_s: float, forward_s: float | None = None) -> None:
        first = 1.0 if forward_s is None else _FIRST_SHARE
        self._queues: dict[Lane, _Queue[T]] = {
            lane: _Queue(budgets[lane], max(1, int(budgets[lane] * first))) for lane in LANES
        }
        self._max_wait_s = max_wait_s
        self._forward_s = forward_s

    def took(self, lane: Lane, cost: int, seconds: float) -> None:
        """Learn from a forward of this cost."""
        queue = self._queues[lane]
        if self._forward_s is None or cost <= 0 or seconds <= 0:
            return
        rate = cost / seconds
        queue.rate = rate if queue.rate is None else queue.rate + _RATE_WEIGHT * (rate - queue.rate)
        queue.budget = min(queue.most, max(1, int(queue.rate * self._forward_s)))

    def add(self, piece: Piece[T]) -> None:
        """Queue a piece behind those of its owner."""
        queue = self._queues[piece.lane]
        pieces = queue.owners.get(piece.owner)
        if pieces is None:
            pieces = queue.owners[piece.owner] = deque()
            if queue.last_arrival_s is not None:
                gap = piece.arrived_s - queue.last_arrival_s
                known = min(queue.gap_s, 1.0)
                queue.gap_s = gap if queue.gap_s == float("inf") else known + _GAP_WEIGHT * (gap - known)
            queue.last_arrival_s = piece.arrived_s
        pieces.append(piece)
        queue.cost += piece.cost

    def cancel(self, owner: Hashable) -> list[Piece[T]]:
        """Drop and return the pieces of an owner."""
        dropped: list[Piece[T]] = []
        for queue in self._queues.values():
            pieces = queue.owners.pop(owner, deque())
            queue.cost -= sum(piece.cost for piece in pieces)
            dropped.extend(pieces)
        return dropped

    def _due_s(self, queue: _Queue[T], more_coming: bool) -> float:
        """Return when the queue should go: at once unless more is likely to join it soon."""
        oldest = queue.oldest_s
        if queue.cost >= queue.budget or not more_coming or queue.gap_s > self._max_wait_s:
            return oldest
        return oldest + self._max_wait_s

    def wait_s(self, now_s: float, *, more_coming: bool) -> float | None:
        """Return how long until a batch is due (0: now), or None when nothing is queued."""
        due = [self._due_s(queue, more_coming) for queue in self._queues.values() if queue.owners]
        return max(0.0, min(due) - now_s) if due else None

    def next(self, now_s: float, *, more_coming: bool) -> list[Piece[T]]:
        """Take the next due batch, of the lane that waits longest; empty when none is due.

        `more_coming` says whether further items are on their way to the batcher.
        """
        lanes = [
            queue
            for queue in self._queues.values()
            if queue.owners and self._due_s(queue, more_coming) <= now_s
        ]
        if not lanes:
            return []
        return self._take(min(lanes, key=lambda queue: queue.oldest_s))

    @staticmethod
    def _take(queue: _Queue[T]) -> list[Piece[T]]:
        batch: list[Piece[T]] = []
        left = queue.budget
        served: list[Hashable] = []
        turn = list(queue.owners)
        while turn:
            following: list[Hashable] = []
            for owner in turn:
                pieces = queue.owners[owner]
                if batch and pieces[0].cost > left:
                    continue
                piece = pieces.popleft()
                batch.append(piece)
                left -= piece.cost
                served.append(owner)
                if pieces:
                    following.append(owner)
            turn = following if left > 0 else []
        # Who was served goes behind who was not.
        for owner in dict.fromkeys(served):
            if queue.owners[owner]:
                queue.owners.move_to_end(owner)
            else:
                del queue.owners[owner]
        queue.cost -= sum(piece.cost for piece in batch)
        return batch

    @property
    def queued(self) -> dict[Lane, int]:
        """Queued cost by lane."""
        return {lane: queue.cost for lane, queue in self._queues.items()}

    def check_integrity(self) -> None:
        """Assert that the books agree with the queues."""
        for lane, queue in self._queues.items():
            assert all(queue.owners.values()), f"{lane}: an owner without pieces"
            cost = sum(piece.cost for pieces in queue.owners.values() for piece in pieces)
            assert cost == queue.cost, f"{lane}: cost {queue.cost}, queued {cost}"
            assert 1 <= queue.budget <= queue.most, f"{lane}: budget {queue.budget} of {queue.most}"
