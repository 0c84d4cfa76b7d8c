"""How much the gateway takes on at once: choices, tokens and buffered bytes, each with a bound.

What doesn't fit waits for a while, fairly between API keys, or gets OverloadedError, a 429 with Retry-After.
Plain counters on the gateway's event loop; who is next says fair_queue.py.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from transom.errors import OverloadedError, PayloadTooLargeError, TransomError
from transom.gateway.fair_queue import Entry, FairQueue


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is: what fairness is between. `weight` is its share beside others'."""

    id: str = ""
    weight: float = 1.0


ANYBODY = Caller()


@dataclass(slots=True, eq=False)
class _Waiter:
    choices: int
    tokens: int
    granted: asyncio.Future[None] = field(default_factory=asyncio.Future)


class Admission:
    """Counts what is in work. Every hold is given back exactly once.

    `shared` says that there are several keys: then none of them may take all the room for bodies.
    """

    def __init__(
        self,
        *,
        max_choices: int,
        max_tokens: int,
        max_bytes: int,
        max_waiting: int = 0,
        max_wait_s: float = 0.0,
        shared: bool = False,
    ) -> None:
        self._max_choices = max_choices
        self._max_tokens = max_tokens
        self._max_bytes = max_bytes
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._shared = shared
        self._queue: FairQueue[_Waiter] = FairQueue()
        self._bytes_of: dict[str, int] = defaultdict(int)
        self.choices = 0
        self.tokens = 0
        self.buffered_bytes = 0

    @property
    def waiting(self) -> int:
        """Requests that wait for room."""
        return len(self._queue)

    @asynccontextmanager
    async def admit(self, caller: Caller, choices: int, tokens: int) -> AsyncIterator[None]:
        """Hold room for a request while it is in work; wait for it in the caller's turn.

        A request that is larger than the token bound alone is let in when nothing else is in work:
        otherwise it could never run.
        """
        if choices > self._max_choices or not self._fits(choices, tokens) or self._queue:
            await self._wait(caller, choices, tokens)
        else:
            self._queue.serve(caller.id, caller.weight, self._cost(choices, tokens))
            self._take(choices, tokens)
        try:
            yield
        finally:
            self._give_back(choices, tokens)

    def _fits(self, choices: int, tokens: int) -> bool:
        return self.choices + choices <= self._max_choices and (
            not self.choices or self.tokens + tokens <= self._max_tokens
        )

    def _cost(self, choices: int, tokens: int) -> float:
        """Return the part of the scarcer room that a request takes."""
        return max(choices / self._max_choices, tokens / self._max_tokens)

    def _take(self, choices: int, tokens: int) -> None:
        self.choices += choices
        self.tokens += tokens

    def _give_back(self, choices: int, tokens: int) -> None:
        self.choices -= choices
        self.tokens -= tokens
        self._grant()

    def _grant(self) -> None:
        """Give room to those in turn. The next one goes first even if a later one would fit already."""
        while (entry := self._queue.peek()) is not None:
            waiter = entry.item
            if waiter.granted.done():  # its client has just gone
                self._queue.remove(entry)
                continue
            if not self._fits(waiter.choices, waiter.tokens):
                break
            self._queue.pop()
            self._take(waiter.choices, waiter.tokens)
            waiter.granted.set_result(None)

    def _full(self, choices: int, tokens: int) -> OverloadedError:
        if self.choices + choices > self._max_choices:
            return OverloadedError(
                f"{self.choices} choices are in work, at most {self._max_choices} are allowed",
                retry_after_s=1,
            )
        return OverloadedError(
            f"{self.tokens} tokens are in work, {tokens} more would pass {self._max_tokens}",
            retry_after_s=2,
        )

    async def _wait(self, caller: Caller, choices: int, tokens: int) -> None:
        """Return when the room is held."""
        if choices > self._max_choices or not self._max_waiting:
            raise self._full(choices, tokens)
        if len(self._queue) >= self._max_waiting:
            self._make_way(caller, choices, tokens)
        waiter = _Waiter(choices, tokens)
        entry = self._queue.push(caller.id, caller.weight, self._cost(choices, tokens), waiter)
        self._grant()
        try:
            async with asyncio.timeout(self._max_wait_s):
                await waiter.granted
        except TimeoutError:
            if not self._settle(entry):
                raise self._full(choices, tokens) from None
        except asyncio.CancelledError:
            if self._settle(entry):
                self._give_back(choices, tokens)
            raise

    def _settle(self, entry: Entry[_Waiter]) -> bool:
        """Say whether room is held after all; take out one that waits no more."""
        granted = entry.item.granted
        if granted.cancelled():
            self._queue.remove(entry)
            self._grant()
            return False
        return granted.exception() is None

    def _make_way(self, caller: Caller, choices: int, tokens: int) -> None:
        """Send away the newest waiter of the key that has most, unless that would be the caller itself."""
        crowd = self._queue.longest()
        assert crowd is not None
        own = (self._queue.waiting(caller.id) + 1) / caller.weight
        if crowd.key == caller.id or own >= self._queue.crowding(crowd.key):
            raise self._full(choices, tokens)
        self._queue.remove(crowd)
        self._refuse(crowd, self._full(crowd.item.choices, crowd.item.tokens))

    def send_away(self, error: Callable[[], TransomError]) -> None:
        """Refuse all who wait."""
        while (entry := self._queue.pop()) is not None:
            self._refuse(entry, error())

    @staticmethod
    def _refuse(entry: Entry[_Waiter], error: TransomError) -> None:
        if not entry.item.granted.done():
            entry.item.granted.set_exception(error)

    @contextmanager
    def buffer(self, caller: Caller = ANYBODY) -> Iterator[Callable[[int], None]]:
        """Hold memory for a request's body or its answer.

        Call what is yielded with the size of each piece that came. It raises OverloadedError where others
        take the room, and PayloadTooLargeError where all of it would not do.
        What a client only announces counts for nothing: else a few idle connections could fill the room.
        A key among several may hold as much as is left to the others, so that there is always some left.
        """
        held = 0

        def grow(size_bytes: int) -> None:
            nonlocal held
            if held + size_bytes > self._max_bytes:
                raise PayloadTooLargeError(
                    f"this request or its answer alone takes more than {self._max_bytes} bytes, the limit of"
                    " all that is held at once: send less, stream the answer, or ask for fewer tokens,"
                    " choices or log-probabilities"
                )
            others = self.buffered_bytes - held
            left = self._max_bytes - self.buffered_bytes - size_bytes
            own = self._bytes_of[caller.id] + size_bytes
            if others and (left < 0 or (self._shared and own > max(left, size_bytes))):
                raise OverloadedError(
                    f"{self.buffered_bytes} bytes of requests and answers are held,"
                    f" {self._max_bytes} are allowed",
                    retry_after_s=1,
                )
            held += size_bytes
            self.buffered_bytes += size_bytes
            self._bytes_of[caller.id] += size_bytes

        try:
            yield grow
        finally:
            self.buffered_bytes -= held
            self._bytes_of[caller.id] -= held
            if not self._bytes_of[caller.id]:
                del self._bytes_of[caller.id]
