"""Any order of operations by several handles, against dictionaries."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.shared_cache.content import check, key_of, meta_of, rows_of
from transom.shared_cache.contract import Busy, Claim, Lease
from transom.shared_cache.embedding_cache import ShmEmbeddingCache

SIZE_BYTES = 192 * 1024
ROWS_BYTES = 30_000
HANDLES = 3
keys = st.integers(0, 11).map(key_of)
handles = st.integers(0, HANDLES - 1)
picks = st.integers(0, 10**6)


class SharedCache(RuleBasedStateMachine):
    """`published` has all keys that were ever made: what the cache may, and while leased must, have."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "arena"
        self.caches = [ShmEmbeddingCache(self.path, SIZE_BYTES) for _ in range(HANDLES)]
        self.published: set[str] = set()
        self.claims: dict[str, tuple[int, Claim]] = {}
        self.leases: list[tuple[int, str, Lease]] = []

    def leased(self) -> set[str]:
        return {key for _, key, _ in self.leases}

    def found(self, handle: int, key: str, lease: Lease) -> None:
        assert key in self.published
        assert key not in self.claims
        check(lease, key, ROWS_BYTES)
        self.leases.append((handle, key, lease))

    @rule(handle=handles, key=keys)
    def get(self, handle: int, key: str) -> None:
        lease = self.caches[handle].get(key)
        assert lease is not None or key not in self.leased()
        if lease is not None:
            self.found(handle, key, lease)

    @rule(handle=handles, key=keys)
    def begin(self, handle: int, key: str) -> None:
        found = self.caches[handle].begin(key)
        assert isinstance(found, Busy) == (key in self.claims)
        assert isinstance(found, Lease) or key not in self.leased()
        if isinstance(found, Lease):
            self.found(handle, key, found)
        elif isinstance(found, Claim):
            self.claims[key] = (handle, found)

    @rule(handle=handles, key=keys)
    def take_over(self, handle: int, key: str) -> None:
        """A claim that is overdue at once loses to the next, and its result is dropped."""
        if key in self.claims or key in self.leased():
            return None
        late = self.caches[handle].begin(key, ttl_s=0.0)
        if isinstance(late, Lease):
            return self.found(handle, key, late)
        assert isinstance(late, Claim)
        rows = rows_of(key, ROWS_BYTES)
        reserved = late.reserve(meta_of(key, rows)) is not None
        heir = self.caches[(handle + 1) % HANDLES].begin(key)
        assert isinstance(heir, Claim)
        if reserved:
            assert late.commit() is None
        self.claims[key] = ((handle + 1) % HANDLES, heir)
        return None

    @precondition(lambda self: self.claims)
    @rule(pick=picks, keep=st.booleans())
    def publish(self, pick: int, keep: bool) -> None:
        key = sorted(self.claims)[pick % len(self.claims)]
        handle, claim = self.claims.pop(key)
        rows = rows_of(key, ROWS_BYTES)
        lease = claim.publish(meta_of(key, rows), [rows])
        if lease is None:
            return
        self.published.add(key)
        if keep:
            self.found(handle, key, lease)
        else:
            lease.release()
        again = self.caches[0].get(key)
        assert again is not None
        check(again, key, ROWS_BYTES)

    @precondition(lambda self: self.claims)
    @rule(pick=picks, reserve=st.booleans())
    def abandon(self, pick: int, reserve: bool) -> None:
        key = sorted(self.claims)[pick % len(self.claims)]
        _, claim = self.claims.pop(key)
        if reserve:
            claim.reserve(meta_of(key, rows_of(key, ROWS_BYTES)))
        claim.abandon()

    @precondition(lambda self: self.leases)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        _, key, lease = self.leases.pop(pick % len(self.leases))
        check(lease, key, ROWS_BYTES)
        lease.release()

    @rule(handle=handles)
    def restart(self, handle: int) -> None:
        for _, key, lease in [held for held in self.leases if held[0] == handle]:
            check(lease, key, ROWS_BYTES)
            lease.release()
        self.leases = [held for held in self.leases if held[0] != handle]
        for key in [key for key, (owner, _) in self.claims.items() if owner == handle]:
            self.claims.pop(key)[1].abandon()
        self.caches[handle].close()
        self.caches[handle] = ShmEmbeddingCache(self.path, SIZE_BYTES)

    @rule()
    def restart_all(self) -> None:
        for handle in range(HANDLES):
            self.restart(handle)

    @invariant()
    def books_are_right(self) -> None:
        cache = self.caches[0]
        cache.check_integrity()
        stats = cache.stats()
        assert stats.leases == len(self.leases) + len(self.claims)
        assert stats.entries <= len(self.published)
        assert (stats.torn, stats.repairs, stats.processes) == (0, 0, HANDLES)

    def teardown(self) -> None:
        for _, key, lease in self.leases:
            check(lease, key, ROWS_BYTES)
            lease.release()
        self.leases.clear()
        self.claims.clear()
        for cache in self.caches:
            cache.close()
        self.folder.cleanup()


TestSharedCache = SharedCache.TestCase
TestSharedCache.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
