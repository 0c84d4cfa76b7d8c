"""The embedding cache of one process alone: what stands in where no arena can be had, and the size 0.

Encoder process. The contract of EmbeddingCache with entries on the heap; a lease keeps its bytes alive
by reference, so that an evicted entry's memory goes with its last view.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import OrderedDict
from dataclasses import dataclass, replace
from os import getpid

import numpy as np
from numpy.typing import NDArray

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


@dataclass(frozen=True, slots=True)
class _Entry:
    meta: EntryMeta
    data: memoryview

    @property
    def size_bytes(self) -> int:
        return self.data.nbytes + len(self.meta.user)


class HeapEmbeddingCache(EmbeddingCache):
    """At most `capacity_bytes` of entries, least recently used out first; 0 keeps none."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        # Weak: a claim that its owner dropped is over.
        self._claims: dict[str, tuple[weakref.ref[HeapClaim], float]] = {}
        self._stats = CacheStats("heap", capacity_bytes, 0, 0, 0, 1)

    def get(self, key: str) -> Lease | None:
        parse_key(key)
        with self._lock:
            lease = self._find(key)
            if lease is None:
                self._count(misses=1)
            return lease

    def _find(self, key: str) -> Lease | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        self._count(hits=1)
        return Lease(key, entry.meta, entry.data)

    def begin(self, key: str, *, ttl_s: float = DEFAULT_CLAIM_S) -> Lease | Claim | Busy:
        parse_key(key)
        now = time.monotonic()
        with self._lock:
            if lease := self._find(key):
                return lease
            owner, expires = self._claims.get(key, (lambda: None, 0.0))
            if owner() is not None:
                left_s = expires - now
                if left_s > 0:
                    self._count(waits=1)
                    return Busy(getpid(), left_s)
                self._count(takeovers=1)
            self._count(misses=1)
            claim = HeapClaim(self, key)
            self._claims[key] = (weakref.ref(claim), now + ttl_s)
            return claim

    def stats(self) -> CacheStats:
        with self._lock:
            return replace(self._stats, entries=len(self._entries))

    def check_integrity(self) -> None:
        with self._lock:
            total = sum(entry.size_bytes for entry in self._entries.values())
            assert total == self._stats.used_bytes, (total, self._stats.used_bytes)
            assert total <= self.capacity_bytes, (total, self.capacity_bytes)

    def close(self) -> None:
        with self._lock:
            self._entries.clear()
            self._stats = replace(self._stats, used_bytes=0)

    def _count(self, **amounts: int) -> None:
        self._stats = replace(self._stats, **{k: getattr(self._stats, k) + v for k, v in amounts.items()})

    def fits(self, size_bytes: int) -> bool:
        """Tell whether an entry of that size can be kept, and count it if not."""
        with self._lock:
            if 0 < self.capacity_bytes >= size_bytes:
                return True
            self._count(rejected=1)
            return False

    def end_claim(self, claim: HeapClaim, entry: _Entry | None) -> Lease | None:
        """End a claim, with its entry if it made one."""
        with self._lock:
            owner, _ = self._claims.get(claim.key, (lambda: None, 0.0))
            if owner() is not claim:
                return None
            del self._claims[claim.key]
            if entry is None:
                return None
            self._entries[claim.key] = entry
            self._count(insertions=1, used_bytes=entry.size_bytes)
            while self._stats.used_bytes > self.capacity_bytes:
                _, oldest = self._entries.popitem(last=False)
                self._count(evictions=1, evicted_bytes=oldest.size_bytes, used_bytes=-oldest.size_bytes)
            return Lease(claim.key, entry.meta, entry.data)


class HeapClaim(Claim):
    """A claim on an entry of a HeapEmbeddingCache."""

    def __init__(self, cache: HeapEmbeddingCache, key: str) -> None:
        self.key = key
        self._cache = cache
        self._meta: EntryMeta | None = None
        self._owner: NDArray[np.uint8] | None = None
        self._pin: NDArray[np.uint8] | None = None
        self._view: memoryview | None = None

    def reserve(self, meta: EntryMeta) -> memoryview | None:
        data_bytes = meta.rows.size_bytes
        if self._meta is not None or not self._cache.fits(data_bytes + len(meta.user)):
            return None
        self._meta = meta
        self._owner = np.empty(data_bytes, np.uint8)
        # All writable views keep this array alive, so that commit can tell whether there are any.
        self._pin = np.frombuffer(self._owner.data, np.uint8)
        self._view = self._pin.data
        return self._view

    def commit(self) -> Lease | None:
        if self._meta is None or self._owner is None or self._pin is None or self._view is None:
            raise ValueError(f"claim of {self.key}: nothing is reserved")
        with contextlib.suppress(BufferError):
            self._view.release()
        alive = weakref.ref(self._pin)
        self._pin = None
        if (pin := alive()) is not None:
            self._pin = pin
            raise ValueError(f"claim of {self.key}: views of the reserved bytes are still in use")
        return self._cache.end_claim(self, _Entry(self._meta, self._owner.data.toreadonly()))

    def abandon(self) -> None:
        self._cache.end_claim(self, None)
