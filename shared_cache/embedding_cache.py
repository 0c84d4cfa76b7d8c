"""The embedding cache that all encoder ranks of a machine share: leases and claims on an arena.

Encoder processes. Bytes are written and read in the mapped pages, outside the lock; a checksum is
checked by an entry's first reader after it was written, after a crash and after a restart.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from transom.shared_cache import repair
from transom.shared_cache.arena import Arena, DamagedArenaError
from transom.shared_cache.contract import (
    DEFAULT_CLAIM_S,
    Busy,
    CacheStats,
    Claim,
    EmbeddingCache,
    EntryMeta,
    Lease,
    parse_key,
)
from transom.shared_cache.layout import (
    CLAIMED,
    COMMITTED,
    PAGE_BYTES,
    DamagedRecordError,
    Record,
    Tables,
    Word,
)
from transom.shared_cache.ledger import Ledger

logger = logging.getLogger(__name__)

_META_ENCODER = msgspec.msgpack.Encoder()
_META_DECODER = msgspec.msgpack.Decoder(EntryMeta)
_DAMAGE = (DamagedRecordError, DamagedArenaError)


def _digest(data: NDArray[Any], meta: bytes, key: bytes) -> int:
    digest = xxhash.xxh3_64(data.data)
    digest.update(meta)
    digest.update(key)
    return digest.intdigest()


class ShmEmbeddingCache(EmbeddingCache):
    """The contract of EmbeddingCache on an arena that other processes map too."""

    def __init__(self, path: Path, size_bytes: int, *, keep: bool = True) -> None:
        self._arena = Arena.attach(path, size_bytes, keep=keep)
        self.capacity_bytes = self._arena.geometry.pages * PAGE_BYTES

    def get(self, key: str) -> Lease | None:
        raw = parse_key(key)
        try:
            with self._arena.section as ledger:
                slot = ledger.find(raw)
                if slot < 0 or ledger.tables.states[slot] != COMMITTED:
                    ledger.tables.count(Word.MISSES)
                    return None
                found = self._take_lease(ledger, slot)
            return found and self._open(key, *found)
        except _DAMAGE as damage:
            logger.warning("embedding cache: %r is damaged, taken as a miss", damage)
            return None

    def begin(self, key: str, *, ttl_s: float = DEFAULT_CLAIM_S) -> Lease | Claim | Busy:
        raw = parse_key(key)
        while True:
            try:
                with self._arena.section as ledger:
                    found = self._look(ledger, raw, ttl_s)
                if isinstance(found, Busy):
                    return found
                if isinstance(found, int):
                    return ShmClaim(self._arena, key, found)
                if lease := self._open(key, *found):
                    return lease
            except _DAMAGE as damage:
                logger.warning("embedding cache: %r is damaged, nothing is kept for now", damage)
                return ShmClaim(self._arena, key, -1)

    def _look(self, ledger: Ledger, raw: bytes, ttl_s: float) -> tuple[int, Record, bool] | int | Busy:
        """Return a lease's parts, the slot of a new claim (-1: none), or who has the claim."""
        tables = ledger.tables
        slot = ledger.find(raw)
        now_ns = time.monotonic_ns()  # of the machine, not of the process
        if slot >= 0 and tables.states[slot] == COMMITTED:
            return self._take_lease(ledger, slot) or -1
        if slot >= 0:
            owner = int(tables.owners[slot])
            left_s = (int(tables.expires_ns[slot]) - now_ns) / 1e9
            if left_s > 0 and (owner == ledger.me or ledger.alive(owner)):
                tables.count(Word.WAITS)
                return Busy(int(tables.processes["pid"][owner]), left_s)
            ledger.reap_dead()
            if ledger.find(raw) >= 0:
                ledger.detach(slot)
            tables.count(Word.TAKEOVERS)
        tables.count(Word.MISSES)
        return ledger.claim(raw, now_ns + int(ttl_s * 1e9))

    @staticmethod
    def _take_lease(ledger: Ledger, slot: int) -> tuple[int, Record, bool] | None:
        record = ledger.tables.read(slot)
        if not ledger.lease(slot):
            ledger.tables.count(Word.MISSES)
            return None
        ledger.tables.count(Word.HITS)
        return slot, record, bool(ledger.tables.verified[slot])

    def _open(self, key: str, slot: int, record: Record, verified: bool) -> Lease | None:
        """Make the lease of an entry that is counted as leased; None, and the entry goes, if it is torn."""
        pin = _pin(self._arena, record)
        _end_with(pin, self._arena, slot)
        blob = bytes(pin.data[record.data_bytes :])
        meta = _decode_meta(blob, record)
        sound = meta is not None and (
            verified or _digest(pin[: record.data_bytes], blob, record.key) == record.checksum
        )
        if not sound:
            logger.warning("embedding cache: the bytes of entry %s don't fit their checksum", key)
        if not (sound and verified):
            with self._arena.section as ledger:
                if sound:
                    ledger.tables.verified[slot] = 1
                else:
                    ledger.tables.count(Word.TORN)
                    ledger.tables.count(Word.HITS, -1)
                    ledger.tables.count(Word.MISSES)
                    # Another reader may have found it first.
                    if ledger.tables.states[slot] == COMMITTED:
                        ledger.detach(slot)
        if meta is None or not sound:
            return None
        return Lease(key, meta, pin.data[: record.data_bytes])

    def stats(self) -> CacheStats:
        try:
            with self._arena.section as ledger:
                ledger.reap_dead()
                return self._figures(ledger.tables)
        except DamagedArenaError:
            return self._figures(self._arena.ledger.tables)

    def _figures(self, tables: Tables) -> CacheStats:
        words = tables.words
        return CacheStats(
            kind="shm",
            capacity_bytes=self.capacity_bytes,
            used_bytes=words[Word.USED_PAGES] * PAGE_BYTES,
            entries=int((tables.states == COMMITTED).sum()),
            leases=int(tables.refs.sum()),
            processes=int((tables.processes["pid"] != 0).sum()),
            hits=words[Word.HITS],
            misses=words[Word.MISSES],
            waits=words[Word.WAITS],
            insertions=words[Word.INSERTIONS],
            evictions=words[Word.EVICTIONS],
            evicted_bytes=words[Word.EVICTED_BYTES],
            rejected=words[Word.REJECTED],
            torn=words[Word.TORN],
            takeovers=words[Word.TAKEOVERS],
            repairs=words[Word.REPAIRS],
        )

    def check_integrity(self) -> None:
        with self._arena.section as ledger:
            ledger.reap_dead()
            repair.check(ledger)

    def close(self) -> None:
        self._arena.close()


def _decode_meta(blob: bytes, record: Record) -> EntryMeta | None:
    try:
        meta = _META_DECODER.decode(blob)
    except (msgspec.DecodeError, ValueError):
        return None
    return meta if meta.rows.size_bytes == record.data_bytes else None


def _pin(arena: Arena, record: Record, *, writable: bool = False) -> NDArray[Any]:
    """Return an entry's data and meta as an array in the mapped pages; all views keep it alive."""
    size_bytes = record.data_bytes + record.meta_bytes
    pin = np.frombuffer(arena.mapping, np.uint8, size_bytes, arena.ledger.tables.offset_bytes(record))
    pin.flags.writeable = writable
    return pin


def _end_with(owner: Any, arena: Arena, slot: int) -> weakref.finalize[..., Any]:
    """End one lease of the entry when `owner` is gone."""
    finalizer = weakref.finalize(owner, arena.end_lease, slot)
    # At exit the kernel frees the process's lock, and the others end its leases.
    finalizer.atexit = False
    return finalizer


class ShmClaim(Claim):
    """A claim on an arena's entry; with slot -1 one that keeps nothing and excludes nobody."""

    def __init__(self, arena: Arena, key: str, slot: int) -> None:
        self.key = key
        self._arena = arena
        self._slot = slot
        self._record: Record | None = None
        self._pin: NDArray[Any] | None = None
        self._view: memoryview | None = None
        self._finalizer = _end_with(self, arena, slot) if slot >= 0 else None

    def reserve(self, meta: EntryMeta) -> memoryview | None:
        if self._finalizer is None or self._record is not None:
            return None
        blob = _META_ENCODER.encode(meta)
        data_bytes = meta.rows.size_bytes
        try:
            with self._arena.section as ledger:
                if ledger.tables.states[self._slot] != CLAIMED:
                    return None
                if not ledger.reserve(self._slot, data_bytes, len(blob)):
                    return None
                self._record = ledger.tables.read(self._slot)
        except _DAMAGE:
            return None
        # The duty to end the lease passes from the claim to its pages: a view may outlive the claim.
        self._finalizer.detach()
        self._pin = _pin(self._arena, self._record, writable=True)
        self._finalizer = _end_with(self._pin, self._arena, self._slot)
        self._pin[data_bytes:] = np.frombuffer(blob, np.uint8)
        self._view = self._pin.data[:data_bytes]
        return self._view

    def commit(self) -> Lease | None:
        record = self._record
        if record is None or self._pin is None:
            raise ValueError(f"claim of {self.key}: nothing is reserved")
        self._end_views()
        pin = self._pin = _pin(self._arena, record)
        _end_with(pin, self._arena, self._slot)
        blob = bytes(pin.data[record.data_bytes :])
        checksum = _digest(pin[: record.data_bytes], blob, record.key)
        try:
            with self._arena.section as ledger:
                published = ledger.commit(self._slot, checksum)
        except _DAMAGE:
            published = False
        self._pin = None
        if not published:
            return None
        return Lease(self.key, _META_DECODER.decode(blob), pin.data[: record.data_bytes])

    def _end_views(self) -> None:
        """Drop the writable array; ValueError, and all stays, if somebody could still write through it."""
        assert self._finalizer is not None
        assert self._view is not None
        # Arrays on the view itself make its release fail; slices of it keep the array alive.
        with contextlib.suppress(BufferError):
            self._view.release()
        self._finalizer.detach()
        alive = weakref.ref(self._pin)
        self._pin = None
        if (pin := alive()) is not None:
            self._pin, self._finalizer = pin, _end_with(pin, self._arena, self._slot)
            raise ValueError(f"claim of {self.key}: views of the reserved bytes are still in use")
        self._view = None

    def abandon(self) -> None:
        self._pin = self._view = None
        # Once there are pages, their last view ends the lease.
        if self._finalizer is not None and self._record is None:
            self._finalizer()
