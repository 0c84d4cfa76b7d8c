"""Entries whose bytes follow from their key, so that any process can tell right from wrong."""

from __future__ import annotations

import functools
import hashlib
import random

import numpy as np

from transom.messages import TensorMeta
from transom.shared_cache.contract import EmbeddingCache, EntryMeta, Lease


def key_of(number: int) -> str:
    """Return a content key."""
    return hashlib.blake2b(str(number).encode(), digest_size=16).hexdigest()


@functools.cache
def rows_of(key: str, max_bytes: int = 40_000) -> np.ndarray:
    """Return the rows (count, 4) of a key."""
    rng = random.Random(key)
    count = rng.choice((0, 1, rng.randint(1, max_bytes // 16), rng.randint(1, max_bytes // 160)))
    return np.random.default_rng(int(key[:8], 16)).integers(0, 2**31, (count, 4)).astype(np.int32)


def meta_of(key: str, rows: np.ndarray) -> EntryMeta:
    return EntryMeta(TensorMeta("int32", tuple(rows.shape)), user=key.encode() * (int(key[0], 16)))


def put(cache: EmbeddingCache, key: str, max_bytes: int = 40_000) -> bool:
    rows = rows_of(key, max_bytes)
    half = len(rows) // 2
    return cache.put(key, meta_of(key, rows), [rows[:half], rows[half:]])


def check(lease: Lease, key: str, max_bytes: int = 40_000) -> None:
    """Assert that a lease gives what belongs to its key."""
    rows = rows_of(key, max_bytes)
    assert lease.key == key
    assert lease.meta == meta_of(key, rows)
    np.testing.assert_array_equal(lease.array(), rows)
