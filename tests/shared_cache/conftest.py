"""Fixtures of the shared cache: arenas in the test's folder, never in the machine's /dev/shm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from transom.shared_cache.contract import EmbeddingCache
from transom.shared_cache.embedding_cache import ShmEmbeddingCache
from transom.shared_cache.heap_cache import HeapEmbeddingCache

Opener = Callable[..., ShmEmbeddingCache]


@pytest.fixture
def attach(tmp_path: Path) -> Iterator[Opener]:
    """Open handles on one arena; each is as good as a process of its own."""
    opened: list[ShmEmbeddingCache] = []

    def open_one(size_bytes: int = 1 << 20, **options: bool) -> ShmEmbeddingCache:
        opened.append(ShmEmbeddingCache(tmp_path / "arena", size_bytes, **options))
        return opened[-1]

    yield open_one
    for cache in opened:
        cache.close()


@pytest.fixture(params=["shm", "heap"])
def cache(request: pytest.FixtureRequest, attach: Opener) -> Iterator[EmbeddingCache]:
    """One cache of each kind, 1 MiB."""
    made: EmbeddingCache = attach() if request.param == "shm" else HeapEmbeddingCache(1 << 20)
    yield made
    made.check_integrity()
    made.close()
