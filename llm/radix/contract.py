"""What passes between the radix tree and the engine: the pools it frees to, matches, locks, results.

Used in prefill and decode workers. Knows neither torch nor requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from transom.llm.radix.node import Node, Pages

NO_PAGES: Pages = np.empty(0, np.int64)


class PagePools(Protocol):
    """The two pools behind the tree; every argument is a row of full pages, each page once."""

    def free_full(self, pages: Pages) -> None:
        """Take full pages back; their SWA pages have gone before."""

    def free_swa(self, pages: Pages) -> None:
        """Take back the SWA pages that these full pages map to, and clear the map there."""

    def move_swa(self, source: Pages, target: Pages) -> None:
        """Let `target`, so far unmapped, map to the SWA pages of `source`, which is unmapped afterwards."""

    def swa_mapped(self, pages: Pages) -> NDArray[np.bool_]:
        """Return for each full page whether it maps to an SWA page."""


@dataclass(frozen=True, slots=True)
class Match:
    """What the tree holds of a key; valid until the tree next changes.

    `length` tokens may be reused, and the SWA pages from `window_start` to there are live. `prefix_len`
    tokens have full pages: where it is larger, only missing SWA pages cut the match, and a window kept there
    on recomputing (plan_retention's branch_points) lets the next request hit.
    """

    length: int
    window_start: int
    prefix_len: int
    namespace: str
    page_size: int
    path: tuple[Node, ...]
    epoch: int
    runs: tuple[Pages, ...]  # the pages of the path and perhaps more, in order

    @property
    def pages(self) -> Pages:
        """The full pages of the `length` tokens; don't write to them."""
        count = self.length // self.page_size
        if not count:
            return NO_PAGES
        runs = self.runs
        return (runs[0] if len(runs[0]) >= count else np.concatenate(runs))[:count]


@dataclass(slots=True, eq=False)
class Lock:
    """A request's hold on its cached prefix: full pages from the root to `node`, SWA from `swa_start`."""

    node: Node
    namespace: str
    swa_start: int
    held: bool = True

    @property
    def length(self) -> int:
        return self.node.end


@dataclass(frozen=True, slots=True)
class Inserted:
    """The tree holds `length` tokens of the request; `pages` are to be used from the lock's former length on.

    Where they differ from the ones handed in, the tree had the prefix already and has freed the duplicates.
    """

    length: int
    pages: Pages
    duplicate_tokens: int
    healed_tokens: int


@dataclass(slots=True)
class TreeStats:
    """Running totals in tokens; many `swa_cut_tokens` beside few `hit_tokens`: windows are missing."""

    lookups: int = 0
    hit_tokens: int = 0
    swa_cut_tokens: int = 0
    inserted_tokens: int = 0
    duplicate_tokens: int = 0
    healed_tokens: int = 0
    full_evicted_tokens: int = 0
    swa_evicted_tokens: int = 0
