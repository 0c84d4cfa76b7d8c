"""What an embedding cache promises: leases on finished entries, claims on missing ones.

Encoder processes. The shared arena and the heap fallback keep this contract. Entries are bytes with a
tensor's dtype and shape and a blob of the caller's; nothing here knows what an embedding is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from transom.errors import TransomError
from transom.messages import TensorMeta

# Numpy has no bfloat16: rows of that type come as their raw 16 bits.
_NUMPY_DTYPES = {"bfloat16": "uint16"}
DEFAULT_CLAIM_S = 300.0

Buffer = bytes | bytearray | memoryview | NDArray[Any]


class ArenaError(TransomError):
    """A shared arena can't be made, attached or used."""

    code = "arena_error"


class ArenaSpaceError(ArenaError):
    """The file system of the arena has too little room; `need_bytes` and `free_bytes` say how much."""

    code = "arena_space"

    def __init__(self, message: str, *, need_bytes: int, free_bytes: int) -> None:
        super().__init__(message)
        self.need_bytes = need_bytes
        self.free_bytes = free_bytes


class EntryMeta(msgspec.Struct, frozen=True):
    """What an entry's bytes are: rows of a tensor, and a blob that the cache only carries."""

    rows: TensorMeta
    user: bytes = b""


@dataclass(frozen=True, slots=True)
class Busy:
    """Somebody else is making the entry: process `pid`, for at most `expires_s` more seconds."""

    pid: int
    expires_s: float


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Figures of a cache. An arena's counters add up all processes since the arena was made."""

    kind: str  # "shm" or "heap"
    capacity_bytes: int
    used_bytes: int
    entries: int
    leases: int
    processes: int
    hits: int = 0
    misses: int = 0
    waits: int = 0  # begin() answered Busy
    insertions: int = 0
    evictions: int = 0
    evicted_bytes: int = 0
    rejected: int = 0  # no room even after eviction
    torn: int = 0  # entries whose bytes did not fit their checksum
    takeovers: int = 0  # claims of dead or overdue processes that another took
    repairs: int = 0


class Lease:
    """A finished entry, readable in place.

    `data` is a read-only view of the entry's bytes, without a copy. The entry stays where it is until
    the lease is released *and* no view of `data` is left: a buffer handed to a socket keeps it alive.
    """

    def __init__(self, key: str, meta: EntryMeta, data: memoryview) -> None:
        self.key = key
        self.meta = meta
        self._data: memoryview | None = data

    @property
    def data(self) -> memoryview:
        if self._data is None:
            raise ValueError(f"lease of {self.key} was released")
        return self._data

    def array(self) -> NDArray[Any]:
        """Return the rows as a read-only array on the same bytes (bfloat16 as uint16)."""
        dtype = self.meta.rows.dtype
        flat = np.frombuffer(self.data, _NUMPY_DTYPES.get(dtype, dtype))
        return flat.reshape(self.meta.rows.shape)

    def release(self) -> None:
        """Let go of the entry. Idempotent."""
        self._data = None

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Claim(ABC):
    """The right and duty to make one entry: reserve, write, commit; or abandon.

    Until commit nobody sees the entry. A claim that is dropped, or whose process dies, ends by itself.
    """

    key: str

    @abstractmethod
    def reserve(self, meta: EntryMeta) -> memoryview | None:
        """Return a writable view of `meta.rows.size_bytes` bytes, or None when there is no room.

        May evict entries that nobody leases. At most once a claim. Blocks for the cache's lock only.
        """

    @abstractmethod
    def commit(self) -> Lease | None:
        """Publish what was written and return a lease on it; None when the claim had been taken over.

        The view must not be used any more: ValueError while slices or arrays on it exist. Reads all
        bytes once for the checksum, so call it off the event loop for big entries.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Give up; the next `begin` of the key gets the claim. Idempotent, nothing after a commit."""

    def publish(self, meta: EntryMeta, parts: Sequence[Buffer]) -> Lease | None:
        """Reserve, write the parts one after the other and commit; None when it could not be kept.

        ValueError unless the parts are `meta.rows.size_bytes` bytes in all. Ends the claim in any case.
        """
        with self:
            sources = [_flat_bytes(part) for part in parts]
            total = sum(source.nbytes for source in sources)
            if total != meta.rows.size_bytes:
                raise ValueError(f"parts of {total} bytes for rows of {meta.rows.size_bytes} bytes")
            view = self.reserve(meta)
            if view is None:
                return None
            target, position = _flat_bytes(view), 0
            for source in sources:
                # numpy lets go of the GIL while it copies.
                np.copyto(target[position : position + source.nbytes], source)
                position += source.nbytes
            del target
            return self.commit()

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()


class EmbeddingCache(ABC):
    """Entries under content keys (32 hex digits), least recently used out first, never a leased one.

    All methods are thread-safe and take microseconds, except that the first reader of an entry checks
    its bytes (about 5 GB/s): call them in a worker thread where entries are big. ValueError for a key
    that is no content key. An entry that is torn or damaged is a miss.
    """

    capacity_bytes: int

    @abstractmethod
    def get(self, key: str) -> Lease | None:
        """Return a lease on a finished entry, or None."""

    @abstractmethod
    def begin(self, key: str, *, ttl_s: float = DEFAULT_CLAIM_S) -> Lease | Claim | Busy:
        """Return the entry, or the claim to make it, or who is making it now.

        A claim can be taken over when its process is dead or after `ttl_s`. While the cache is full of
        leased entries a claim excludes nobody and its `reserve` gives None.
        """

    @abstractmethod
    def stats(self) -> CacheStats:
        """Return the figures."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Assert that the books are right; AssertionError says what is not."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the cache once the last lease ends. Idempotent."""

    def put(self, key: str, meta: EntryMeta, parts: Sequence[Buffer]) -> bool:
        """Publish an entry; tell whether the cache has it now."""
        found = self.begin(key)
        if isinstance(found, Busy):
            return False
        lease = found if isinstance(found, Lease) else found.publish(meta, parts)
        if lease is None:
            return False
        lease.release()
        return True


def _flat_bytes(part: Buffer) -> NDArray[np.uint8]:
    if isinstance(part, np.ndarray):
        return np.ascontiguousarray(part).reshape(-1).view(np.uint8)
    return np.frombuffer(part, np.uint8)


def parse_key(key: str) -> bytes:
    """Return the 16 bytes of a content key; ValueError if it is none."""
    if len(key) != 32:
        raise ValueError(f"{key!r} is no content key: 32 hex digits")
    return bytes.fromhex(key)
