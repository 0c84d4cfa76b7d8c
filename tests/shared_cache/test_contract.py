"""What both kinds of embedding cache promise."""

from __future__ import annotations

import numpy as np
import pytest

from tests.shared_cache.content import check, key_of, meta_of, put, rows_of
from transom.messages import TensorMeta
from transom.shared_cache.contract import Busy, Claim, EmbeddingCache, EntryMeta, Lease


def claim(cache: EmbeddingCache, key: str, ttl_s: float = 300.0) -> Claim:
    found = cache.begin(key, ttl_s=ttl_s)
    assert isinstance(found, Claim)
    return found


def test_entry_comes_back_as_it_was_put(cache: EmbeddingCache) -> None:
    keys = [key_of(number) for number in range(12)]
    for key in keys:
        assert cache.get(key) is None
        assert put(cache, key)
    for key in keys:
        lease = cache.get(key)
        assert lease is not None
        with lease:
            check(lease, key)
    stats = cache.stats()
    assert (stats.hits, stats.insertions, stats.entries) == (12, 12, 12)
    assert stats.misses == 24  # one by get, one by the put that found nothing


def test_bfloat16_rows_come_as_raw_words(cache: EmbeddingCache) -> None:
    words = np.arange(12, dtype=np.uint16).reshape(3, 4)
    assert cache.put(key_of(0), EntryMeta(TensorMeta("bfloat16", (3, 4))), [words])
    lease = cache.get(key_of(0))
    assert lease is not None
    np.testing.assert_array_equal(lease.array(), words)


def test_leased_bytes_can_not_be_written(cache: EmbeddingCache) -> None:
    key = next(k for k in map(key_of, range(99)) if len(rows_of(k)))
    put(cache, key)
    lease = cache.get(key)
    assert lease is not None
    assert lease.data.readonly
    with pytest.raises(ValueError, match="read-only"):
        lease.array()[0] = 1


def test_second_comer_is_told_who_is_busy(cache: EmbeddingCache) -> None:
    key = key_of(1)
    first = claim(cache, key)
    second = cache.begin(key)
    assert isinstance(second, Busy)
    assert second.pid > 0
    assert 0 < second.expires_s <= 300
    assert cache.get(key) is None
    assert not put(cache, key)
    rows = rows_of(key)
    lease = first.publish(meta_of(key, rows), [rows])
    assert lease is not None
    check(lease, key)
    found = cache.begin(key)
    assert isinstance(found, Lease)
    check(found, key)


def test_abandoned_claim_goes_to_the_next(cache: EmbeddingCache) -> None:
    first = claim(cache, key_of(1))
    first.reserve(meta_of(key_of(1), rows_of(key_of(1))))
    first.abandon()
    first.abandon()
    second = claim(cache, key_of(1))
    with second:
        assert isinstance(cache.begin(key_of(1)), Busy)
    assert isinstance(cache.begin(key_of(1)), Claim)


@pytest.mark.parametrize("reserves", [False, True])
def test_dropped_claim_is_over(cache: EmbeddingCache, reserves: bool) -> None:
    dropped = claim(cache, key_of(1))
    if reserves:
        dropped.reserve(meta_of(key_of(1), rows_of(key_of(1))))
    del dropped
    assert isinstance(cache.begin(key_of(1)), Claim)


def test_overdue_claim_is_taken_over_and_its_late_result_dropped(cache: EmbeddingCache) -> None:
    key = key_of(2)
    rows = rows_of(key)
    late = claim(cache, key, ttl_s=0.0)
    view = late.reserve(meta_of(key, rows))
    assert view is not None
    heir = claim(cache, key)
    assert late.commit() is None
    assert cache.get(key) is None
    assert heir.publish(meta_of(key, rows), [rows]) is not None
    found = cache.get(key)
    assert found is not None
    check(found, key)
    assert cache.stats().takeovers == 1


def test_commit_refuses_while_the_bytes_can_still_be_written(cache: EmbeddingCache) -> None:
    key, rows = key_of(3), np.arange(40, dtype=np.int32).reshape(10, 4)
    mine = claim(cache, key)
    view = mine.reserve(meta_of(key, rows))
    assert view is not None
    array = np.frombuffer(view, np.int32)
    with pytest.raises(ValueError, match="still in use"):
        mine.commit()
    array[:] = rows.reshape(-1)
    del array
    lease = mine.commit()
    assert lease is not None
    np.testing.assert_array_equal(lease.array(), rows)


def test_parts_must_be_as_long_as_the_rows(cache: EmbeddingCache) -> None:
    rows = np.ones((2, 4), np.int32)
    with pytest.raises(ValueError, match="parts of 16 bytes for rows of 32"):
        claim(cache, key_of(4)).publish(meta_of(key_of(4), rows), [rows[:1]])
    assert isinstance(cache.begin(key_of(4)), Claim)
    with pytest.raises(ValueError, match="nothing is reserved"):
        claim(cache, key_of(5)).commit()


@pytest.mark.parametrize("key", ["", "0" * 31, "0" * 33, "g" * 32])
def test_what_is_no_content_key_is_refused(cache: EmbeddingCache, key: str) -> None:
    with pytest.raises(ValueError, match=r"content key|hexadecimal"):
        cache.get(key)
    with pytest.raises(ValueError, match=r"content key|hexadecimal"):
        cache.begin(key)


def test_size_is_bounded_and_the_coldest_goes_first(cache: EmbeddingCache) -> None:
    rows = np.zeros((1000, 25), np.int32)  # 100 kB
    meta = EntryMeta(TensorMeta("int32", rows.shape))
    assert cache.put(key_of(0), meta, [rows])
    for number in range(1, 40):
        assert cache.put(key_of(number), meta, [rows])
        kept = cache.get(key_of(0))  # stays warm
        assert kept is not None
        kept.release()
        assert cache.stats().used_bytes <= 1 << 20
    assert cache.get(key_of(1)) is None
    stats = cache.stats()
    assert stats.evictions >= 30
    assert stats.evicted_bytes >= 30 * rows.nbytes


def test_leased_entry_is_never_overwritten(cache: EmbeddingCache) -> None:
    rows = np.full((1000, 25), 7, np.int32)
    meta = EntryMeta(TensorMeta("int32", rows.shape))
    cache.put(key_of(0), meta, [rows])
    lease = cache.get(key_of(0))
    assert lease is not None
    array = lease.array()
    lease.release()
    with pytest.raises(ValueError, match="released"):
        _ = lease.data
    for number in range(1, 40):
        cache.put(key_of(number), meta, [np.full_like(rows, number)])
    assert (array == 7).all()


def test_entry_that_can_not_fit_is_rejected(cache: EmbeddingCache) -> None:
    assert put(cache, key_of(1))
    rows = np.zeros((1 << 20) // 16 + 1, np.dtype("i4,i4,i4,i4")).view(np.int32).reshape(-1, 4)
    assert not cache.put(key_of(0), meta_of(key_of(0), rows), [rows])
    assert cache.stats().rejected == 1
    assert cache.get(key_of(1)) is not None
