"""How much of a prefix depends on one request alone: what its end would give back (engine thread).

Reads the tree's pins and changes nothing.
"""

from __future__ import annotations

from transom.llm.radix.contract import Lock, Match
from transom.llm.radix.node import Node


def alone(lock: Lock) -> tuple[int, int]:
    """Return the full and SWA tokens that nobody but this lock keeps from eviction."""
    full = swa = 0
    node: Node | None = lock.node
    while node is not None and node.parent is not None:
        if node.full_pins == 1:
            full += len(node)
        if node.end > lock.swa_start and node.swa_pins == 1:
            swa += len(node)
        node = node.parent
    return full, swa


def unpinned(match: Match) -> tuple[int, int]:
    """Return the full and SWA tokens of a match that count as evictable until it is locked."""
    full = swa = 0
    for node in match.path:
        end = min(node.end, match.length)
        if not node.full_pins:
            full += end - node.start
        if not node.swa_pins:
            swa += max(end - max(node.start, match.window_start), 0)
    return full, swa
