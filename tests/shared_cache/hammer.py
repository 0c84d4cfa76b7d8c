"""Several processes that use one arena at random while one after the other is killed.

Runs on its own: `hammer.py PATH KILLS SECONDS`; prints a JSON summary, exits with 1 when a worker saw bytes
that are not those of the key or the books are wrong at the end.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
from pathlib import Path

from tests.shared_cache.content import check, key_of, meta_of, put, rows_of
from transom.shared_cache.contract import Busy, EmbeddingCache, Lease
from transom.shared_cache.embedding_cache import ShmEmbeddingCache

WORKERS = 4
KEYS = 60
SIZE_BYTES = 320 * 1024


def one_step(cache: EmbeddingCache, rng: random.Random, held: list[tuple[str, Lease]]) -> None:
    key = key_of(rng.randrange(KEYS))
    found = cache.get(key) if rng.random() < 0.3 else cache.begin(key, ttl_s=rng.choice((0.001, 60)))
    if found is None or isinstance(found, Busy):
        return
    if not isinstance(found, Lease):
        rows = rows_of(key)
        if rng.random() < 0.2:
            found.reserve(meta_of(key, rows))
            found.abandon()
            return
        lease = found.publish(meta_of(key, rows), [rows[:7], rows[7:]])
        if lease is None:
            return
        found = lease
    check(found, key)
    held.append((key, found))
    while len(held) > 6:
        old_key, old = held.pop(rng.randrange(len(held)))
        check(old, old_key)
        old.release()


def worker(path: Path, seed: int, progress: int) -> None:
    rng = random.Random(seed)
    cache = ShmEmbeddingCache(path, SIZE_BYTES)
    held: list[tuple[str, Lease]] = []
    while True:
        one_step(cache, rng, held)
        os.write(progress, b".")
        if rng.random() < 0.002:
            for key, lease in held:
                check(lease, key)
            held.clear()
            cache.close()
            cache = ShmEmbeddingCache(path, SIZE_BYTES)


class Hammer:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.readable, self.progress = os.pipe()
        self.seeds = 0
        self.children: list[int] = []
        self.steps = self.kills = 0
        self.failed = False

    def spawn(self) -> None:
        self.seeds += 1
        pid = os.fork()
        if pid == 0:
            try:
                worker(self.path, self.seeds, self.progress)
            finally:
                sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
                os._exit(1)
        self.children.append(pid)

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        self.children.remove(pid)
        # Exit 1 is a worker that saw something wrong before the kill reached it.
        self.failed |= os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != -signal.SIGKILL

    def run(self, kills: int, seconds: float) -> None:
        rng = random.Random(0)
        end = time.monotonic() + seconds
        for _ in range(WORKERS):
            self.spawn()
        while self.kills < kills and time.monotonic() < end and not self.failed:
            goal = self.steps + rng.randrange(5, 60)
            # Killed after a number of steps of all, not after a time: a slow machine tests as much.
            while self.steps < goal and time.monotonic() < end:
                if select.select([self.readable], [], [], 0.2)[0]:
                    self.steps += len(os.read(self.readable, 16))
            self.kill(rng.choice(self.children))
            self.kills += 1
            self.spawn()
        for pid in list(self.children):
            self.kill(pid)


def main(path: Path, kills: int, seconds: float) -> int:
    hammer = Hammer(path)
    hammer.run(kills, seconds)
    cache = ShmEmbeddingCache(path, SIZE_BYTES)
    cache.check_integrity()
    stats = cache.stats()
    found = 0
    for number in range(KEYS):
        lease = cache.get(key_of(number))
        if lease is not None:
            check(lease, key_of(number))
            found += 1
    assert found == stats.entries, (found, stats)
    for number in range(KEYS):
        assert put(cache, key_of(number))
    cache.check_integrity()
    summary = {"steps": hammer.steps, "kills": hammer.kills, "leases": stats.leases, "torn": stats.torn}
    summary |= {"processes": stats.processes, "repairs": stats.repairs, "takeovers": stats.takeovers}
    summary |= {"hits": stats.hits, "evictions": stats.evictions, "files": len(os.listdir(path.parent))}
    sys.stdout.write(json.dumps(summary) + "\n")
    return int(hammer.failed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
