"""Time match and insert of the radix tree over prefix length, page size and length of the nodes.

Runs in `transom bench radix` without a model. Times are CPU time of the one thread, since the tree never
waits; copying the key's bytes is timed beside them, so that figures of two machines can be compared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from transom.bench.origin import origin
from transom.bench.report import append_rows
from transom.commands.base import make_console, write_json
from transom.errors import ConfigError
from transom.llm.radix.keys import Key, build_key
from transom.llm.radix.retention import RetentionPolicy, Window, complement, plan_retention
from transom.llm.radix.tree import RadixTree

WINDOW = 128
CHUNK = 2048
LENGTHS = (10_000, 32_000, 100_000)
NODE_LENS = (4096, 256)  # a retained window ends each: the default interval, and a chain of many small nodes
EXAMPLES = ("transom bench radix", "transom bench radix --page-sizes 16 --lengths 100000 --json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=list(LENGTHS), metavar="N", help="tokens of the prefix"
    )
    parser.add_argument(
        "--page-sizes",
        type=int,
        nargs="+",
        default=[1, 16, 64],
        metavar="N",
        help="tokens, 1 to 64",
    )
    parser.add_argument("--repeats", type=int, default=51, metavar="N", help="a case (default %(default)s)")
    parser.add_argument("--out", default="", metavar="FILE", help="append one JSON row a case to this file")


class _CountingPools:
    """Page numbers without KV behind them: what the tree asks of a pool and nothing more."""

    def __init__(self, pages: int) -> None:
        self.mapped = np.zeros(pages, np.bool_)
        self._next = 0

    def take(self, count: int) -> NDArray[np.int64]:
        pages = np.arange(self._next, self._next + count)
        self._next += count
        self.mapped[pages] = True
        return pages

    def give_back(self, pages: int) -> None:
        """Forget the pages taken last, which the tree has freed again."""
        self._next -= pages

    def free_full(self, pages: NDArray[np.int64]) -> None:
        assert not self.mapped[pages].any()

    def free_swa(self, pages: NDArray[np.int64]) -> None:
        self.mapped[pages] = False

    def move_swa(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        self.mapped[target] = True
        self.mapped[source] = False

    def swa_mapped(self, pages: NDArray[np.int64]) -> NDArray[np.bool_]:
        return self.mapped[pages]


class _Case:
    """One tree holding one request of `length` tokens, in nodes of about `node_len` each."""

    def __init__(self, length: int, page_size: int, node_len: int, seed: int) -> None:
        self.page_size = page_size
        self.length = length // page_size * page_size
        random = np.random.default_rng(seed)
        self.tokens = random.integers(0, 150_000, self.length)
        self.tail = random.integers(0, 150_000, CHUNK)
        self.key = build_key(self.tokens)
        self.longer = self.key.extended(self.tail)
        self.pools = _CountingPools(4 * (self.length + CHUNK) // page_size)
        self.tree = RadixTree(self.pools, window=WINDOW, page_size=page_size)
        policy = RetentionPolicy(WINDOW, page_size, node_len, self.length, max_extra_tokens=self.length)
        self.keep = plan_retention(policy, self.length)
        self.append(self.key, self.length, self.keep)

    def append(self, key: Key, tokens: int, keep: Sequence[Window]) -> float:
        """Insert the last `tokens` of the key as a new request does; return the seconds of the insert."""
        lock = self.tree.lock(self.tree.match(key, len(key) - tokens))
        assert lock.length == len(key) - tokens
        pages = self.pools.take(tokens // self.page_size)
        for start, end in complement(keep, lock.length, len(key)):
            first = lock.length // self.page_size
            self.pools.mapped[pages[start // self.page_size - first : end // self.page_size - first]] = False
        begin = time.thread_time()
        self.tree.insert(key, pages, lock, keep=keep)
        elapsed = time.thread_time() - begin
        self.tree.unlock(lock)
        return elapsed

    def time_match(self) -> float:
        begin = time.thread_time()
        match = self.tree.match(self.longer)
        pages = match.pages
        elapsed = time.thread_time() - begin
        assert match.length == self.length
        assert len(pages) * self.page_size == self.length
        return elapsed

    def time_lock(self) -> float:
        match = self.tree.match(self.longer)
        begin = time.thread_time()
        self.tree.unlock(self.tree.lock(match))
        return time.thread_time() - begin

    def time_append(self) -> float:
        """One prefill chunk behind the whole prefix, evicted again afterwards."""
        end = len(self.longer)
        elapsed = self.append(self.longer, CHUNK, [Window(end - WINDOW, end, self.keep[-1].rank)])
        while self.tree.match(self.longer, end).prefix_len > self.length:
            self.tree.evict_full(1)
        self.pools.give_back(CHUNK // self.page_size)
        return elapsed

    def time_insert_known(self) -> float:
        """The whole prefix again, every page a duplicate: what two requests that ran at once cost."""
        lock = self.tree.lock(self.tree.match(self.key, 0))
        pages = self.pools.take(self.length // self.page_size)
        self.pools.mapped[pages] = False
        begin = time.thread_time()
        self.tree.insert(self.key, pages, lock)
        elapsed = time.thread_time() - begin
        self.tree.unlock(lock)
        self.pools.give_back(len(pages))
        return elapsed

    def time_key(self) -> float:
        begin = time.thread_time()
        build_key(self.tokens)
        return time.thread_time() - begin

    def time_copy(self) -> float:
        begin = time.thread_time()
        bytearray(self.key.raw)
        return time.thread_time() - begin

    def nodes(self) -> int:
        return len(self.tree.match(self.longer).path)


def measure(lengths: Sequence[int], page_sizes: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Return one row a case with medians and 90th percentiles in microseconds."""
    rows = []
    for page_size in page_sizes:
        for length in lengths:
            for node_len in NODE_LENS:
                case = _Case(length, page_size, node_len, seed=length)
                timers: dict[str, Callable[[], float]] = {
                    "match": case.time_match,
                    "lock_unlock": case.time_lock,
                    "append_insert": case.time_append,
                    "insert_known": case.time_insert_known,
                    "build_key": case.time_key,
                    "copy_key": case.time_copy,
                }
                samples: dict[str, list[float]] = {name: [] for name in timers}
                nodes = case.nodes()
                for _ in range(repeats):
                    for name, timer in timers.items():
                        samples[name].append(timer() * 1e6)
                begin = time.thread_time()
                case.tree.check_integrity()
                row: dict[str, Any] = {
                    "tokens": case.length,
                    "page_size": page_size,
                    "nodes": nodes,
                    "check_integrity_us": round((time.thread_time() - begin) * 1e6, 1),
                }
                for name, values in samples.items():
                    row[f"{name}_p50_us"] = round(statistics.median(values), 1)
                    row[f"{name}_p90_us"] = round(sorted(values)[int(len(values) * 0.9)], 1)
                rows.append(row)
    return rows


def run(args: argparse.Namespace) -> int:
    """Run the cases; print a table, or one JSON object when asked."""
    if args.repeats < 5 or min(args.lengths) < CHUNK or not all(1 <= size <= 64 for size in args.page_sizes):
        raise ConfigError(f"--repeats must be >= 5, --lengths >= {CHUNK} and --page-sizes from 1 to 64")
    about: dict[str, Any] = origin("radix") | {
        "numpy": np.__version__,
        "clock": "thread CPU time",
        "window": WINDOW,
        "append_tokens": CHUNK,
        "repeats": args.repeats,
    }
    rows = measure(args.lengths, args.page_sizes, args.repeats)
    if args.out:
        append_rows(args.out, [about | row for row in rows])
    if args.json:
        write_json(about | {"rows": rows})
        return 0
    columns = ("match", "lock_unlock", "append_insert", "insert_known", "build_key", "copy_key")
    table = Table(
        "tokens", "page", "nodes", *(name.replace("_", " ") for name in columns), title="microseconds"
    )
    for row in rows:
        values = [row["tokens"], row["page_size"], row["nodes"], *(row[f"{name}_p50_us"] for name in columns)]
        table.add_row(*(f"{value:,}" for value in values))
    make_console().print(table)
    return 0
