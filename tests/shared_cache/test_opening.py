"""Names, orphans and the way to the heap."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.shared_cache.content import check, key_of, meta_of, put, rows_of
from transom.shared_cache.arena import Arena
from transom.shared_cache.contract import ArenaSpaceError, Claim, EmbeddingCache, Lease
from transom.shared_cache.embedding_cache import ShmEmbeddingCache
from transom.shared_cache.heap_cache import HeapEmbeddingCache
from transom.shared_cache.opening import SHM_FOLDER, arena_name, open_embedding_cache, sweep_orphans
from transom.shared_cache.single_flight import lease_or_claim

MIB = 1 << 20


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_processes_of_one_identity_share_one_arena(tmp_path: Path) -> None:
    one = open_embedding_cache("fleet-a/model", MIB, folder=tmp_path)
    two = open_embedding_cache("fleet-a/model", MIB, folder=tmp_path)
    other = open_embedding_cache("fleet-b/model", MIB, folder=tmp_path)
    assert put(one, key_of(0))
    lease = two.get(key_of(0))
    assert lease is not None
    check(lease, key_of(0))
    assert other.get(key_of(0)) is None
    assert sorted(os.listdir(tmp_path)) == sorted(
        arena_name(identity, os.geteuid()) for identity in ("fleet-a/model", "fleet-b/model")
    )
    lease.release()
    for cache in (one, two, other):
        cache.close()


def test_names_tell_identities_and_users_apart() -> None:
    names = [
        arena_name(identity, uid)
        for uid in (0, 1)
        for identity in ("a/b", "a-b", "A/b", "", "../x", "x" * 300)
    ]
    assert len(set(names)) == len(names)
    assert all("/" not in name and len(name) < 100 and name.startswith("transom-emb-") for name in names)


def test_sweep_removes_own_orphans_only(tmp_path: Path) -> None:
    uid = os.geteuid()
    orphan, used, spared = (arena_name(identity, uid) for identity in ("orphan", "used", "spared"))
    for name in (orphan, spared):
        ShmEmbeddingCache(tmp_path / name, MIB).close()
    alive = ShmEmbeddingCache(tmp_path / used, MIB)
    half_made = arena_name("half made", uid)
    (tmp_path / half_made).write_bytes(b"")
    strangers = [arena_name("orphan", uid + 1), "transom-emb-x", f"{orphan}.bak", "psm_12345", "sem.x"]
    for name in strangers:
        (tmp_path / name).write_bytes(b"not ours")
    link = arena_name("link", uid)
    (tmp_path / link).symlink_to(tmp_path / strangers[0])
    (tmp_path / arena_name("folder", uid)).mkdir()
    assert sweep_orphans(tmp_path, spare=spared) == sorted([orphan, half_made])
    left = {used, spared, link, arena_name("folder", uid), *strangers}
    assert set(os.listdir(tmp_path)) == left
    alive.close()


def test_a_start_that_keeps_nothing_removes_orphans_too(tmp_path: Path) -> None:
    ShmEmbeddingCache(tmp_path / arena_name("fleet", os.geteuid()), MIB).close()
    alive = ShmEmbeddingCache(tmp_path / arena_name("other", os.geteuid()), MIB)
    open_embedding_cache("fleet", 0, folder=tmp_path).close()
    assert os.listdir(tmp_path) == [arena_name("other", os.geteuid())]
    alive.close()
    open_embedding_cache("fleet", 0, folder=tmp_path / "missing").close()


def test_kills_and_restarts_leave_one_arena(tmp_path: Path) -> None:
    script = (
        "import os, sys\nfrom pathlib import Path\n"
        "from tests.shared_cache.content import key_of, put\n"
        "from transom.shared_cache.opening import open_embedding_cache\n"
        f"cache = open_embedding_cache('fleet', {MIB}, folder=Path({str(tmp_path)!r}))\n"
        "put(cache, key_of(int(sys.argv[1])))\nlease = cache.get(key_of(0))\nos.kill(os.getpid(), 9)\n"
    )
    for number in range(3):
        ended = subprocess.run([sys.executable, "-c", script, str(number)], check=False)
        assert ended.returncode == -9
    cache = open_embedding_cache("fleet", MIB, folder=tmp_path)
    assert os.listdir(tmp_path) == [arena_name("fleet", os.geteuid())]
    for number in range(3):
        lease = cache.get(key_of(number))
        assert lease is not None
        check(lease, key_of(number))
    cache.close()


def test_too_small_file_system_fails_cleanly(small_tmpfs: Path, caplog: pytest.LogCaptureFixture) -> None:
    free_before = os.statvfs(small_tmpfs).f_bfree
    with pytest.raises(ArenaSpaceError, match="too little room") as failure:
        ShmEmbeddingCache(small_tmpfs / "arena", 64 * MIB)
    assert failure.value.need_bytes > 60 * MIB
    assert MIB < failure.value.free_bytes <= 2 * MIB
    assert os.listdir(small_tmpfs) == []
    assert os.statvfs(small_tmpfs).f_bfree == free_before
    with caplog.at_level(logging.WARNING):
        cache = open_embedding_cache("fleet", 64 * MIB, folder=small_tmpfs)
    assert isinstance(cache, HeapEmbeddingCache)
    assert "too little room" in caplog.text
    assert put(cache, key_of(0))
    fits = open_embedding_cache("fleet", MIB, folder=small_tmpfs)
    assert isinstance(fits, ShmEmbeddingCache)
    fits.close()


def test_file_size_limit_fails_cleanly(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(ArenaSpaceError, match=os.strerror(errno.EFBIG)):
            ShmEmbeddingCache(tmp_path / "arena", 4 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("size_bytes", [0, 1, 4096, 128 * 1024 - 1])
def test_sizes_below_an_arena(size_bytes: int, tmp_path: Path) -> None:
    cache = open_embedding_cache("fleet", size_bytes, folder=tmp_path)
    assert isinstance(cache, HeapEmbeddingCache)
    for number in range(20):
        put(cache, key_of(number))
    assert cache.stats().used_bytes <= size_bytes
    if not size_bytes:
        assert cache.stats().entries == 0
    cache.check_integrity()
    assert os.listdir(tmp_path) == []


def test_smallest_arena(tmp_path: Path) -> None:
    cache = open_embedding_cache("fleet", 128 * 1024, folder=tmp_path)
    assert isinstance(cache, ShmEmbeddingCache)
    assert sum(put(cache, key_of(number)) for number in range(20)) >= 15
    assert cache.stats().used_bytes <= cache.capacity_bytes <= 128 * 1024
    cache.check_integrity()
    cache.close()


def test_missing_folder_falls_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = open_embedding_cache("fleet", MIB, folder=tmp_path / "none")
    assert isinstance(cache, HeapEmbeddingCache)
    assert "does not exist" in caplog.text


def test_two_that_close_at_once_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second asks who else is there between the first's last look and its end."""
    one, two = (open_embedding_cache("fleet", MIB, keep=False, folder=tmp_path) for _ in range(2))
    let_go = Arena.unmap

    def close_the_other_first(arena: Arena) -> None:
        monkeypatch.setattr(Arena, "unmap", let_go)
        two.close()
        let_go(arena)

    monkeypatch.setattr(Arena, "unmap", close_the_other_first)
    one.close()
    assert os.listdir(tmp_path) == []


def test_many_processes_that_close_at_once_leave_nothing(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from transom.shared_cache.opening import open_embedding_cache\n"
        f"cache = open_embedding_cache('fleet', {MIB}, keep=False, folder=Path({str(tmp_path)!r}))\n"
        "print('open', flush=True)\nsys.stdin.read()\ncache.close()\n"
    )
    command, pipe = [sys.executable, "-c", script], subprocess.PIPE
    crowd = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(4)]
    for process in crowd:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
    assert os.listdir(tmp_path) == [arena_name("fleet", os.geteuid())]
    for process in crowd:
        assert process.stdin is not None
        process.stdin.close()
    for process in crowd:
        assert process.wait(PATIENCE_S) == 0
        assert process.stdout is not None
        process.stdout.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not SHM_FOLDER.is_dir(), reason="no /dev/shm")
def test_real_shm() -> None:
    identity = f"test-{os.getpid()}"
    cache = open_embedding_cache(identity, MIB, keep=False)
    assert isinstance(cache, ShmEmbeddingCache)
    assert put(cache, key_of(0))
    cache.close()
    assert not (SHM_FOLDER / arena_name(identity, os.geteuid())).exists()


@pytest.mark.parametrize("kind", ["shm", "heap"])
async def test_waiting_ends_with_the_entry_or_the_claim(kind: str, tmp_path: Path) -> None:
    cache: EmbeddingCache = (
        HeapEmbeddingCache(MIB) if kind == "heap" else open_embedding_cache("fleet", MIB, folder=tmp_path)
    )
    first = await lease_or_claim(cache, key_of(0))
    assert isinstance(first, Claim)
    waiting = [asyncio.create_task(lease_or_claim(cache, key_of(0))) for _ in range(3)]
    while cache.stats().waits < 3:
        early, _ = await asyncio.wait(waiting, timeout=0.02)
        assert not early
    first.abandon()
    done, others = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    (second,) = [await task for task in done]
    assert isinstance(second, Claim)
    rows = rows_of(key_of(0))
    published = second.publish(meta_of(key_of(0), rows), [rows])
    assert published is not None
    published.release()
    for lease in await asyncio.gather(*others):
        assert isinstance(lease, Lease)
        check(lease, key_of(0))
        lease.release()
    del done, waiting, others, lease
    cache.check_integrity()
    cache.close()
