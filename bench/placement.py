"""`transom bench placement`: how often media meet the encoder that has them, by ways to place them.

A simulation with the gateway's own ring and bound; no server needed and no clock read: one run gives the
same figures on every machine. Encoders have a cache each, encode one item at a time and join equal items.
`--live N` measures polling and ring on N real encoders each (placement_live.py).
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import heapq
import itertools
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from transom.bench.origin import origin
from transom.bench.report import append_rows
from transom.commands.base import make_console, write_json
from transom.errors import ConfigError
from transom.hash_ring import HashRing, pick

EXAMPLES = (
    "transom bench placement",
    "transom bench placement --encoders 8 --requests 50000 --json",
    "transom bench placement --live 3 --out bench/results/placement.jsonl",
)
POLICIES = ("polling", "least loaded", "ring", "ring, bound 1.25")
SCENARIOS = ("repeated media", "one hot item", "an encoder is lost", "an encoder joins")
_HOT_SHARE = 0.3
_JOINING = "encoder-new"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for flag, count, text in (
        ("--encoders", 4, "encoders"),
        ("--requests", 20_000, "media items sent"),
        ("--items", 2_000, "different items; the n-th most popular is sent in proportion to n^-skew"),
        ("--cached", 250, "items that one encoder's cache holds"),
        ("--seed", 1, "of the arrivals"),
    ):
        _add_number(parser, flag, count, "N", text)
    for flag, number, text in (
        ("--skew", 0.8, "exponent of the popularity"),
        ("--encode-ms", 50.0, "time to encode an item"),
        ("--hit-ms", 2.0, "time to send a cached one"),
        ("--utilisation", 0.7, "arrivals as a share of what polling could encode without any cache"),
    ):
        _add_number(parser, flag, number, "X", text)
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the rows to this JSONL file")
    add_live_arguments(parser)


def _add_number(to: argparse._ActionsContainer, flag: str, default: float, metavar: str, text: str) -> None:
    """Add a flag that takes numbers of the default's kind."""
    to.add_argument(
        flag, type=type(default), default=default, metavar=metavar, help=f"{text} (default %(default)s)"
    )


def add_live_arguments(parser: argparse.ArgumentParser) -> None:
    live = parser.add_argument_group("measured, beside the simulation; seed and skew are its own")
    for flag, default, text in (
        ("--live", 0, "real encoders that each of polling and ring has; 0: nothing is measured"),
        ("--live-requests", 240, "pictures that a round sends"),
        ("--live-items", 120, "different pictures"),
        ("--live-cache-mb", 4, "each encoder's cache; it has to hold fewer than all pictures"),
        ("--live-concurrency", 8, "pictures under way at a time"),
        ("--rounds", 5, "in each of which both take a turn"),
    ):
        _add_number(live, flag, default, "N", text)
    live.add_argument(
        "--live-image", default="224x224", metavar="WxH", help="size of the pictures (default %(default)s)"
    )
    live.add_argument(
        "--model", default="", metavar="MODEL", help="(default: a tower of 4 layers of 256, random weights)"
    )
    live.add_argument(
        "--flag", action="append", default=[], metavar="NAME=VALUE",
        help="setting of the real encoders, e.g. threads=2 (repeatable)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    for name, low in (("encoders", 2), ("requests", 1), ("items", 1), ("cached", 1), ("encode_ms", 0.001),
                      ("hit_ms", 0.001), ("utilisation", 0.001), ("skew", 0.0), ("live_requests", 1),
                      ("live_items", 1), ("live_cache_mb", 1), ("live_concurrency", 1),
                      ("rounds", 1)):  # fmt: skip
        if getattr(args, name) < low:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {low}")
    if args.live < 0 or args.live == 1:
        raise ConfigError(f"--live {args.live}: must be 0 or at least 2")
    rows = measure(args)
    moved = moved_keys(args.encoders)
    facts = about(args)
    measured = asyncio.run(measure_live(args)) if args.live else []
    if args.out is not None:
        append_rows(args.out, [*(facts | row for row in rows), *measured])
    if args.json:
        write_json(facts | {"rows": rows, "moved_keys": moved, "live": measured})
    else:
        console = make_console()
        for part in tables(args, rows):
            console.print(part)
        console.print("keys that move: " + "; ".join(f"{name} {100 * v:.1f} %" for name, v in moved.items()))
        if measured:
            from transom.bench import placement_live

            for part in placement_live.tables(measured):
                console.print(part)
    return 0


async def measure_live(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row a round and policy of `args.live` real encoders each."""
    # Imported late: the simulation needs no encoder.
    from transom.bench import placement_live

    names = [f"encoder-{number}" for number in range(args.live)]
    policies = (placement_live.POLLING, placement_live.RING)
    return await placement_live.measure(args, {policy: placer(policy, names) for policy in policies})


def about(args: argparse.Namespace) -> dict[str, Any]:
    """Return what all rows have in common."""
    names = (
        "encoders", "requests", "items", "cached", "skew", "encode_ms", "hit_ms", "utilisation", "seed",
    )  # fmt: skip
    return origin("placement") | {"simulated": True} | {name: getattr(args, name) for name in names}


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row a scenario and policy."""
    return [
        {"scenario": scenario, "policy": policy, **simulate(args, scenario, policy)}
        for scenario in SCENARIOS
        for policy in POLICIES
    ]


@dataclass
class _Encoder:
    """One encoder: an LRU of items, and when it has encoded what it was given."""

    cached: int
    free_s: float = 0.0
    in_flight: int = 0
    served: int = 0
    ready_s: OrderedDict[str, float] = field(default_factory=OrderedDict)

    def take(self, item: str, now_s: float, encode_s: float, hit_s: float) -> tuple[float, bool]:
        """Return when the item is done, and whether it was encoded before or is just being encoded."""
        self.served += 1
        self.in_flight += 1
        known_s = self.ready_s.get(item)
        if known_s is not None:
            self.ready_s.move_to_end(item)
            return max(now_s, known_s) + hit_s, True
        self.free_s = max(self.free_s, now_s) + encode_s
        self.ready_s[item] = self.free_s
        if len(self.ready_s) > self.cached:
            self.ready_s.popitem(last=False)
        return self.free_s, False


def _arrivals(args: argparse.Namespace, scenario: str) -> Iterator[tuple[float, str]]:
    """Yield (time, item): Poisson arrivals, popularity by Zipf's law. The same for every policy."""
    rng = random.Random(args.seed)
    weights = list(itertools.accumulate((rank + 1) ** -args.skew for rank in range(args.items)))
    rate = args.utilisation * args.encoders / (args.encode_ms / 1000)
    now_s = 0.0
    for _ in range(args.requests):
        now_s += rng.expovariate(rate)
        number = bisect.bisect_left(weights, rng.random() * weights[-1])
        hot = scenario == "one hot item" and rng.random() < _HOT_SHARE
        yield now_s, "hot" if hot else f"item-{number}"


def placer(policy: str, names: list[str]) -> Callable[[str, Mapping[str, float]], str]:
    """Return what a gateway would do: item and loads of the living encoders -> encoder."""
    turn = itertools.count()
    ring = HashRing(names)
    order = cache(ring.order)

    def place(item: str, load: Mapping[str, float]) -> str:
        if policy == "polling":
            return list(load)[next(turn) % len(load)]
        if policy == "least loaded":
            return min(load, key=lambda name: (load[name], next(turn)))
        if policy == "ring":
            return next(name for name in order(item) if name in load)
        chosen = pick(order(item), load)
        assert chosen is not None
        return chosen

    return place


def simulate(args: argparse.Namespace, scenario: str, policy: str) -> dict[str, Any]:
    """Return the figures of one policy in one scenario. Changes of the fleet happen half way."""
    names = [f"encoder-{number}" for number in range(args.encoders)]
    place = placer(policy, names)
    fleet = {name: _Encoder(args.cached) for name in names}
    ends: list[tuple[float, str]] = []
    latencies: list[float] = []
    hits, encode_s, hit_s = 0, args.encode_ms / 1000, args.hit_ms / 1000
    after_change = [0, 0]
    for number, (now_s, item) in enumerate(_arrivals(args, scenario)):
        if number == args.requests // 2:
            if scenario == "an encoder is lost":
                del fleet[names[0]]
            elif scenario == "an encoder joins":
                fleet[_JOINING] = _Encoder(args.cached)
                place = placer(policy, [*names, _JOINING])
        while ends and ends[0][0] <= now_s:
            _, name = heapq.heappop(ends)
            if name in fleet:
                fleet[name].in_flight -= 1
        name = place(item, {one: float(encoder.in_flight) for one, encoder in fleet.items()})
        done_s, hit = fleet[name].take(item, now_s, encode_s, hit_s)
        heapq.heappush(ends, (done_s, name))
        latencies.append(done_s - now_s)
        hits += hit
        if args.requests // 2 <= number < args.requests // 2 + args.requests // 10:
            after_change[0] += hit
            after_change[1] += 1
    latencies.sort()
    served = [encoder.served for encoder in fleet.values()]
    return {
        "hit_rate": round(hits / args.requests, 4),
        "hit_rate_after_change": round(after_change[0] / max(1, after_change[1]), 4),
        "encoded": args.requests - hits,
        "busiest_to_mean": round(max(served) * len(served) / sum(served), 3),
        "mean_ms": round(1000 * sum(latencies) / len(latencies), 2),
        "p50_ms": round(1000 * latencies[len(latencies) // 2], 2),
        "p90_ms": round(1000 * latencies[int(0.9 * len(latencies))], 2),
        "p99_ms": round(1000 * latencies[int(0.99 * len(latencies))], 2),
    }


def moved_keys(encoders: int, keys: int = 5_000) -> dict[str, float]:
    """Return the share of keys that change their encoder when one leaves or joins, by ring and by modulo."""
    names = [f"encoder-{number}" for number in range(encoders)]
    ring, smaller, larger = HashRing(names), HashRing(names[1:]), HashRing([*names, _JOINING])
    moved: Counter[str] = Counter()
    for number in range(keys):
        key = f"key-{number}"
        owner = ring.order(key)[0]
        digest = random.Random(number).getrandbits(64)
        moved["ring, one leaves"] += smaller.order(key)[0] != owner
        moved["ring, one joins"] += larger.order(key)[0] != owner
        moved["modulo, one leaves"] += digest % encoders != digest % (encoders - 1)
        moved["modulo, one joins"] += digest % encoders != digest % (encoders + 1)
    return {name: round(count / keys, 4) for name, count in moved.items()}


def tables(args: argparse.Namespace, rows: list[dict[str, Any]]) -> Iterator[str | Table]:
    """Yield what the rows say, to be printed."""
    yield (
        f"{args.requests} requests for {args.items} items (skew {args.skew}), {args.encoders} encoders with a"
        f" cache of {args.cached} items each, {args.encode_ms:g} ms to encode; simulated"
    )
    for scenario in SCENARIOS:
        table = Table(
            "policy", "hits", "against polling", "encoded", "busiest/mean", "p50 ms", "p90 ms", "p99 ms",
            title=scenario, box=box.SIMPLE,
        )  # fmt: skip
        own = [row for row in rows if row["scenario"] == scenario]
        polling = own[0]["hit_rate"]
        for row in own:
            gain = f"{100 * (row['hit_rate'] / polling - 1):+.0f} %" if polling else "-"
            table.add_row(
                row["policy"], f"{100 * row['hit_rate']:.1f} %", gain, str(row["encoded"]),
                f"{row['busiest_to_mean']:.2f}", *(f"{row[f'{p}_ms']:.1f}" for p in ("p50", "p90", "p99")),
            )  # fmt: skip
        yield table
