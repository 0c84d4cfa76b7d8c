"""What was handed to the transport lately: it may be lost if the connection to its taker ends now.

Any stage, event loop. Knows nothing of what was sent.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class _Sent(NamedTuple):
    taker: str
    request_id: str
    gateway: str
    at_s: float


class UnderWay:
    """Remembers whose requests a peer was sent something of. Bounded: the oldest is forgotten."""

    def __init__(self, keep_s: float = 60.0, limit: int = 1024) -> None:
        self._keep_s = keep_s
        self._sent: deque[_Sent] = deque(maxlen=limit)

    def add(self, taker: str, request_id: str, gateway: str, now_s: float) -> None:
        """Note that all of a request that `taker` needs is sent."""
        self._sent.append(_Sent(taker, request_id, gateway, now_s))

    def lost(self, taker: str, now_s: float) -> set[tuple[str, str]]:
        """Return (request id, gateway) of what may not have come to a taker, and forget it."""
        gone = {
            (one.request_id, one.gateway)
            for one in self._sent
            if one.taker == taker and now_s - one.at_s <= self._keep_s
        }
        self._sent = deque((one for one in self._sent if one.taker != taker), self._sent.maxlen)
        return gone
