"""A path of many nodes as one key: a match passes it with one comparison instead of one a node.

Made by the radix tree where a match had to walk far, cut by its node store where a node changes. Knows no
request and no pool.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from transom.llm.radix.keys import TOKEN_BYTES, common_tokens

if TYPE_CHECKING:
    from transom.llm.radix.node import Node


class PathIndex:
    """Nodes of which each is the parent of the next. `start` is where the first begins.

    For each of them is known: where it ends, how many live tokens there are in a row up to that end
    (`runs`), and after which of them a match may end at the latest (`usable`, -1: none). Both leave out what
    is live before `start`; that matters for the first nodes only, as far as all are live (`lead` of them).
    """

    __slots__ = ("ends", "lead", "live_len", "nodes", "pages", "raw", "runs", "start", "usable")

    def __init__(self, nodes: Sequence[Node], live_len: int) -> None:
        self.nodes = list(nodes)
        self.start = nodes[0].start
        self.live_len = live_len
        self.ends = [node.end for node in nodes]
        self.raw = b"".join([node.key for node in nodes])
        self.pages: NDArray[np.int64] = np.concatenate([node.pages for node in nodes])
        self.runs: list[int] = []
        self.usable: list[int] = []
        self.lead = 0
        run, last = 0, -1
        for at, node in enumerate(nodes):
            run = run + len(node) if node.live else 0
            if run >= live_len:
                last = at
            if node.live and self.lead == at:
                self.lead = at + 1
            self.runs.append(run)
            self.usable.append(last)
            node.index = self

    def passed(self, raw: bytes, stop: int) -> int:
        """Return how many of the nodes a key covers as a whole within its first `stop` tokens."""
        if not self.ends:
            return 0
        length = self.ends[-1] - self.start
        if self.ends[-1] <= stop and length * TOKEN_BYTES == len(self.raw):
            if raw.startswith(self.raw, self.start * TOKEN_BYTES):
                return len(self.ends)
        common = common_tokens(raw, self.start, self.raw, 0, min(length, stop - self.start))
        return bisect_right(self.ends, self.start + common)

    def last_usable(self, count: int, run_before: int) -> int:
        """Return after how many of the first `count` nodes a match may end at the latest; 0 for none."""
        lead = min(count, self.lead)
        if lead:
            run = run_before + self.ends[lead - 1] - self.start
            if run < self.live_len and run_before != self.start:
                lead = 0
        return max(lead, self.usable[count - 1] + 1)

    def run_after(self, count: int, run_before: int) -> int:
        """Return how many tokens in a row are live up to the end of the first `count` nodes."""
        return self.runs[count - 1] + (run_before if count <= self.lead else 0)

    def cut(self, node: Node) -> None:
        """Forget a node that is about to change, and those below."""
        keep = bisect_right(self.ends, node.start)
        for other in self.nodes[keep:]:
            other.index = None
        del self.nodes[keep:], self.ends[keep:]
        self.lead = min(self.lead, keep)
