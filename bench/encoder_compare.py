"""`transom bench encoder --compare`: the sequential encoder against ours, cache, tower, video, placement.

Runs in the benchmark's process. All candidates of a table run side by side and take turns in every round,
so that a busy machine slows them alike; figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.table import Table

from transom.bench import placement, placement_live, video
from transom.bench.encoder import new_bank, own_flags, parse_mix
from transom.bench.encoder_load import Load, Row, draw_items, drive, summarise
from transom.bench.encoder_media import ItemMaker, MediaHost, PictureBank
from transom.bench.encoder_targets import ChatTarget, OwnProcess, Target, WireTarget, own_device, read_usage
from transom.bench.origin import origin
from transom.bench.report import append_rows, progress_bar
from transom.bench.tower import MEDIUM, write_checkpoint
from transom.commands.base import make_console, write_json
from transom.errors import ConfigError, UnavailableError

# The baseline is loaded to this share of what it can do, ours to these multiples of that rate.
_BASE_SHARE = 0.7
_MULTIPLES = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)
# A multiple this far above the baseline's P90 in the first round is not tried again.
_HOPELESS = 3.0
_MIN_ITEMS = 24
_TOWER_SIDE = 448
_TOWER_ITEMS = 16


@dataclass(slots=True)
class _Candidate:
    name: str
    target: Target
    process: OwnProcess | None


class _Rig:
    """Starts candidates, sends loads to them and keeps one row for each."""

    def __init__(self, args: argparse.Namespace, stack: AsyncExitStack, host: MediaHost) -> None:
        self._args = args
        self._stack = stack
        self._host = host
        self._origin = origin("encoder", own_device(own_flags(args.flag)))
        self._seed = args.seed * 1_000_000
        self.rows: list[Row] = []

    async def start(self, name: str, process: OwnProcess) -> _Candidate:
        """Start an own process."""
        await self._stack.enter_async_context(process)
        target = await self._stack.enter_async_context(WireTarget(process.inbox))
        return _Candidate(name, target, process)

    async def join(self, name: str, url: str) -> _Candidate:
        """Connect to a server that runs already."""
        target: Target = WireTarget(url) if url.startswith(("tcp://", "ipc://")) else ChatTarget(url)
        return _Candidate(name, await self._stack.enter_async_context(target), None)

    async def load(
        self,
        candidate: _Candidate,
        count: int,
        load: Load,
        *,
        bank: PictureBank,
        mix: dict[str, float],
        table: str = "",
        repeat: float = 0.0,
        inline: bool = False,
        **facts: Any,
    ) -> Row:
        """Send `count` new items; with a `table` the row is kept."""
        self._seed += 1
        items = draw_items(ItemMaker(mix, bank, seed=self._seed), count, repeat, self._seed)
        before = await read_usage(candidate.process, "")
        rows, wall_s = await drive(candidate.target, items, load, None if inline else self._host)
        summary = summarise(rows, wall_s, before, await read_usage(candidate.process, ""))
        if summary["failed"]:
            raise UnavailableError(f"{candidate.name}: {summary['failed']} items failed: {summary['errors']}")
        row = self._origin | {"table": table, "candidate": candidate.name, "qps": load.qps} | facts | summary
        if table:
            self.rows.append(row)
        return row


def run(args: argparse.Namespace) -> int:
    if args.url:
        raise ConfigError("--compare starts the encoders that it compares: --url is not for it")
    if set(parse_mix(args.mix)) - {"image", "audio"}:
        raise ConfigError("--compare: the sequential encoder takes image and audio only")
    console = make_console()
    tables: list[dict[str, Any]] = []

    def finish(rows: list[Row], summary: dict[str, Any], shown: Iterable[str | Table]) -> None:
        # At once: a later table must not take an earlier one along when it fails.
        tables.append(summary)
        if args.out:
            append_rows(args.out, rows)
        if not args.json:
            for part in shown:
                console.print(part)

    asyncio.run(_compare(args, finish))
    if args.json:
        write_json({"benchmark": "encoder", "tables": tables})
    return 0


async def _compare(
    args: argparse.Namespace, finish: Callable[[list[Row], dict[str, Any], Iterable[str | Table]], None]
) -> None:
    works = {"write-up": _write_up, "cache": _cache, "tower": _tower}
    for name, work in works.items():
        if name in args.skip:
            continue
        async with AsyncExitStack() as stack:
            host = await stack.enter_async_context(MediaHost(args.host_ms / 1000))
            rig = _Rig(args, stack, host)
            summary = await work(args, rig, stack)
            finish(rig.rows, {"table": name} | summary, [_table(name, summary["rows"]), *summary["lines"]])
    if "video" not in args.skip:
        flags = ("--model", args.model, "--rounds", str(args.rounds), "--seconds", str(args.video_s))
        rows = await video.measure(_settings(video, args, *flags))
        finish(rows, {"table": "video", "rows": rows}, video.tables(rows))
    if "placement" not in args.skip:
        placing = _settings(placement, args)
        rows = [placement.about(placing) | row for row in placement.measure(placing)]
        finish(rows, {"table": "placement", "rows": rows}, placement.tables(placing, rows))
    if "fleet" not in args.skip:
        own = [part for flag in args.flag for part in ("--flag", flag)]
        sizes = ("--live-requests", str(2 * args.items), "--rounds", str(args.rounds))
        rows = await placement.measure_live(_settings(placement, args, "--live", "3", *sizes, *own))
        medians = placement_live.summarise_rounds(rows)
        finish(rows, {"table": "fleet", "rows": medians}, placement_live.tables(rows))


def _settings(module: ModuleType, args: argparse.Namespace, *flags: str) -> argparse.Namespace:
    """Return the settings of another benchmark: its defaults but for `flags`."""
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return parser.parse_args(flags, argparse.Namespace(json=args.json))


async def _write_up(args: argparse.Namespace, rig: _Rig, stack: AsyncExitStack) -> dict[str, Any]:
    """QPS at equal-or-better P90: the write-up's encoder table."""
    bank, mix = new_bank(args), parse_mix(args.mix)
    flags = own_flags(args.flag)
    sequential = await rig.start("sequential", OwnProcess.sequential(args.model, flags))
    ours = await rig.start("ours", OwnProcess.encoder(args.model, flags))
    closed = Load(None, 4, args.timeout_s)
    for candidate in (sequential, ours):
        await rig.load(candidate, args.warmup + 4, closed, bank=bank, mix=mix)
    full = await rig.load(sequential, args.items, closed, bank=bank, mix=mix)
    base = float(f"{_BASE_SHARE * full['items_per_s']:.3g}")
    multiples = list(_MULTIPLES)
    with progress_bar("rounds", args.rounds, quiet=args.json) as tick:
        for number in range(args.rounds):
            points = [(sequential, 1.0), *((ours, multiple) for multiple in multiples)]
            if number % 2:
                points.reverse()
            found: dict[tuple[str, float], float] = {}
            for candidate, multiple in points:
                count = max(_MIN_ITEMS, round(args.items * multiple))
                load = Load(base * multiple, timeout_s=args.timeout_s, seed=number)
                facts = {"round": number, "multiple": multiple, "model": args.model, "host_ms": args.host_ms}
                row = await rig.load(candidate, count, load, bank=bank, mix=mix, table="write-up", **facts)
                found[candidate.name, multiple] = row["latency_ms"]["p90"]
            limit = _HOPELESS * found["sequential", 1.0]
            multiples = [m for m in multiples if m <= 2.0 or found["ours", m] <= limit]
            tick()
    groups = _groups(rig.rows, ("candidate", "multiple"))
    limit = groups["sequential", 1.0]["p90_ms"]
    good = [key[1] for key, group in groups.items() if key[0] == "ours" and group["p90_ms"] <= limit]
    best = max(good, default=0.0)
    line = f"QPS at equal-or-better P90: {base * best:.3g} against {base:.3g}, {best:g}x (write-up: 2x)"
    return {"rows": list(groups.values()), "qps_ratio": best, "lines": [line, _share_line(groups)]}


def _share_line(groups: dict[Any, dict[str, Any]]) -> str:
    top = max((key for key in groups if key[0] == "ours"), key=lambda key: key[1])
    share = 100 * (groups[top]["forward_share"] or 0.0)
    return f"at the highest rate a forward was running {share:.0f} % of the time"


async def _cache(args: argparse.Namespace, rig: _Rig, stack: AsyncExitStack) -> dict[str, Any]:
    """The embedding cache on and off, half of the items seen before."""
    bank, mix = new_bank(args), parse_mix(args.mix)
    repeat = args.repeat or 0.5
    off = [*own_flags(args.flag), "--embedding-cache-mb", "0"]
    candidates = [
        await rig.start("cache on", OwnProcess.encoder(args.model, own_flags(args.flag))),
        await rig.start("cache off", OwnProcess.encoder(args.model, off)),
    ]
    load = Load(None, args.concurrency, args.timeout_s)
    for candidate in candidates:
        await rig.load(candidate, args.warmup + 4, load, bank=bank, mix=mix)
    with progress_bar("rounds", args.rounds, quiet=args.json) as tick:
        for number in range(args.rounds):
            for candidate in candidates[:: -1 if number % 2 else 1]:
                await rig.load(
                    candidate, 2 * args.items, load, bank=bank, mix=mix, table="cache", repeat=repeat,
                    round=number, model=args.model, share_repeated=repeat,
                )  # fmt: skip
            tick()
    groups = _groups(rig.rows, ("candidate",))
    ratio = groups["cache on",]["items_per_s"] / groups["cache off",]["items_per_s"]
    line = f"{100 * repeat:.0f} % of the items repeat: {ratio:.2f}x the items a second with the cache"
    return {"rows": list(groups.values()), "ratio": ratio, "lines": [line]}


async def _tower(args: argparse.Namespace, rig: _Rig, stack: AsyncExitStack) -> dict[str, Any]:
    """A tower of 8 layers of 512 with random weights; the peer, if any, should have one of that size."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="transom-tower-")))
    await asyncio.to_thread(write_checkpoint, folder, MEDIUM)
    flags = own_flags(args.flag)
    candidates = [
        await rig.start("sequential", OwnProcess.sequential(str(folder), flags)),
        await rig.start("ours", OwnProcess.encoder(str(folder), flags)),
    ]
    if args.peer_url:
        candidates.append(await rig.join(args.peer_name, args.peer_url))
    bank = PictureBank(fixed=(_TOWER_SIDE, _TOWER_SIDE), fresh=True)
    load = Load(None, args.concurrency, args.timeout_s)
    # All get the bytes inline: another engine may not be allowed to fetch from loopback.
    common: dict[str, Any] = {"bank": bank, "mix": {"image": 1.0}, "inline": True}
    for candidate in candidates:
        await rig.load(candidate, args.concurrency, load, **common)
    with progress_bar("rounds", args.rounds, quiet=args.json) as tick:
        for number in range(args.rounds):
            for candidate in candidates[:: -1 if number % 2 else 1]:
                await rig.load(candidate, _TOWER_ITEMS, load, table="tower", round=number, **common)
            tick()
    groups = _groups(rig.rows, ("candidate",))
    ours = groups["ours",]["items_per_s"]
    others = [name for (name,) in groups if name != "ours"]
    lines = [
        f"ours: {ours / groups[name,]['items_per_s']:.2f}x the pictures a second of {name}" for name in others
    ]
    return {"rows": list(groups.values()), "lines": lines}


def _groups(rows: Sequence[Row], names: tuple[str, ...]) -> dict[Any, dict[str, Any]]:
    """Return medians over the rounds, by the named facts."""
    by_key: dict[Any, list[Row]] = {}
    for row in rows:
        by_key.setdefault(tuple(row[name] for name in names), []).append(row)
    return {key: dict(zip(names, key, strict=True)) | _medians(same) for key, same in by_key.items()}


def _medians(rows: Sequence[Row]) -> dict[str, Any]:
    def median(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return round(statistics.median(known), 3) if known else None

    latencies = {
        f"{name}_ms": median([row["latency_ms"][name] for row in rows]) for name in ("mean", "p90", "p99")
    }
    return latencies | {
        "rounds": len(rows),
        "qps": rows[0]["qps"],
        "items_per_s": median([row["items_per_s"] for row in rows]),
        "cpu_ms_per_item": median([row["cpu_ms_per_item"] for row in rows]),
        "forward_share": median([row["forward_share"] for row in rows]),
        "hits": median([row["cache_hits"] for row in rows]),
    }


_COLUMNS = {
    "QPS": ("qps", ".1f"),
    "items/s": ("items_per_s", ".2f"),
    "mean ms": ("mean_ms", ".1f"),
    "P90 ms": ("p90_ms", ".1f"),
    "P99 ms": ("p99_ms", ".1f"),
    "CPU ms": ("cpu_ms_per_item", ".1f"),
    "forward": ("forward_share", ".0%"),
    "hits": ("hits", ".0f"),
}


def _table(name: str, rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title=name, title_justify="left")
    table.add_column("candidate", no_wrap=True)
    for title in _COLUMNS:
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        cells = ("-" if row[name] is None else format(row[name], form) for name, form in _COLUMNS.values())
        table.add_row(row["candidate"], *cells)
    return table
