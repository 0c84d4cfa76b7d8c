"""Recounts from nodes and locks alone what the radix tree keeps incrementally; raises AssertionError.

Run by tests and by idle workers: some milliseconds for a million cached tokens. Changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from transom.llm.radix.contract import NO_PAGES, Lock, PagePools
from transom.llm.radix.keys import TOKEN_BYTES
from transom.llm.radix.node import Node, NodeStore, Rank


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """One pool in tokens: all of it, what is free, and what running requests hold outside of the tree."""

    capacity: int
    free: int
    held: int = 0


def check_tree(
    roots: Mapping[str, Node],
    store: NodeStore,
    locks: Collection[Lock],
    pools: PagePools,
    full: PoolCounts | None = None,
    swa: PoolCounts | None = None,
) -> None:
    """Assert every invariant of the tree; with counts also that each pool adds up to its capacity."""
    nodes: list[Node] = []
    for root in roots.values():
        assert root.parent is None, "a root has a parent"
        assert root.children or root.full_pins, "an empty root was left behind"
        stack = list(root.children.values())
        while stack:
            node = stack.pop()
            nodes.append(node)
            stack.extend(node.children.values())
        _check_children(root, store)
    for node in nodes:
        _check_node(node, store)
        _check_index(node, store)
        _check_children(node, store)
    _check_pages(nodes, pools)
    _check_pins([*roots.values(), *nodes], locks)
    _check_lists(nodes, store)
    _check_counters(nodes, store, full, swa)


def _check_node(node: Node, store: NodeStore) -> None:
    assert len(node) > 0, "an empty node"
    assert len(node) == len(node.pages) * store.page_size, "key and pages differ in length"
    assert len(node.key) == len(node.pages) * store.page_bytes, "key and positions differ in length"
    assert node.swa_pins <= node.full_pins, "an SWA pin without its full pin"
    assert node.live or not node.swa_pins, "a tombstone's SWA pages are pinned"
    assert node.live or node.children or node.full_pins, "a tombstone leaf that nobody uses"


def _check_index(node: Node, store: NodeStore) -> None:
    """Once for each index, at its first node: it must say what its nodes do."""
    index = node.index
    if index is None or index.nodes[0] is not node:
        assert index is None or any(node is other for other in index.nodes), "indexed elsewhere"
        return
    run, start = 0, index.start
    for at, (other, end) in enumerate(zip(index.nodes, index.ends, strict=True)):
        assert other.index is index, "a node left its index"
        assert at == 0 or other.parent is index.nodes[at - 1], "the index goes another way than the tree"
        assert (other.start, other.end) == (start, end), "indexed at another place"
        low, high = ((position - index.start) * TOKEN_BYTES for position in (start, end))
        assert index.raw[low:high] == other.key, "the index has another key"
        pages = index.pages[low // store.page_bytes : high // store.page_bytes]
        assert np.array_equal(pages, other.pages), "the index has other pages"
        run = run + len(other) if other.live else 0
        assert index.runs[at] == run, "the index has another liveness"
        start = end


def _check_children(node: Node, store: NodeStore) -> None:
    for first_page, child in node.children.items():
        assert child.parent is node, "a child points at another parent"
        assert child.start == node.end, "a child doesn't begin where its parent ends"
        assert child.key[: store.page_bytes] == first_page, "a child hangs under another page's key"


def _check_pages(nodes: list[Node], pools: PagePools) -> None:
    live = [node.pages for node in nodes if node.live]
    dead = [node.pages for node in nodes if not node.live]
    owned = np.concatenate([NO_PAGES, *live, *dead])
    if not len(owned):
        return
    seen = np.zeros(int(owned.max()) + 1, np.bool_)
    seen[owned] = True
    assert int(seen.sum()) == len(owned), "a page is in the tree twice"
    assert pools.swa_mapped(np.concatenate([NO_PAGES, *live])).all(), "a live node lacks SWA pages"
    assert not pools.swa_mapped(np.concatenate([NO_PAGES, *dead])).any(), "a tombstone has SWA pages"


def _check_pins(nodes: list[Node], locks: Collection[Lock]) -> None:
    full: Counter[int] = Counter()
    swa: Counter[int] = Counter()
    for lock in locks:
        assert lock.held, "a released lock is still listed"
        covered = lock.length
        node: Node | None = lock.node
        while node is not None:
            full[id(node)] += 1
            if node.parent is not None and node.end > lock.swa_start:
                assert node.live, "a lock's SWA window has a hole"
                swa[id(node)] += 1
                covered = node.start
            node = node.parent
        assert covered == lock.swa_start, "a lock's SWA window begins inside of a node"
    for node in nodes:
        assert node.full_pins == full[id(node)], "full pins differ from the locks"
        assert node.swa_pins == swa[id(node)], "SWA pins differ from the locks"
    assert full.keys() <= {id(node) for node in nodes}, "a lock points at a node outside of the tree"


def _check_lists(nodes: list[Node], store: NodeStore) -> None:
    place = {id(node): index for index, node in enumerate(store.full_lru)}
    assert place.keys() == {id(node) for node in nodes if not node.full_pins}, "full list and pins differ"
    for node in nodes:
        if not node.full_pins and node.parent is not None and node.parent.parent is not None:
            above = place.get(id(node.parent))
            assert above is None or above > place[id(node)], "a parent is colder than its child"
    for rank in Rank:
        listed = [id(node) for node in store.swa_lrus[rank]]
        members = {id(node) for node in nodes if node.live and not node.swa_pins and node.rank == rank}
        assert set(listed) == members, "SWA list and liveness differ"
        assert len(listed) == len(members), "a node is listed twice"


def _check_counters(
    nodes: list[Node], store: NodeStore, full: PoolCounts | None, swa: PoolCounts | None
) -> None:
    evictable = sum(len(node) for node in nodes if not node.full_pins)
    protected = sum(len(node) for node in nodes if node.full_pins)
    assert (store.full_evictable, store.full_protected) == (evictable, protected), "full counters are off"
    if full is not None:
        assert full.free + full.held + evictable + protected == full.capacity, "full pages were lost"
    evictable = sum(len(node) for node in nodes if node.live and not node.swa_pins)
    protected = sum(len(node) for node in nodes if node.live and node.swa_pins)
    assert (store.swa_evictable, store.swa_protected) == (evictable, protected), "SWA counters are off"
    if swa is not None:
        assert swa.free + swa.held + evictable + protected == swa.capacity, "SWA pages were lost"
