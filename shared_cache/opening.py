"""Open the embedding cache of a machine: name the arena, sweep orphans, fall back to the heap.

Encoder processes, at start. The only place that knows where arenas lie and what they are called.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from pathlib import Path

from transom.media_key import framed_digest
from transom.shared_cache.arena import FIRST_PROCESS_BYTE, MUTEX_BYTE
from transom.shared_cache.contract import ArenaError, EmbeddingCache
from transom.shared_cache.embedding_cache import ShmEmbeddingCache
from transom.shared_cache.heap_cache import HeapEmbeddingCache
from transom.shared_cache.layout import MIN_ARENA_BYTES, PROCESSES
from transom.shared_cache.locks import ByteLocks

logger = logging.getLogger(__name__)

SHM_FOLDER = Path("/dev/shm")
_PREFIX = "transom-emb"


def arena_name(identity: str, uid: int) -> str:
    """Return the file name of a user's arena for a fleet and model: readable, and a digest of all of it."""
    shown = re.sub(r"[^a-z0-9.]+", "-", identity.lower()).strip("-.")[:40] or "x"
    return f"{_PREFIX}-{uid}-{shown}-{framed_digest(identity.encode(), person=b'arena')[:16]}"


def _own_names(uid: int) -> re.Pattern[str]:
    return re.compile(rf"{_PREFIX}-{uid}-[a-z0-9.-]{{1,40}}-[0-9a-f]{{16}}")


def open_embedding_cache(
    identity: str, size_bytes: int, *, keep: bool = True, folder: Path = SHM_FOLDER
) -> EmbeddingCache:
    """Return the cache of `identity` (fleet and model) that all processes of this user share.

    `size_bytes` bounds the arena with its tables; 0 keeps nothing. Where no arena can be had, the
    reason is logged and the process gets a cache of its own on the heap. `keep` leaves the arena for
    the next start when the last process closes it. Orphans of other identities are removed, of this one
    too where nothing is to be kept.
    """
    if not size_bytes:
        sweep_orphans(folder)
        return HeapEmbeddingCache(0)
    name = arena_name(identity, os.geteuid())
    try:
        if size_bytes < MIN_ARENA_BYTES:
            raise ArenaError(f"an arena needs at least {MIN_ARENA_BYTES} bytes, not {size_bytes}")
        if not folder.is_dir():
            raise ArenaError(f"{folder} does not exist")
        sweep_orphans(folder, spare=name)
        return ShmEmbeddingCache(folder / name, size_bytes, keep=keep)
    except ArenaError as error:
        logger.warning(
            "no shared embedding cache: %s; this process keeps %d bytes on its heap", error, size_bytes
        )
        return HeapEmbeddingCache(size_bytes)


def sweep_orphans(folder: Path = SHM_FOLDER, *, spare: str = "") -> list[str]:
    """Remove this user's arenas that no living process has open; return their names. Never `spare`."""
    own = _own_names(os.geteuid())
    removed = []
    try:
        names = sorted(os.listdir(folder))
    except OSError:  # then there are none
        return []
    for name in names:
        if name != spare and own.fullmatch(name) and _remove_if_orphan(folder / name):
            logger.info("removed %s: its processes are gone", folder / name)
            removed.append(name)
    return removed


def _remove_if_orphan(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            return False
        locks = ByteLocks(fd)
        # Whoever makes or attaches it holds the mutex first and a process byte before letting go of it,
        # and starts over when the file has gone from its path meanwhile.
        if not locks.try_lock(MUTEX_BYTE) or locks.held_elsewhere(FIRST_PROCESS_BYTE, PROCESSES):
            return False
        path.unlink(missing_ok=True)
        return True
    finally:
        os.close(fd)
