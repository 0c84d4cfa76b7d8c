"""Which rank takes a piece, and what becomes of the pieces of a rank that died. Pure, with an injected clock.

Encoder process (front). Knows neither processes nor tensors.
"""

from __future__ import annotations

import signal
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

# A rank that ends so was ended by what it worked on; others may have been ended from outside.
CRASHES = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP}
)
MAX_MOVES = 3
Fate = Literal["move", "trial", "fail"]


@dataclass(frozen=True, slots=True)
class RankLoad:
    """What a rank that can take pieces has in work, in forwards, and what it has had in all."""

    index: int
    outstanding: float
    served: float


def choose_rank(loads: Iterable[RankLoad]) -> int | None:
    """Return the rank with the least in work, ties to the one that did least; None without ranks."""
    best = min(loads, key=lambda one: (one.outstanding, one.served, one.index), default=None)
    return None if best is None else best.index


def is_crash(exit_code: int) -> bool:
    """Tell whether a process ended by a fault of its own: by an exit or a signal of hardware or runtime."""
    return exit_code >= 0 or -exit_code in CRASHES


def fate(*, was_worked_on: bool, was_trial: bool, alone: bool, exit_code: int, moves: int) -> Fate:
    """Say what becomes of a piece whose rank died.

    `was_worked_on`: it was being prepared or embedded, so that it may be the cause. Such a piece gets one
    trial, on a rank that has nothing else; one that is the only suspect of a crash gets none.
    """
    if not was_worked_on:
        return "move" if moves < MAX_MOVES else "fail"
    if was_trial or (alone and is_crash(exit_code)):
        return "fail"
    return "trial"


class Quarantine:
    """Keys of items that ended a rank: they are refused for a while. Bounded in number and time."""

    def __init__(self, *, limit: int = 1000, ttl_s: float = 3600.0) -> None:
        self._limit = limit
        self._ttl_s = ttl_s
        self._until_s: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until_s)

    def add(self, key: str, now_s: float) -> None:
        """Refuse a key from now on."""
        self._until_s[key] = now_s + self._ttl_s
        self._until_s.move_to_end(key)
        while len(self._until_s) > self._limit:
            self._until_s.popitem(last=False)

    def holds(self, key: str, now_s: float) -> bool:
        """Tell whether a key is refused."""
        until_s = self._until_s.get(key)
        if until_s is not None and until_s <= now_s:
            del self._until_s[key]
            return False
        return until_s is not None


def split_threads(threads: int, ranks: int) -> list[int]:
    """Return the threads of each rank: equal shares of `threads`, at least one."""
    return [max(1, threads // ranks + (index < threads % ranks)) for index in range(ranks)]


def restart_delay_s(short_lives: int) -> float:
    """Return how long to wait before a rank is started again after so many short lives in a row."""
    return 0.0 if short_lives <= 1 else min(30.0, 0.25 * 2.0 ** (short_lives - 2))


def check_outstanding(outstanding: Sequence[float]) -> None:
    """Assert that no rank's load went below zero, but for rounding."""
    assert all(value > -1e-6 for value in outstanding), outstanding
