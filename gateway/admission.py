"""How much the gateway takes on at once: choices, tokens and buffered bytes, each with a bound.

Full means OverloadedError, a 429 with Retry-After. Plain counters on the gateway's event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from transom.errors import OverloadedError


class Admission:
    """Counts what is in work. Every hold is given back exactly once."""

    def __init__(self, *, max_choices: int, max_tokens: int, max_bytes: int) -> None:
        self._max_choices = max_choices
        self._max_tokens = max_tokens
        self._max_bytes = max_bytes
        self.choices = 0
        self.tokens = 0
        self.buffered_bytes = 0

    @contextmanager
    def hold(self, choices: int, tokens: int) -> Iterator[None]:
        """Hold room for a request while it is in work.

        A request that is larger than the token bound alone is let in when nothing else is in work:
        otherwise it could never run.
        """
        if self.choices + choices > self._max_choices:
            raise OverloadedError(
                f"{self.choices} choices are in work, at most {self._max_choices} are allowed",
                retry_after_s=1,
            )
        if self.choices and self.tokens + tokens > self._max_tokens:
            raise OverloadedError(
                f"{self.tokens} tokens are in work, {tokens} more would pass {self._max_tokens}",
                retry_after_s=2,
            )
        self.choices += choices
        self.tokens += tokens
        try:
            yield
        finally:
            self.choices -= choices
            self.tokens -= tokens

    @contextmanager
    def buffer(self) -> Iterator[Callable[[int], None]]:
        """Hold memory for a request body: call what is yielded with the size of each piece that came.

        What a client only announces counts for nothing: else a few idle connections could fill the room.
        """
        held = 0

        def grow(size_bytes: int) -> None:
            nonlocal held
            others = self.buffered_bytes - held
            if others and self.buffered_bytes + size_bytes > self._max_bytes:
                raise OverloadedError(
                    f"{self.buffered_bytes} bytes of requests are held, {self._max_bytes} are allowed",
                    retry_after_s=1,
                )
            held += size_bytes
            self.buffered_bytes += size_bytes

        try:
            yield grow
        finally:
            self.buffered_bytes -= held
