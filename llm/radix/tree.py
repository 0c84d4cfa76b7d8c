"""The SWA-aware radix tree: which KV pages hold which token prefix, and where a request may start from them.

Lives in a prefill or decode worker and owns the pages given to it. Knows no torch, request or scheduler.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from transom.llm.radix.contract import NO_PAGES, Inserted, Lock, Match, PagePools, TreeStats
from transom.llm.radix.integrity import PoolCounts, check_tree
from transom.llm.radix.keys import TOKEN_BYTES, Key, common_tokens
from transom.llm.radix.node import Node, NodeStore, Pages, Rank, new_root
from transom.llm.radix.path_index import PathIndex
from transom.llm.radix.retention import Window

_INDEX_FROM = 32  # nodes that a match must have walked: fewer cost less than making an index does


class RadixTree:
    """Cached prefixes in pages; a match ends only where at least `window` tokens before have live SWA pages.

    One thread uses it. Pages are the tree's from insert to the call of a free method of `pools`.
    """

    def __init__(
        self, pools: PagePools, *, window: int, page_size: int = 1, index_from: int = _INDEX_FROM
    ) -> None:
        if window < 1 or page_size < 1:
            raise ValueError(f"window {window} and page_size {page_size} must be at least 1")
        self.page_size = page_size
        self.live_len = -(-window // page_size) * page_size
        self.stats = TreeStats()
        self.roots: dict[str, Node] = {}
        self.locks: set[Lock] = set()
        self.store = NodeStore(page_size, self.live_len)
        self._pools = pools
        self._index_from = index_from

    @property
    def full_evictable(self) -> int:
        return self.store.full_evictable

    @property
    def full_protected(self) -> int:
        return self.store.full_protected

    @property
    def swa_evictable(self) -> int:
        return self.store.swa_evictable

    @property
    def swa_protected(self) -> int:
        return self.store.swa_protected

    def match(self, key: Key, limit: int | None = None) -> Match:
        """Return the longest reusable prefix of at most `limit` tokens, by default all but the last one.

        Changes nothing, not even the order of eviction, so a scheduler may ask for every waiting request.
        """
        stop = min(len(key), len(key) - 1 if limit is None else limit) // self.page_size * self.page_size
        node = self.roots.get(key.namespace)
        raw, page_bytes, live_len = key.raw, self.store.page_bytes, self.live_len
        path: list[Node] = []
        runs: list[Pages] = []
        depth = run = length = used = walked = 0
        while node is not None and depth < stop:
            at = depth * TOKEN_BYTES
            node = node.children.get(raw[at : at + page_bytes])
            if node is None:
                break
            index = node.index
            if index is not None and index.nodes[0] is node and (count := index.passed(raw, stop)):
                if last := index.last_usable(count, run):
                    length, used = index.ends[last - 1], len(path) + last
                run = index.run_after(count, run)
                path += index.nodes[:count]
                node, depth, walked = path[-1], index.ends[count - 1], len(path)
                runs.append(index.pages[: (depth - index.start) // self.page_size])
                continue
            end = node.end
            if end > stop or not raw.startswith(node.key, at):
                end = depth + self._common(key, depth, node, stop)
            path.append(node)
            runs.append(node.pages)
            run = run + end - depth if node.live else 0
            depth = end
            if run >= live_len or run == depth:
                length, used = depth, len(path)
            if depth < node.end:
                break
        self._index(path[walked:], depth)
        return Match(
            length=length,
            window_start=max(length - live_len, 0),
            prefix_len=depth,
            namespace=key.namespace,
            page_size=self.page_size,
            path=tuple(path[:used]),
            runs=tuple(runs),
            epoch=self.store.epoch,
        )

    def _index(self, walked: Sequence[Node], depth: int) -> None:
        """Let the next match pass the nodes in one go that this one walked one by one."""
        whole = walked if walked and walked[-1].end <= depth else walked[:-1]
        if len(whole) >= self._index_from and all(node.index is None for node in whole):
            PathIndex(whole, self.live_len)

    def lock(self, match: Match) -> Lock:
        """Pin a match made since the tree last changed, and count it as a use of that prefix."""
        assert match.epoch == self.store.epoch, "the tree changed since the match"
        self.stats.lookups += 1
        self.stats.hit_tokens += match.length
        self.stats.swa_cut_tokens += match.prefix_len - match.length
        node = match.path[-1] if match.path else self.roots.get(match.namespace)
        if node is None:
            node = self.roots[match.namespace] = new_root()
        if node.end > match.length:
            node = self.store.split(node, match.length)
        self._pin_path(node, None)
        lock = Lock(node, match.namespace, self._pin_window(node, hit=True))
        self.locks.add(lock)
        return lock

    def release_swa(self, lock: Lock) -> None:
        """Give up the SWA window early: the request has computed a whole window of its own since."""
        node = lock.node
        while node.end > lock.swa_start:
            self.store.unpin_swa(node)
            assert node.parent is not None
            node = node.parent
        lock.swa_start = lock.length

    def unlock(self, lock: Lock) -> None:
        """Release everything; what the request did not insert stays its own to free."""
        assert lock.held, "unlocked twice"
        self.release_swa(lock)
        lock.held = False
        self.locks.remove(lock)
        node: Node | None = lock.node
        while node is not None:
            self.store.unpin_full(node)
            node = node.parent
        frees = _Frees()
        self._tidy(lock.node, frees)
        frees.flush(self._pools)

    def insert(self, key: Key, pages: Pages, lock: Lock, *, keep: Sequence[Window] = ()) -> Inserted:
        """Take over a request's own `pages`, from position lock.length on, and move its lock to their end.

        The pools say which of them have SWA pages; `keep` ranks those, as plan_retention returns. What the
        tree has already is freed as duplicate; SWA pages that it lacks move to its own full pages. Only pages
        that the key fills are taken, the rest stay the request's. Call it after chunks, and at the end before
        unlock.
        """
        assert lock.held
        assert lock.namespace == key.namespace
        start = lock.length
        end = min(len(key) // self.page_size * self.page_size, start + len(pages) * self.page_size)
        if end <= start:
            return Inserted(start, NO_PAGES, 0, 0)
        new = _NewPages(key, pages[: (end - start) // self.page_size], start, end, self.page_size)
        pieces = self._pieces(new, keep)
        frees = _Frees()
        node, canonical, healed = self._walk_known(new, lock.node, pieces, frees)
        known = node.end - start
        if node.end < end:
            canonical.append(new.pages[known // self.page_size :])
            node = self._append(new, node, pieces)
        frees.flush(self._pools)
        self._move_lock(lock, node)
        self.stats.inserted_tokens += end - start - known
        self.stats.duplicate_tokens += known
        self.stats.healed_tokens += healed
        return Inserted(end, _joined(canonical), known, healed)

    def evict_full(self, tokens: int) -> int:
        """Free full and SWA pages of at least so many tokens, whole coldest leaves first; return how many.

        Fewer only if everything left is pinned.
        """
        frees = _Frees()
        while frees.full_tokens < tokens and (node := self.store.full_lru.coldest()) is not None:
            assert not node.children, "the coldest node must be a leaf"
            self._evict(node, frees)
        self._count_evicted(frees)
        return frees.full_tokens

    def evict_swa(self, tokens: int) -> int:
        """Free SWA pages of at least so many tokens, lowest rank and coldest first; return how many.

        Inner nodes and pinned leaves become tombstones, unpinned leaves go as a whole. Fewer only if
        everything left is pinned.
        """
        frees = _Frees()
        for lru in self.store.swa_lrus:
            while frees.swa_tokens < tokens and (node := lru.coldest()) is not None:
                self._evict(node, frees)
        self._count_evicted(frees)
        return frees.swa_tokens

    def check_integrity(self, full: PoolCounts | None = None, swa: PoolCounts | None = None) -> None:
        """Assert that counters, lists, pins and pages agree, and with counts that no page is lost."""
        check_tree(self.roots, self.store, self.locks, self._pools, full, swa)

    def _common(self, key: Key, depth: int, node: Node, stop: int) -> int:
        if node.end <= stop and key.raw.startswith(node.key, depth * TOKEN_BYTES):
            return len(node)
        tokens = common_tokens(key.raw, depth, node.key, 0, min(len(node), stop - depth))
        return tokens // self.page_size * self.page_size

    def _pieces(self, new: _NewPages, keep: Sequence[Window]) -> list[_Piece]:
        """Cut the new pages where liveness or rank changes; rank None marks tokens without SWA pages."""
        page = self.page_size
        mapped = self._pools.swa_mapped(new.pages)
        if not mapped.any():
            return [(new.start, new.end, None)]
        ranks = np.where(mapped, int(Rank.PASSING), -1)
        for low, high, rank in keep:
            part = ranks[max(low - new.start, 0) // page : max(high - new.start, 0) // page]
            part[(part >= 0) & (part < rank)] = rank
        cuts = [0, *(np.flatnonzero(np.diff(ranks)) + 1).tolist(), len(ranks)]
        return [
            (new.start + low * page, new.start + high * page, Rank(ranks[low]) if ranks[low] >= 0 else None)
            for low, high in pairwise(cuts)
        ]

    def _walk_known(
        self, new: _NewPages, node: Node, pieces: list[_Piece], frees: _Frees
    ) -> tuple[Node, list[Pages], int]:
        """Follow the key through existing nodes and settle duplicates; return the last node and its pages."""
        depth = new.start
        canonical: list[Pages] = []
        healed = at_piece = 0
        while depth < new.end:
            at = depth * TOKEN_BYTES
            child = node.children.get(new.key.raw[at : at + self.store.page_bytes])
            if child is None:
                break
            index = child.index
            if (
                index is not None
                and index.nodes[0] is child
                and (count := index.passed(new.key.raw, new.end))
            ):
                nodes, ends = index.nodes[:count], index.ends[:count]
                canonical.append(index.pages[: (ends[-1] - depth) // self.page_size])
            else:
                common = self._common(new.key, depth, child, new.end)
                child = self.store.split(child, depth + common) if common < len(child) else child
                nodes, ends = [child], [child.end]
                canonical.append(child.pages)
            node = nodes[-1]
            frees.full.append(new.between(depth, node.end))
            depth = node.end
            while at_piece < len(pieces) and pieces[at_piece][0] < depth:
                low, high, rank = pieces[at_piece]
                if rank is not None:
                    # `ends` are those from before: what settling cuts off lies above the node it is cut from.
                    for known in nodes[bisect_right(ends, low) : bisect_left(ends, high) + 1]:
                        part = max(low, known.start), min(high, known.end)
                        healed += self._settle(new, known, *part, rank, frees)
                if high > depth:
                    break
                at_piece += 1
        return node, canonical, healed

    def _settle(self, new: _NewPages, node: Node, low: int, high: int, rank: Rank, frees: _Frees) -> int:
        """Free a duplicate's SWA pages, or let a tombstone have them; return how many tokens healed."""
        own = new.between(low, high)
        if node.live:
            frees.swa.append(own)
            if rank > node.rank:
                self.store.set_rank(self._isolate(node, low, high), rank)
            return 0
        piece = self._isolate(node, low, high)
        frees.moves.append((own, piece.pages))
        self.store.set_live(piece, rank)
        return high - low

    def _append(self, new: _NewPages, node: Node, pieces: list[_Piece]) -> Node:
        """Add one node a piece below `node`."""
        known = node.end
        for low, high, rank in pieces:
            low = max(low, known)
            if low >= high:
                continue
            part = new.key.raw[low * TOKEN_BYTES : high * TOKEN_BYTES]
            # A copy: the array in hand is the request's own to change.
            node = self.store.add(node, part, new.between(low, high).astype(np.int64))
            if rank is not None:
                self.store.set_live(node, rank)
        return node

    def _isolate(self, node: Node, low: int, high: int) -> Node:
        piece = self.store.split(node, high) if high < node.end else node
        if low > piece.start:
            self.store.split(piece, low)
        return piece

    def _pin_path(self, node: Node, above: Node | None) -> None:
        """Pin from `node` up to, not including, `above`; None pins the root too."""
        cursor: Node | None = node
        while cursor is not above:
            assert cursor is not None
            self.store.pin_full(cursor)
            cursor = cursor.parent

    def _pin_window(self, node: Node, *, hit: bool) -> int:
        """Pin the live tokens that end at `node`, at most one window of them; return where they start."""
        want = max(node.end - self.live_len, 0)
        start, cursor = node.end, node
        while cursor.live and start > want:
            if cursor.start < want:
                self.store.split(cursor, want)
            if hit:
                self.store.set_rank(cursor, Rank.TAIL)
            self.store.pin_swa(cursor)
            start = cursor.start
            assert cursor.parent is not None
            cursor = cursor.parent
        return start

    def _move_lock(self, lock: Lock, node: Node) -> None:
        self._pin_path(node, lock.node)
        swa_start = self._pin_window(node, hit=False)
        self.release_swa(lock)
        self._supersede(lock.node)
        lock.node, lock.swa_start = node, swa_start

    def _supersede(self, node: Node) -> None:
        """Lower the rank of a window that has only been continued: the next turn starts at the new end.

        Otherwise each session would keep two windows hot, and the pool would serve half as many.
        """
        if len(node.children) != 1:
            return
        want = node.end - self.live_len
        while node.live and node.end > want and node.parent is not None:
            if not node.swa_pins and node.rank > Rank.EXTRA:
                self.store.set_rank(node, Rank.EXTRA)
            node = node.parent

    def _merge_around(self, node: Node) -> None:
        if len(node.children) == 1:
            (child,) = node.children.values()
            self.store.merge(child)
            if node is not child.parent:
                return
        self.store.merge(node)

    def _evict(self, node: Node, frees: _Frees) -> None:
        if node.live:
            frees.swa.append(node.pages)
            frees.swa_tokens += len(node)
            self.store.set_tombstone(node)
        self._tidy(node, frees)

    def _count_evicted(self, frees: _Frees) -> None:
        self.stats.full_evicted_tokens += frees.full_tokens
        self.stats.swa_evicted_tokens += frees.swa_tokens
        frees.flush(self._pools)

    def _tidy(self, node: Node, frees: _Frees) -> None:
        """Remove what no match can end in from `node` upwards, and join what remains with its likes."""
        last = self._prune(node, frees)
        if last.parent is None:
            if not last.children and not last.full_pins:
                self.roots = {name: root for name, root in self.roots.items() if root is not last}
        else:
            self._merge_around(last)

    def _prune(self, node: Node, frees: _Frees) -> Node:
        """Remove unpinned tombstone leaves from `node` up, as no match ends in them; return what remains."""
        while node.parent is not None and not node.children and not node.full_pins and not node.live:
            parent = node.parent
            frees.full.append(node.pages)
            frees.full_tokens += len(node)
            self.store.remove(node)
            node = parent
        return node


_Piece = tuple[int, int, Rank | None]  # token positions from, to


@dataclass(frozen=True, slots=True)
class _NewPages:
    """The pages of one insert, which hold token positions `start` to `end` of the key."""

    key: Key
    pages: Pages
    start: int
    end: int
    page_size: int

    def between(self, low: int, high: int) -> Pages:
        return self.pages[(low - self.start) // self.page_size : (high - self.start) // self.page_size]


class _Frees:
    """Pages on their way out, so that the pools are called once an operation and SWA goes before full."""

    def __init__(self) -> None:
        self.full: list[Pages] = []
        self.swa: list[Pages] = []
        self.moves: list[tuple[Pages, Pages]] = []
        self.full_tokens = 0
        self.swa_tokens = 0

    def flush(self, pools: PagePools) -> None:
        if self.moves:
            sources, targets = zip(*self.moves)
            pools.move_swa(_joined(sources), _joined(targets))
        if self.swa:
            pools.free_swa(_joined(self.swa))
        if self.full:
            pools.free_full(_joined(self.full))


def _joined(runs: Sequence[Pages]) -> Pages:
    """Return runs of pages as one; a copy of 100,000 numbers would cost as much as comparing their key."""
    return runs[0] if len(runs) == 1 else np.concatenate(runs)
