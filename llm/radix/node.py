"""Nodes of the radix tree and their bookkeeping: links, splits, merges, pins, counters and LRU membership.

Used by the tree of a prefill or decode worker. Knows no request and frees no page.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from transom.llm.radix.keys import TOKEN_BYTES
from transom.llm.radix.lru import Link, LruList
from transom.llm.radix.path_index import PathIndex

Pages = NDArray[np.int64]


class Rank(IntEnum):
    """How much a live SWA window is worth: SWA eviction empties a lower rank before it looks at a higher one.

    Without ranks, the extra windows of new requests would push out the tails on which every session's next
    turn depends, and all hit rates would fall to zero at once.
    """

    PASSING = 0
    EXTRA = 1
    TAIL = 2


class Node:
    """An edge of the tree: `key` and `pages` (of the full pool) cover token positions `start` to `end`.

    A node that isn't `live` is a tombstone: its full pages hold KV and their SWA pages are gone. When a node
    is split or merged, the object with the deeper end survives, so that locks may keep pointing at it.
    """

    __slots__ = (
        "children",
        "end",
        "full_link",
        "full_pins",
        "index",
        "key",
        "live",
        "pages",
        "parent",
        "rank",
        "start",
        "swa_link",
        "swa_pins",
    )

    def __init__(self, parent: Node | None, key: bytes, pages: Pages, start: int) -> None:
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.key = key
        self.pages = pages
        self.start = start
        self.end = start + len(key) // TOKEN_BYTES
        self.live = False
        self.rank = Rank.PASSING
        self.full_pins = 0
        self.swa_pins = 0
        self.full_link: Link[Node] = Link(self)
        self.swa_link: Link[Node] = Link(self)
        self.index: PathIndex | None = None

    def __len__(self) -> int:
        return self.end - self.start


def new_root() -> Node:
    return Node(None, b"", np.empty(0, np.int64), 0)


class NodeStore:
    """All nodes' accounting, in tokens; `epoch` changes whenever a node's shape or liveness does.

    The full list holds each node without full pins, the SWA lists each live node without SWA pins. In the
    full list a parent is always hotter than its children, hence the coldest node is a leaf.
    """

    def __init__(self, page_size: int, live_len: int) -> None:
        self.page_size = page_size
        self.page_bytes = page_size * TOKEN_BYTES
        self.live_len = live_len
        self.full_lru: LruList[Node] = LruList()
        self.swa_lrus: tuple[LruList[Node], ...] = tuple(LruList() for _ in Rank)
        self.full_evictable = 0
        self.full_protected = 0
        self.swa_evictable = 0
        self.swa_protected = 0
        self.epoch = 0

    def add(self, parent: Node, key: bytes, pages: Pages) -> Node:
        """Hang a new unpinned tombstone below a parent whose pins the caller holds."""
        node = Node(parent, key, pages, parent.end)
        parent.children[key[: self.page_bytes]] = node
        self.full_evictable += len(node)
        self.full_lru.append(node.full_link)
        self.epoch += 1
        return node

    def remove(self, node: Node) -> None:
        """Take an unpinned tombstone leaf out of the tree."""
        assert not node.children
        assert not node.full_pins, "full pages in use"
        assert not node.live, "SWA pages must go first"
        assert node.parent is not None, "a root is not removed"
        self._changes(node)
        del node.parent.children[node.key[: self.page_bytes]]
        node.full_link.remove()
        self.full_evictable -= len(node)
        node.parent = None
        self.epoch += 1

    def split(self, node: Node, at: int) -> Node:
        """Cut at a token position; return the new upper node, `node` keeps the lower part and its locks."""
        assert node.start < at < node.end
        parent = node.parent
        assert parent is not None
        self._changes(node)
        cut_bytes = (at - node.start) * TOKEN_BYTES
        cut = cut_bytes // self.page_bytes
        # Copies, because a view would keep the other half's memory when that half has been evicted.
        upper = Node(parent, node.key[:cut_bytes], node.pages[:cut].copy(), node.start)
        upper.live, upper.rank = node.live, node.rank
        upper.full_pins, upper.swa_pins = node.full_pins, node.swa_pins
        parent.children[upper.key[: self.page_bytes]] = upper
        node.key, node.pages = node.key[cut_bytes:], node.pages[cut:].copy()
        node.parent, node.start = upper, at
        upper.children[node.key[: self.page_bytes]] = node
        if node.full_link.listed:
            node.full_link.insert_hotter(upper.full_link)
        if node.swa_link.listed:
            node.swa_link.insert_hotter(upper.swa_link)
        self.epoch += 1
        return upper

    def merge(self, node: Node) -> None:
        """Absorb the chain of like parents above into `node`, in one copy."""
        run = [node]
        length = len(node)
        while (upper := run[-1].parent) is not None and self._alike(upper, run[-1], length):
            run.append(upper)
            length += len(upper)
        if len(run) == 1:
            return
        run.reverse()
        top = run[0]
        for part in run:
            self._changes(part)
        parent = top.parent
        assert parent is not None
        node.key = b"".join([part.key for part in run])
        node.pages = np.concatenate([part.pages for part in run])
        node.start, node.parent = top.start, parent
        parent.children[node.key[: self.page_bytes]] = node
        for part in run[:-1]:
            part.parent = None
            if part.full_link.listed:
                part.full_link.remove()
            if part.swa_link.listed:
                part.swa_link.remove()
        self.epoch += 1

    def _changes(self, node: Node) -> None:
        if node.index is not None:
            node.index.cut(node)

    def _alike(self, upper: Node, node: Node, length: int) -> bool:
        # Equal full pins mean equal holders, because holders of the lower node are among those of the upper
        # one: no lock points at the upper node. A window that begins between the two keeps them apart.
        return (
            upper.parent is not None
            and len(upper.children) == 1
            and upper.full_pins == node.full_pins
            and upper.live == node.live
            and (
                not node.live
                or (
                    upper.rank == node.rank and not node.swa_pins and length + len(upper) <= 2 * self.live_len
                )
            )
        )

    def pin_full(self, node: Node) -> None:
        node.full_pins += 1
        if node.full_pins == 1 and node.parent is not None:
            node.full_link.remove()
            length = node.end - node.start
            self.full_evictable -= length
            self.full_protected += length

    def unpin_full(self, node: Node) -> None:
        assert node.full_pins > 0, "full pin released twice"
        node.full_pins -= 1
        if node.full_pins == 0 and node.parent is not None:
            self.full_lru.append(node.full_link)
            length = node.end - node.start
            self.full_evictable += length
            self.full_protected -= length

    def pin_swa(self, node: Node) -> None:
        assert node.live, "a tombstone has no SWA pages to pin"
        node.swa_pins += 1
        if node.swa_pins == 1:
            node.swa_link.remove()
            self.swa_evictable -= len(node)
            self.swa_protected += len(node)

    def unpin_swa(self, node: Node) -> None:
        assert node.swa_pins > 0, "SWA pin released twice"
        node.swa_pins -= 1
        if node.swa_pins == 0:
            self.swa_lrus[node.rank].append(node.swa_link)
            self.swa_evictable += len(node)
            self.swa_protected -= len(node)

    def set_live(self, node: Node, rank: Rank) -> None:
        assert not node.live
        self._changes(node)
        node.live, node.rank = True, rank
        self.swa_lrus[rank].append(node.swa_link)
        self.swa_evictable += len(node)
        self.epoch += 1

    def set_tombstone(self, node: Node) -> None:
        assert node.live
        assert not node.swa_pins, "SWA pages in use"
        self._changes(node)
        node.live = False
        node.swa_link.remove()
        self.swa_evictable -= len(node)
        self.epoch += 1

    def set_rank(self, node: Node, rank: Rank) -> None:
        node.rank = rank
        if node.swa_link.listed:
            node.swa_link.remove()
            self.swa_lrus[rank].append(node.swa_link)
