"""Which worker takes a request: the least loaded, ties to the one that waited longest, then by lot.

Pure policy over plain data, used by the gateway process.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A ready worker: `own_tokens` were given to it by this gateway, `reported_tokens` it says itself."""

    address: str
    own_tokens: int
    reported_tokens: float
    last_used_s: float


def score(candidate: Candidate) -> float:
    """Return the load in tokens; lower is better.

    A worker's own figure is older but counts other gateways' requests too, so the larger one holds.
    """
    return max(float(candidate.own_tokens), candidate.reported_tokens)


def choose(candidates: Iterable[Candidate], rng: random.Random) -> str | None:
    """Return the address that should take the next request; None when there is no candidate."""
    ranked = [(score(one), one.last_used_s, rng.random(), one.address) for one in candidates]
    return min(ranked)[3] if ranked else None
