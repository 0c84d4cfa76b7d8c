"""Throughput of the shared embedding cache against memcpy and a dictionary, on this machine.

Runs in `transom bench shm`, no server needed. All candidates take turns in every round, so that a busy
machine slows them alike; medians over rounds, wall and CPU time. The arena is full before the first
round: each put evicts, and no page is touched for the first time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from transom.bench.origin import origin
from transom.bench.report import append_rows
from transom.commands.base import make_console, write_json
from transom.errors import ConfigError
from transom.media_key import framed_digest
from transom.messages import TensorMeta
from transom.shared_cache.contract import EntryMeta
from transom.shared_cache.embedding_cache import ShmEmbeddingCache
from transom.shared_cache.layout import Geometry
from transom.shared_cache.opening import SHM_FOLDER

EXAMPLES = (
    "transom bench shm",
    "transom bench shm --arena-mb 512 --rounds 20 --processes 4 --json",
    "transom bench shm --out bench/results/shm.jsonl",
)
_SIZES_BYTES = (64 << 10, 1 << 20, 8 << 20)
_HIT_SIZE_BYTES = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arena-mb", type=int, default=128, metavar="N", help="(default %(default)s)")
    parser.add_argument("--rounds", type=int, default=12, metavar="N", help="a size (default %(default)s)")
    parser.add_argument(
        "--processes", type=int, default=2, metavar="N", help="that hit at once (default %(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="of that (default %(default)s)")
    parser.add_argument("--out", default="", metavar="FILE", help="append one JSON row a case to this file")


def run(args: argparse.Namespace) -> int:
    for name, low in (("arena_mb", 32), ("rounds", 1), ("processes", 1)):
        if getattr(args, name) < low:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {low}")
    with tempfile.TemporaryDirectory(dir=SHM_FOLDER, prefix="transom-bench-") as folder:
        path = Path(folder) / "arena"
        rows = [row for size in _SIZES_BYTES for row in _measure_size(path, size, args)]
        hits_per_s = _hit_together(path, args)
    about: dict[str, Any] = origin("shm") | {
        "arena_mb": args.arena_mb,
        "rounds": args.rounds,
        "cores": os.cpu_count(),
        "processes": args.processes,
        "hits_per_s_together": hits_per_s,
    }
    summary = about | {"rows": rows}
    if args.out:
        append_rows(args.out, [about | row for row in rows])
    if args.json:
        write_json(summary)
    else:
        _show(summary)
    return 0


def _measure_size(path: Path, size_bytes: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one entry size. The working set of every candidate is about half the arena."""
    arena_bytes = args.arena_mb << 20
    batch = max(1, arena_bytes // 2 // size_bytes // args.rounds)
    source = np.random.default_rng(0).integers(0, 256, size_bytes, dtype=np.uint8)
    meta = EntryMeta(TensorMeta("uint8", (size_bytes,)))
    cache = ShmEmbeddingCache(path, arena_bytes, keep=False)
    fill = 0
    while not cache.stats().evictions:
        cache.put(framed_digest(str(fill).encode(), person=b"bench-fill"), meta, [source])
        fill += 1
    targets = np.ones((batch * args.rounds, size_bytes), np.uint8)
    table: dict[str, NDArray[np.uint8]] = {}
    times: dict[str, list[tuple[float, float]]] = {}
    for number in range(args.rounds):
        indexes = range(number * batch, (number + 1) * batch)
        keys = [framed_digest(bytes([number]), str(i).encode(), person=b"bench") for i in indexes]

        actions: list[tuple[str, Callable[[], None]]] = [
            ("memcpy", partial(_copy, targets, source, indexes)),
            ("dict put", partial(_dict_put, table, source, keys)),
            ("shm put", partial(_put, cache, meta, source, keys)),
        ]
        actions = actions[number % 3 :] + actions[: number % 3]
        actions += [
            ("shm first get", partial(_hit, cache, keys)),
            ("dict hit", partial(_dict_hit, table, keys)),
            ("shm hit", partial(_hit, cache, keys)),
        ]
        for name, action in actions:
            times.setdefault(name, []).append(_timed(action, batch))
    cache.check_integrity()
    cache.close()
    return [_row(size_bytes, name, taken) for name, taken in times.items()]


def _copy(targets: NDArray[np.uint8], source: NDArray[np.uint8], indexes: range) -> None:
    for i in indexes:
        np.copyto(targets[i], source)


def _dict_put(table: dict[str, NDArray[np.uint8]], source: NDArray[np.uint8], keys: list[str]) -> None:
    for key in keys:
        table[key] = source.copy()


def _dict_hit(table: dict[str, NDArray[np.uint8]], keys: list[str]) -> None:
    for key in keys:
        _ = table[key].data


def _put(cache: ShmEmbeddingCache, meta: EntryMeta, source: NDArray[np.uint8], keys: list[str]) -> None:
    for key in keys:
        assert cache.put(key, meta, [source])


def _hit(cache: ShmEmbeddingCache, keys: list[str]) -> None:
    for key in keys:
        lease = cache.get(key)
        assert lease is not None
        lease.release()


def _timed(action: Callable[[], None], count: int) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return (time.perf_counter() - wall) / count, (time.process_time() - cpu) / count


def _row(size_bytes: int, name: str, taken: list[tuple[float, float]]) -> dict[str, Any]:
    wall_s = statistics.median(wall for wall, _ in taken)
    cpu_s = statistics.median(cpu for _, cpu in taken)
    moves_bytes = name not in ("dict hit", "shm hit")
    return {
        "size_bytes": size_bytes,
        "what": name,
        "wall_us": round(wall_s * 1e6, 2),
        "best_us": round(min(wall for wall, _ in taken) * 1e6, 2),
        "cpu_us": round(cpu_s * 1e6, 2),
        "gb_per_s": round(size_bytes / wall_s / 1e9, 3) if moves_bytes else None,
        "gb_per_cpu_s": round(size_bytes / cpu_s / 1e9, 3) if moves_bytes else None,
    }


def _hit_together(path: Path, args: argparse.Namespace) -> float:
    """Return the hits per second of several processes on one arena with a few hot entries."""
    cache = ShmEmbeddingCache(path, args.arena_mb << 20, keep=False)
    meta = EntryMeta(TensorMeta("uint8", (_HIT_SIZE_BYTES,)))
    keys = [framed_digest(bytes([n]), person=b"bench") for n in range(8)]
    for key in keys:
        cache.put(key, meta, [np.zeros(_HIT_SIZE_BYTES, np.uint8)])
    context = multiprocessing.get_context("spawn")
    with context.Pool(args.processes) as pool:
        pool.map(os.path.exists, [path] * args.processes)  # all have started
        work = (path, Geometry.of_size(args.arena_mb << 20).size_bytes, keys, args.seconds)
        rates = pool.starmap(_hit_for, [work] * args.processes, chunksize=1)
    cache.close()
    return round(sum(rates), 1)


def _hit_for(path: Path, size_bytes: int, keys: list[str], seconds: float) -> float:
    cache = ShmEmbeddingCache(path, size_bytes)
    begin = time.perf_counter()
    count = 0
    while time.perf_counter() < begin + seconds:
        lease = cache.get(keys[count % len(keys)])
        assert lease is not None
        lease.release()
        count += 1
    taken = time.perf_counter() - begin
    cache.close()
    return count / taken


def _show(summary: dict[str, Any]) -> None:
    console = make_console()
    table = Table("entry", "what", "us wall", "us best", "us CPU", "GB/s", "GB/CPU s")
    for row in summary["rows"]:
        rates = ("-" if row[name] is None else f"{row[name]:.2f}" for name in ("gb_per_s", "gb_per_cpu_s"))
        times = (f"{row[name]:.1f}" for name in ("wall_us", "best_us", "cpu_us"))
        table.add_row(f"{row['size_bytes'] >> 10} KiB", row["what"], *times, *rates)
    console.print(table)
    console.print(
        f"{summary['processes']} processes together: {summary['hits_per_s_together']:.0f} hits/s,"
        f" arena of {summary['arena_mb']} MB, {summary['cores']} cores"
    )
