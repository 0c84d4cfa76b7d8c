"""Limits of single API keys: requests a minute and requests at once, with the headers that tell of them.

Gateway process; the clock is injected. A key's own limits say nothing about room: that is admission's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from transom.errors import RateLimitError
from transom.gateway.api_keys import ApiKey

_MINUTE_S = 60.0
LIMIT_HEADERS = (
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
    "x-ratelimit-limit-inflight",
    "x-ratelimit-remaining-inflight",
)


class TokenBucket:
    """Lets `per_minute` requests through at once at most, and refills evenly within a minute."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self._limit = per_minute
        self._left = float(per_minute)
        self._at_s = now_s

    def _refill(self, now_s: float) -> None:
        gained = max(0.0, now_s - self._at_s) * self._limit / _MINUTE_S
        self._left = min(float(self._limit), self._left + gained)
        self._at_s = max(self._at_s, now_s)

    def take(self, now_s: float) -> float:
        """Take one and return 0, or return the seconds until there is one."""
        self._refill(now_s)
        if self._left >= 1:
            self._left -= 1
            return 0.0
        return (1 - self._left) * _MINUTE_S / self._limit

    def left(self, now_s: float) -> int:
        """Return how many could be taken now."""
        self._refill(now_s)
        return int(self._left)

    def full_in_s(self, now_s: float) -> float:
        """Return the seconds until all are there again."""
        self._refill(now_s)
        return (self._limit - self._left) * _MINUTE_S / self._limit


@dataclass(slots=True)
class _State:
    key: ApiKey
    bucket: TokenBucket | None
    inflight: int = 0


class Quotas:
    """The state of every key.

    `count` is told of each request's label and what became of it here, `at_once` of each label's changes.
    """

    def __init__(
        self,
        keys: Iterable[ApiKey],
        *,
        count: Callable[[str, str], None],
        at_once: Callable[[str, int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._count = count
        self._at_once = at_once
        now_s = clock()
        self._states = {
            key.number: _State(
                key,
                TokenBucket(key.limits.requests_per_minute, now_s)
                if key.limits.requests_per_minute
                else None,
            )
            for key in keys
        }

    @contextmanager
    def hold(self, key: ApiKey) -> Iterator[None]:
        """Count a request while it is answered; raise RateLimitError when the key may not have it."""
        state = self._states[key.number]
        most = key.limits.max_inflight
        if most and state.inflight >= most:
            self._count(key.label, "too_many_at_once")
            raise RateLimitError(
                f"{state.inflight} requests of this key are in work, at most {most} are allowed",
                retry_after_s=1,
            )
        if state.bucket is not None:
            wait_s = state.bucket.take(self._clock())
            if wait_s > 0:
                self._count(key.label, "too_many_a_minute")
                raise RateLimitError(
                    f"this key may send {key.limits.requests_per_minute} requests a minute,"
                    f" the next one in {wait_s:.1f} s",
                    retry_after_s=wait_s,
                )
        self._count(key.label, "admitted")
        state.inflight += 1
        self._at_once(key.label, 1)
        try:
            yield
        finally:
            state.inflight -= 1
            self._at_once(key.label, -1)

    def headers(self, key: ApiKey) -> dict[str, str]:
        """Return what a client is told of its limits now; nothing where there are none."""
        state = self._states[key.number]
        values = [""] * len(LIMIT_HEADERS)
        if state.bucket is not None:
            now_s = self._clock()
            values[0] = str(key.limits.requests_per_minute)
            values[1] = str(state.bucket.left(now_s))
            values[2] = f"{state.bucket.full_in_s(now_s):.3f}s"
        if key.limits.max_inflight:
            values[3] = str(key.limits.max_inflight)
            values[4] = str(key.limits.max_inflight - state.inflight)
        return {name: value for name, value in zip(LIMIT_HEADERS, values, strict=True) if value}
