"""Drive items into a target, open loop at a rate or closed loop with N at a time, and sum up what happened.

Runs in the benchmark's process. Arrivals and repeats are functions of the seed.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transom.bench.chat import percentile
from transom.bench.encoder_media import Item, ItemMaker, MediaHost
from transom.bench.encoder_targets import Target, Usage
from transom.errors import TransomError

Row = dict[str, Any]
_QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))


@dataclass(frozen=True, slots=True)
class Load:
    """How items are sent: `qps` for an open loop with random gaps, else `concurrency` at a time."""

    qps: float | None = None
    concurrency: int = 8
    timeout_s: float = 120.0
    seed: int = 0


def draw_items(maker: ItemMaker, count: int, repeat: float, seed: int) -> list[Item]:
    """Return the items to send in order; a share `repeat` of them are items sent before."""
    rng = random.Random(f"repeats {seed}")
    items: list[Item] = []
    for _ in range(count):
        again = items and rng.random() < repeat
        items.append(rng.choice(items) if again else maker.make())
    return items


async def drive(
    target: Target,
    items: Sequence[Item],
    load: Load,
    host: MediaHost | None,
    tick: Callable[[], None] = lambda: None,
) -> tuple[list[Row], float]:
    """Send all items; return one row each, in the order of sending, and the wall time.

    In an open loop an item's latency counts from its planned moment, so that a slow sender hides nothing.
    """
    urls = [host.offer(item) if host is not None else None for item in items]
    begin = time.perf_counter()

    async def one(number: int, planned_s: float | None) -> Row:
        item = items[number]
        row: Row = {"number": number, "kind": item.kind, "size": item.label, "error": None}
        sent = time.perf_counter()
        start = sent if planned_s is None else begin + planned_s
        try:
            outcome = await target.encode(item, urls[number], load.timeout_s)
        except TransomError as error:
            row["error"] = error.message
        else:
            row |= {"rows": outcome.rows, "cache_hit": outcome.cache_hit, "timings_ms": outcome.timings_ms}
            if outcome.first_s is not None:
                row["first_ms"] = 1000 * (outcome.first_s + sent - start)
        row["at_s"] = round(start - begin, 4)
        row["latency_ms"] = 1000 * (time.perf_counter() - start)
        tick()
        return row

    if load.qps is not None:
        rows = await _open_loop(one, len(items), load.qps, load.seed, begin)
    else:
        rows = await _closed_loop(one, len(items), load.concurrency)
    return rows, time.perf_counter() - begin


async def _open_loop(one: Any, count: int, qps: float, seed: int, begin: float) -> list[Row]:
    rng = random.Random(f"arrivals {seed}")
    tasks, planned = [], 0.0
    for number in range(count):
        await asyncio.sleep(max(0.0, begin + planned - time.perf_counter()))
        tasks.append(asyncio.create_task(one(number, planned)))
        planned += rng.expovariate(qps)
    return list(await asyncio.gather(*tasks))


async def _closed_loop(one: Any, count: int, concurrency: int) -> list[Row]:
    numbers = iter(range(count))
    rows: list[Row] = []

    async def client() -> None:
        for number in numbers:
            rows.append(await one(number, None))

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return sorted(rows, key=lambda row: int(row["number"]))


def summarise(rows: Sequence[Row], wall_s: float, before: Usage | None, after: Usage | None) -> Row:
    """Return the figures of a run; what was not measured is None.

    `forward_share` is the part of the wall time during which a forward ran.
    """
    good = [row for row in rows if row["error"] is None]
    latencies = [row["latency_ms"] for row in good]
    firsts = [row["first_ms"] for row in good if row.get("first_ms") is not None]
    told = [row for row in good if row["cache_hit"] is not None]
    summary: Row = {
        "items": len(rows),
        "failed": len(rows) - len(good),
        "errors": sorted({row["error"] for row in rows if row["error"]})[:5],
        "wall_s": round(wall_s, 3),
        "items_per_s": round(len(good) / wall_s, 3),
        "tokens_per_s": round(sum(row["rows"] for row in good) / wall_s, 1),
        "latency_ms": quantiles(latencies),
        "first_ms": quantiles(firsts),
        "cache_hits": sum(row["cache_hit"] for row in told) if told else None,
        "stage_ms": _stages(good),
        "cpu_ms_per_item": None,
        "forward_share": None,
        "batch_pieces": None,
    }
    if before is not None and after is not None:
        if before.cpu_s is not None and after.cpu_s is not None:
            summary["cpu_ms_per_item"] = round(1000 * (after.cpu_s - before.cpu_s) / max(len(good), 1), 2)
        if after.batches:  # the sequential encoder counts none
            summary["forward_share"] = round((after.forward_s - before.forward_s) / wall_s, 3)
            summary["batch_pieces"] = batch_histogram(before.batches, after.batches)
    return summary


def quantiles(values: Sequence[float]) -> dict[str, float | None]:
    """Return mean and percentiles, all None without a value."""
    if not values:
        return dict.fromkeys(("mean", *(name for name, _ in _QUANTILES)))
    found: dict[str, float | None] = {"mean": round(sum(values) / len(values), 3)}
    return found | {name: round(percentile(values, share), 3) for name, share in _QUANTILES}


def _stages(rows: Sequence[Row]) -> dict[str, float]:
    """Return the mean milliseconds of each stage that the encoder told, over the items that passed it."""
    sums: dict[str, list[float]] = {}
    for row in rows:
        for stage, value in row["timings_ms"].items():
            sums.setdefault(stage, []).append(value)
    return {stage: round(sum(values) / len(values), 3) for stage, values in sums.items()}


def batch_histogram(before: dict[float, float], after: dict[float, float]) -> dict[str, int]:
    """Return how many forwards had up to so many pieces, and more than the bound before it."""
    counts: dict[str, int] = {}
    below = 0.0
    for bound in sorted(after):
        upto = after[bound] - before.get(bound, 0.0)
        if upto > below:
            counts["more" if bound == float("inf") else f"{bound:g}"] = int(upto - below)
        below = upto
    return counts
