"""Ids of requests that have ended lately, for messages that come too early or too late.

Any stage, event loop. Knows nothing of what the requests were.
"""

from __future__ import annotations

from collections import OrderedDict


class RecentIds:
    """Ids remembered for a while, because an abort may overtake what it is about. Bounded."""

    def __init__(self, keep_s: float = 60.0, limit: int = 100_000) -> None:
        self._keep_s = keep_s
        self._limit = limit
        self._ids: OrderedDict[str, float] = OrderedDict()

    def add(self, request_id: str, now_s: float) -> None:
        self._ids[request_id] = now_s
        self._ids.move_to_end(request_id)
        while self._ids and (
            len(self._ids) > self._limit or next(iter(self._ids.values())) < now_s - self._keep_s
        ):
            self._ids.popitem(last=False)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids
