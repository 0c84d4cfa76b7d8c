"""Stop strings over text that comes in pieces: nothing that might belong to one is let out early.

Pure and incremental: the result doesn't depend on where the stream was cut. Gateway process.
"""

from __future__ import annotations

from collections.abc import Sequence

from transom.gateway.reasoning_parser import partial_suffix


class StopMatcher:
    """Ends the text before the stop string that is complete first."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """Return the text that is certainly before any stop string; "" once one was hit."""
        if self.hit is not None or not self._stops:
            return "" if self.hit is not None else text
        self._held += text
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if ends:
            _, at, self.hit = min(ends)
            out, self._held = self._held[:at], ""
            return out
        keep = max(partial_suffix(self._held, stop) for stop in self._stops)
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out

    def finish(self) -> str:
        """Return what was held back; the text has ended without a stop string."""
        out, self._held = self._held, ""
        return out
