"""Kill a process at each line of the cache's code, one after the other, and look at the arena after each.

Runs on its own: `crash_points.py FOLDER SCENARIO STRIDE`; prints how many lines it was killed at. The
killed processes are forks, which begin without a handle on the arena.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from tests.shared_cache.content import check, key_of, meta_of, put, rows_of
from transom.shared_cache.contract import Busy, Claim, Lease
from transom.shared_cache.embedding_cache import ShmEmbeddingCache

SIZE_BYTES = 160 * 1024
ENTRY_BYTES = 24_000  # so that a few fill the arena
LEASED, WARM, NEW, CLAIMED = (key_of(number) for number in (0, 1, 2, 3))


def attach(path: Path) -> ShmEmbeddingCache:
    return ShmEmbeddingCache(path, SIZE_BYTES)


def put_with_eviction(path: Path) -> None:
    cache = attach(path)
    tracing()
    put(cache, NEW, ENTRY_BYTES)


def hit_and_release(path: Path) -> None:
    cache = attach(path)
    tracing()
    lease = cache.get(WARM)
    if lease is not None:
        check(lease, WARM, ENTRY_BYTES)
        lease.release()


def claim_and_abandon(path: Path) -> None:
    cache = attach(path)
    tracing()
    claim = cache.begin(NEW)
    if isinstance(claim, Claim):
        rows = rows_of(NEW, ENTRY_BYTES)
        view = claim.reserve(meta_of(NEW, rows))
        if view is not None and len(view):
            view[:1] = b"x"
        claim.abandon()


def take_over(path: Path) -> None:
    cache, other = attach(path), attach(path)
    overdue = other.begin(CLAIMED, ttl_s=0.0)
    assert isinstance(overdue, Claim)
    overdue.reserve(meta_of(CLAIMED, rows_of(CLAIMED, ENTRY_BYTES)))
    tracing()
    heir = cache.begin(CLAIMED)
    assert isinstance(heir, Claim)
    overdue.commit()
    rows = rows_of(CLAIMED, ENTRY_BYTES)
    heir.publish(meta_of(CLAIMED, rows), [rows])


def attach_and_close(path: Path) -> None:
    tracing()
    attach(path).close()


SCENARIOS: dict[str, Callable[[Path], None]] = {
    function.__name__: function
    for function in (put_with_eviction, hit_and_release, claim_and_abandon, take_over, attach_and_close)
}


class Tracer:
    """Kills the process when the cache's code has run `after` lines."""

    after = 0
    seen = 0

    @classmethod
    def trace(cls, frame: FrameType, event: str, _: Any) -> Any:
        if "shared_cache" not in frame.f_code.co_filename or "/tests/" in frame.f_code.co_filename:
            return None
        if event == "line":
            cls.seen += 1
            if cls.seen == cls.after:
                os.kill(os.getpid(), signal.SIGKILL)
        return cls.trace


def tracing() -> None:
    sys.settrace(Tracer.trace)


def look(cache: ShmEmbeddingCache, held: Lease | None) -> None:
    """Assert that the arena is in order after a kill."""
    cache.check_integrity()
    if held is not None:
        check(held, LEASED, ENTRY_BYTES)
    stats = cache.stats()
    assert stats.leases == (held is not None), stats
    for key in (LEASED, WARM, NEW, CLAIMED):
        found = cache.begin(key)
        assert not isinstance(found, Busy), found
        if isinstance(found, Lease):
            check(found, key, ENTRY_BYTES)
            found.release()
        else:
            found.abandon()
    assert stats.torn == 0, stats


def prepare(path: Path) -> bytes:
    """Return an arena that is full and closed."""
    cache = attach(path)
    for number in range(4, 20):
        put(cache, key_of(number), ENTRY_BYTES)
    for key in (WARM, LEASED):
        put(cache, key, ENTRY_BYTES)
    assert cache.stats().evictions
    cache.close()
    return path.read_bytes()


def run(folder: Path, scenario: Callable[[Path], None], stride: int, *, survivor: bool) -> int:
    """Kill at every `stride`-th line until the scenario ends alive; return the number of kills."""
    kills = 0
    path = folder / f"{scenario.__name__}-{survivor}"
    full = prepare(path)
    while True:
        path.write_bytes(full)
        cache = attach(path) if survivor else None
        held = cache.get(LEASED) if cache else None
        pid = os.fork()
        if pid == 0:
            Tracer.after = 1 + kills * stride
            scenario(path)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status in (0, -signal.SIGKILL), status
        cache = cache or attach(path)
        look(cache, held)
        del held
        cache.close()
        if status == 0:
            return kills
        kills += 1


if __name__ == "__main__":
    chosen = SCENARIOS[sys.argv[2]]
    total = sum(run(Path(sys.argv[1]), chosen, int(sys.argv[3]), survivor=alive) for alive in (True, False))
    sys.stdout.write(f"{total}\n")
