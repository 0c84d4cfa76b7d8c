"""The books of an arena: which entry has which pages, who leases it, what goes when room is needed.

Any process that maps an arena, under its lock. Works on tables in memory alone: knows no files, no
locks and no clocks, so that tests can run it on a plain bytearray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from transom.shared_cache.extents import Extents, choose_victims, coldest_first
from transom.shared_cache.layout import (
    CLAIMED,
    COMMITTED,
    DETACHED,
    FREE,
    PAGE_BYTES,
    PROCESSES,
    DamagedRecordError,
    Record,
    Tables,
    Word,
    pages_for,
)

_MAX_LEASES = 0xFFFF  # of one entry in one process: the lease table has 16 bits each
_SCAN = 512


class Ledger:
    """Operations of process `me` on the tables; `alive` tells whether another process slot's owner lives."""

    def __init__(self, tables: Tables, me: int, alive: Callable[[int], bool]) -> None:
        self.tables = tables
        self.me = me
        self.extents = Extents(tables)
        self.alive = alive
        self._mask = tables.geometry.index_slots - 1

    # The index is open addressing with linear probing; keys are digests, so their bits are the hash.

    def find(self, key: bytes) -> int:
        """Return the slot of the claimed or committed entry under a key, or -1."""
        tables, mask = self.tables, self._mask
        at = int.from_bytes(key[:8], "little") & mask
        for _ in range(mask + 1):
            found = tables.index[at]
            if not found:
                return -1
            if tables.key(found - 1) == key:
                return int(found) - 1
            at = (at + 1) & mask
        raise DamagedRecordError("index without end")

    def index_add(self, key: bytes, slot: int) -> None:
        """Enter a key that is not in the index."""
        at = int.from_bytes(key[:8], "little") & self._mask
        while self.tables.index[at] != 0:
            at = (at + 1) & self._mask
        self.tables.index[at] = slot + 1

    def _index_remove(self, slot: int) -> None:
        index, mask = self.tables.index, self._mask
        at = int.from_bytes(self.tables.key(slot)[:8], "little") & mask
        while index[at] != slot + 1:
            if not index[at]:
                raise DamagedRecordError(slot)
            at = (at + 1) & mask
        # Later members of the cluster move up, unless that would put one before its home.
        after = at
        while True:
            after = (after + 1) & mask
            if index[after] == 0:
                break
            home = int.from_bytes(self.tables.key(index[after] - 1)[:8], "little") & mask
            if (after - home) & mask >= (after - at) & mask:
                index[at] = index[after]
                at = after
        index[at] = 0

    def claim(self, key: bytes, expires_ns: int) -> int:
        """Make a claimed entry without pages, leased once by us; -1 when every entry is leased."""
        slot = self._free_slot()
        if slot < 0:
            return -1
        tables = self.tables
        serial = tables.count(Word.SERIAL)
        tables.write(slot, Record(key, serial, 0, 0, 0, 0, 0, 0))
        tables.owners[slot] = self.me
        tables.expires_ns[slot] = expires_ns
        tables.leases[self.me, slot] = 1
        tables.refs[slot] = 1
        tables.states[slot] = CLAIMED
        self.index_add(key, slot)
        return slot

    def _free_slot(self) -> int:
        tables = self.tables
        hint, total = int(tables.words[Word.SLOT_HINT]), tables.geometry.entries
        for first in (*range(hint, total, _SCAN), *range(0, hint, _SCAN)):
            free = np.flatnonzero(tables.states[first : first + _SCAN] == FREE)
            if len(free):
                slot: int = first + int(free[0])
                tables.words[Word.SLOT_HINT] = (slot + 1) % total
                return slot
        slot = next(self._coldest(), -1)
        if slot >= 0:
            self._evict(slot)
        return slot

    def reserve(self, slot: int, data_bytes: int, meta_bytes: int) -> bool:
        """Give our claimed entry its pages, evicting what nobody leases; False when there is no room."""
        pages = pages_for(data_bytes + meta_bytes)
        start = self.extents.take(pages)
        if start is None:
            start = self._make_room(pages)
        if start is None and self.reap_dead():
            start = self.extents.take(pages)
            start = self._make_room(pages) if start is None else start
        if start is None:
            self.tables.count(Word.REJECTED)
            return False
        record = self.tables.read(slot)
        self.tables.write(
            slot,
            record._replace(start_page=start, pages=pages, data_bytes=data_bytes, meta_bytes=meta_bytes),
        )
        return True

    def commit(self, slot: int, checksum: int) -> bool:
        """Publish our claimed entry; our lease on it stays. False when the claim was taken over."""
        tables = self.tables
        if tables.states[slot] != CLAIMED:
            return False
        tables.write(slot, tables.read(slot)._replace(checksum=checksum))
        tables.verified[slot] = 0
        tables.last_used[slot] = tables.count(Word.TICK)
        tables.states[slot] = COMMITTED
        tables.count(Word.INSERTIONS)
        return True

    def lease(self, slot: int) -> bool:
        """Count one more lease of ours and mark the entry as used."""
        tables = self.tables
        mine = int(tables.leases[self.me, slot])
        if mine == _MAX_LEASES:
            return False
        tables.leases[self.me, slot] = mine + 1
        tables.refs[slot] += 1
        tables.last_used[slot] = tables.count(Word.TICK)
        return True

    def unlease(self, slot: int) -> None:
        """End one of our leases; with the last one of all an unpublished entry goes."""
        tables = self.tables
        tables.leases[self.me, slot] -= 1
        tables.refs[slot] -= 1
        self._settle(slot)

    def _settle(self, slot: int) -> None:
        tables = self.tables
        if tables.refs[slot] != 0:
            return
        state = int(tables.states[slot])
        if state == CLAIMED:
            self._index_remove(slot)
        if state in (CLAIMED, DETACHED):
            self._free(slot)

    def detach(self, slot: int) -> None:
        """Take an entry out of the index, so that nobody finds it; its pages stay while it is leased."""
        self._index_remove(slot)
        self.tables.states[slot] = DETACHED
        self._settle(slot)

    def _free(self, slot: int) -> None:
        record = self.tables.read(slot)
        self.tables.states[slot] = FREE
        if record.pages:
            self.extents.give(record.start_page, record.pages)

    def _evict(self, slot: int) -> None:
        assert self.tables.states[slot] == COMMITTED, slot
        assert self.tables.refs[slot] == 0, slot
        self.tables.count(Word.EVICTIONS)
        self.tables.count(Word.EVICTED_BYTES, self.tables.read(slot).pages * PAGE_BYTES)
        self._index_remove(slot)
        self._free(slot)

    def _coldest(self) -> Iterator[int]:
        tables = self.tables
        slots = np.flatnonzero((tables.states == COMMITTED) & (tables.refs == 0))
        return coldest_first(slots, tables.last_used[slots])

    def _make_room(self, pages: int) -> int | None:
        if pages > self.tables.geometry.pages:
            return None
        records = ((slot, self.tables.read(slot)) for slot in self._coldest())
        coldest = ((slot, record.start_page, record.pages) for slot, record in records)
        victims = choose_victims(self.extents.free.astype(np.int64), coldest, pages)
        for slot in victims or ():
            self._evict(slot)
        return self.extents.take(pages) if victims else None

    def reap_dead(self) -> int:
        """End the leases and claims of processes that are gone; return how many there were."""
        tables = self.tables
        count = 0
        for process in np.flatnonzero(tables.processes["pid"]).tolist():
            if process != self.me and not self.alive(process):
                self.reap(process)
                count += 1
        return count

    def reap(self, process: int) -> None:
        """End the leases and claims of one process slot and empty it."""
        assert 0 <= process < PROCESSES, process
        tables = self.tables
        leased = np.flatnonzero(tables.leases[process])
        tables.leases[process] = 0
        tables.refs[leased] = tables.leases[:, leased].sum(axis=0, dtype=np.uint32)
        for slot in leased.tolist():
            self._settle(slot)
        tables.processes[process] = 0
