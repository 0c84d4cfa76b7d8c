"""Media placed on real encoders by polling and by the gateways' ring: hits, items a second, latency.

Runs in `transom bench placement --live N`. Each policy has N encoder processes of its own, and each of
these a cache of its own, as if on another machine. They take turns in every round with the same media.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import itertools
import os
import random
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
from rich import box
from rich.table import Table

from transom.bench.encoder import own_flags, parse_size
from transom.bench.encoder_load import Load, drive, summarise
from transom.bench.encoder_media import Item, ItemMaker, PictureBank
from transom.bench.encoder_targets import Outcome, OwnProcess, Target, Usage, WireTarget, own_device
from transom.bench.origin import origin
from transom.bench.report import progress_bar
from transom.bench.tower import SMALL, write_checkpoint
from transom.errors import UnavailableError
from transom.media_key import routing_key_of_bytes

POLLING, RING = "polling", "ring, bound 1.25"
Row = dict[str, Any]
Place = Callable[[str, Mapping[str, float]], str]
# Encoders of one machine share its cores: more decoders and threads would only be in each other's way.
_FLAGS = ("--threads", "1", "--decode-workers", "2")
_TIMEOUT_S = 120.0
_MEDIANS = ("hit_rate", "items_per_s", "cpu_ms_per_item", "busiest_to_mean")
_PARTS = ("mean", "p90", "p99")
_RATIOS = ("hit_rate", "items_per_s", "mean_ms", "p90_ms", "p99_ms", "cpu_ms_per_item")


class PlacedTarget(Target):
    """Several encoders as a gateway sees them: `place` is asked for each item, with the items in flight."""

    def __init__(self, place: Place, encoders: Mapping[str, Target]) -> None:
        self._place = place
        self._encoders = encoders
        self._in_flight = dict.fromkeys(encoders, 0.0)
        self.served: Counter[str] = Counter()

    async def __aenter__(self) -> PlacedTarget:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the encoders to whoever opened them."""

    async def encode(self, item: Item, url: str | None, timeout_s: float) -> Outcome:
        name = self._place(routing_key_of_bytes(item.data), self._in_flight)
        self._in_flight[name] += 1
        self.served[name] += 1
        try:
            return await self._encoders[name].encode(item, url, timeout_s)
        finally:
            self._in_flight[name] -= 1


def draw(items: Sequence[Item], count: int, skew: float, seed: str) -> list[Item]:
    """Return `count` of the items; the n-th is drawn in proportion to n^-skew."""
    rng = random.Random(f"media {seed}")
    ends = list(itertools.accumulate((rank + 1) ** -skew for rank in range(len(items))))
    return [items[bisect.bisect_left(ends, rng.random() * ends[-1])] for _ in range(count)]


class _Fleet:
    """The encoders of one policy."""

    def __init__(self, policy: str, place: Place) -> None:
        self.policy = policy
        self._place = place
        self._processes: list[OwnProcess] = []
        self._wires: dict[str, Target] = {}

    async def start(self, stack: AsyncExitStack, model: str, args: argparse.Namespace) -> None:
        """Start them, one after the other."""
        flags = [*_FLAGS, "--embedding-cache-mb", str(args.live_cache_mb), *own_flags(args.flag)]
        for number in range(args.live):
            process = await stack.enter_async_context(OwnProcess.encoder(model, flags))
            self._processes.append(process)
            wire = await stack.enter_async_context(WireTarget(process.inbox))
            self._wires[f"encoder-{number}"] = wire

    async def load(self, items: Sequence[Item], concurrency: int) -> Row:
        """Send the items and return what came of it."""
        target = PlacedTarget(self._place, self._wires)
        before = await self._usage()
        rows, wall_s = await drive(target, items, Load(None, concurrency, _TIMEOUT_S), None)
        summary = summarise(rows, wall_s, before, await self._usage())
        if summary["failed"]:
            raise UnavailableError(f"{self.policy}: {summary['failed']} items failed: {summary['errors']}")
        kept = ("items_per_s", "wall_s", "latency_ms", "cpu_ms_per_item")
        busiest = max(target.served.values()) * len(self._wires) / len(items)
        return {
            "hit_rate": round(summary["cache_hits"] / len(items), 4),
            "busiest_to_mean": round(busiest, 3),
            "cached": await self._cached(),
            **{name: summary[name] for name in kept},
        }

    async def _usage(self) -> Usage:
        """Return the CPU time of all; batches are not what this is about."""
        used = [await process.usage() for process in self._processes]
        return Usage(sum(usage.cpu_s or 0.0 for usage in used), 0.0, {})

    async def _cached(self) -> list[int]:
        """Return the items that each encoder's cache holds."""
        found = []
        async with aiohttp.ClientSession() as session:
            for process in self._processes:
                async with session.get(f"{process.http}/health") as response:
                    found.append(int((await response.json())["load"]["cache_entries"]))
        return found


async def measure(args: argparse.Namespace, places: Mapping[str, Place]) -> list[Row]:
    """Return one row a round and policy; `places` say where each policy puts an item."""
    bank = PictureBank(fixed=parse_size(args.live_image), count=min(args.live_items, 24), seed=args.seed)
    maker = ItemMaker({"image": 1.0}, bank, seed=args.seed)
    items = [maker.make() for _ in range(args.live_items)]
    about = origin("placement", own_device(own_flags(args.flag))) | {
        "simulated": False, "cores": len(os.sched_getaffinity(0)), "encoders": args.live,
        "items": args.live_items, "requests": args.live_requests, "skew": args.skew,
        "cache_mb": args.live_cache_mb, "image": args.live_image, "concurrency": args.live_concurrency,
        "model": args.model or "4 layers of 256, random", "seed": args.seed,
    }  # fmt: skip
    rows: list[Row] = []
    async with AsyncExitStack() as stack:
        model = args.model
        if not model:
            model = stack.enter_context(tempfile.TemporaryDirectory(prefix="transom-tower-"))
            await asyncio.to_thread(write_checkpoint, Path(model), SMALL)
        fleets = [_Fleet(policy, place) for policy, place in places.items()]
        for fleet in fleets:
            await fleet.start(stack, model, args)
        # Not counted: what a cache that has long been in use holds.
        for fleet in fleets:
            warm = draw(items, args.live_requests, args.skew, f"{args.seed} warm")
            await fleet.load(warm, args.live_concurrency)
        with progress_bar("rounds", args.rounds, quiet=args.json) as tick:
            for number in range(args.rounds):
                load = draw(items, args.live_requests, args.skew, f"{args.seed} {number}")
                for fleet in fleets[:: -1 if number % 2 else 1]:
                    facts = {"policy": fleet.policy, "round": number, "load_1m": round(os.getloadavg()[0], 2)}
                    rows.append(about | facts | await fleet.load(load, args.live_concurrency))
                tick()
    return rows


def summarise_rounds(rows: Sequence[Row]) -> dict[str, Row]:
    """Return each policy's medians over the rounds."""
    found: dict[str, Row] = {}
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = [row for row in rows if row["policy"] == policy]
        parts = {f"{name}_ms": [row["latency_ms"][name] for row in own] for name in _PARTS}
        values = {name: [row[name] for row in own] for name in _MEDIANS} | parts
        found[policy] = {"rounds": len(own)} | {n: statistics.median(each) for n, each in values.items()}
    return found


def ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Return ring to polling, medians of the rounds' own ratios: a machine's other load comes and goes."""
    both: dict[str, list[Row]] = {policy: [] for policy in (POLLING, RING)}
    for row in sorted(rows, key=lambda row: int(row["round"])):
        flat = {f"{name}_ms": row["latency_ms"][name] for name in _PARTS}
        both[row["policy"]].append(row | flat)
    return {
        name: statistics.median(
            ring[name] / polling[name] for ring, polling in zip(both[RING], both[POLLING], strict=True)
        )
        for name in _RATIOS
    }


def tables(rows: Sequence[Row]) -> Iterator[str | Table]:
    """Yield what the rows say, to be printed."""
    first, medians = rows[0], summarise_rounds(rows)
    most = max(max(row["cached"]) for row in rows)
    yield (
        f"measured: {first['encoders']} encoders with a cache of {first['cache_mb']} MB each (at most"
        f" {most} of {first['items']} items), {first['requests']} requests a round, skew {first['skew']},"
        f" {first['concurrency']} at a time, {first['cores']} cores; medians of {medians[POLLING]['rounds']}"
    )
    table = Table(
        "policy", "hits", "items/s", "mean ms", "p90 ms", "p99 ms", "CPU ms", "busiest/mean", box=box.SIMPLE
    )
    for policy, row in medians.items():
        table.add_row(
            policy, f"{100 * row['hit_rate']:.1f} %", f"{row['items_per_s']:.1f}",
            *(f"{row[f'{name}_ms']:.1f}" for name in _PARTS),
            f"{row['cpu_ms_per_item']:.1f}", f"{row['busiest_to_mean']:.2f}",
        )  # fmt: skip
    if all(row["hit_rate"] for row in rows):
        table.add_row("ring / polling", *(f"{ratio:.2f}x" for ratio in ratios(rows).values()))
    yield table
