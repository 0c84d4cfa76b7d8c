"""Load on an encoder: open loop at a rate or closed loop, mixed media, percentiles, batches, cache hits.

Runs in `transom bench encoder`, against a running encoder (ZMQ inbox) or any server with the chat API,
or starts an encoder of its own. `--compare` measures it against the sequential encoder and a peer.
Imports late what a help text does not need.
"""

from __future__ import annotations

import argparse
import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transom.bench.origin import origin
from transom.bench.report import append_rows, progress_bar
from transom.commands.base import make_console, write_json
from transom.errors import ConfigError

if TYPE_CHECKING:
    from transom.bench.encoder_media import PictureBank

EXAMPLES = (
    "transom bench encoder --qps 20 --items 400",
    "transom bench encoder --url tcp://127.0.0.1:7001 --mix image=4,audio=2,video=1 --concurrency 16",
    "transom bench encoder --qps 30 --servegen servegen.tar.xz --repeat 0.3 --plot load.svg",
    "transom bench encoder --compare --out bench/results/encoder.jsonl",
)
KINDS = ("image", "audio", "video")
COMPARED = ("write-up", "cache", "tower", "video", "placement", "fleet")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("what is measured")
    where.add_argument(
        "--url", default="", metavar="URL",
        help="tcp:// or ipc:// inbox of an encoder, or http:// server with the chat API (default: its own)",
    )  # fmt: skip
    where.add_argument(
        "--metrics-url",
        default="",
        metavar="URL",
        help="health listener of the encoder at --url: batch sizes",
    )
    where.add_argument("--model", default="mimo-nano", metavar="MODEL", help="(default %(default)s)")
    where.add_argument(
        "--flag", action="append", default=[], metavar="NAME=VALUE",
        help="setting of the own encoder, e.g. max-wait-ms=8 (repeatable)",
    )  # fmt: skip
    where.add_argument(
        "--bind", default="tcp://127.0.0.1:0", metavar="ADDR", help="our inbox (default %(default)s)"
    )
    where.add_argument("--advertise", default="", metavar="ADDR", help="our inbox as the encoder reaches it")
    where.add_argument("--curve-key-file", default="", metavar="FILE", help="fleet key, off loopback")
    load = parser.add_argument_group("load")
    load.add_argument("--items", type=int, default=64, metavar="N", help="in all (default %(default)s)")
    load.add_argument("--qps", type=float, metavar="R", help="open loop: items a second, at random gaps")
    load.add_argument(
        "--concurrency", type=int, default=8, metavar="N", help="closed loop (default %(default)s)"
    )
    load.add_argument(
        "--mix", default="image=1", metavar="KIND=W,...",
        help="weights of image, audio and video (default %(default)s)",
    )  # fmt: skip
    load.add_argument(
        "--servegen", type=Path, metavar="FILE", help="picture sizes from this ServeGen multimodal archive"
    )
    load.add_argument("--image", metavar="WxH", help="one size for all pictures")
    load.add_argument("--scale", type=float, default=1.0, metavar="F", help="of pictures' sides (default 1)")
    load.add_argument(
        "--repeat", type=float, default=0.0, metavar="SHARE", help="items that were sent before (default 0)"
    )
    load.add_argument(
        "--source", choices=("url", "inline"), default="url", help="how items travel (default %(default)s)"
    )
    load.add_argument(
        "--host-ms", type=float, default=0.0, metavar="MS", help="delay of our media host (default 0)"
    )
    load.add_argument("--timeout-s", type=float, default=120.0, metavar="S", help="(default %(default)s)")
    load.add_argument("--warmup", type=int, default=8, metavar="N", help="not counted (default %(default)s)")
    load.add_argument("--seed", type=int, default=0, metavar="N", help="(default %(default)s)")
    parser.add_argument("--out", default="", metavar="FILE", help="append one JSON row an item, or a point")
    parser.add_argument("--plot", default="", metavar="FILE", help="draw the run: FILE.svg or FILE.png")
    add_compare_arguments(parser)


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    compare = parser.add_argument_group("comparison")
    compare.add_argument(
        "--compare", action="store_true",
        help="sequential encoder against ours, cache on and off, a peer's tower, an hour of video, placement",
    )  # fmt: skip
    compare.add_argument("--rounds", type=int, default=5, metavar="N", help="(default %(default)s)")
    compare.add_argument(
        "--video-s", type=int, default=3600, metavar="N", help="length of the clip (default %(default)s)"
    )
    compare.add_argument(
        "--peer-url", default="", metavar="URL", help="another engine's encoder with the chat API"
    )
    compare.add_argument("--peer-name", default="peer", metavar="NAME", help="(default %(default)s)")
    compare.add_argument("--skip", action="append", default=[], choices=COMPARED, help="a table of --compare")


def parse_mix(text: str) -> dict[str, float]:
    """Return the weights of kinds; raise ConfigError naming the part that is wrong."""
    mix = {}
    for part in text.split(","):
        kind, _, weight = part.partition("=")
        try:
            value = float(weight or 1)
        except ValueError:
            value = -1.0
        if kind.strip() not in KINDS or not 0 < value < float("inf"):
            raise ConfigError(f"--mix {part!r}: expected KIND=WEIGHT, KIND one of {', '.join(KINDS)}")
        mix[kind.strip()] = value
    return mix


def parse_size(text: str) -> tuple[int, int]:
    """Return (width, height); raise ConfigError."""
    width, _, height = text.partition("x")
    if not (width.isdigit() and height.isdigit() and 0 < int(width) <= 32768 and 0 < int(height) <= 32768):
        raise ConfigError(f"--image {text!r}: expected WIDTHxHEIGHT, 1 to 32768 each")
    return int(width), int(height)


def own_flags(flags: list[str]) -> list[str]:
    """Return the command-line flags that --flag NAME=VALUE stand for."""
    found = []
    for flag in flags:
        name, equals, value = flag.partition("=")
        if not equals:
            raise ConfigError(f"--flag {flag!r}: expected NAME=VALUE")
        found += [f"--{name.lstrip('-').replace('_', '-')}", value]
    return found


def check(args: argparse.Namespace) -> None:
    """Raise ConfigError on values out of range."""
    for name, low, high in (
        ("items", 1, 10**7), ("concurrency", 1, 10**5), ("warmup", 0, 10**6), ("rounds", 1, 1000),
        ("repeat", 0, 0.99), ("scale", 0.01, 16), ("host_ms", 0, 10**5), ("timeout_s", 0.1, 10**5),
    ):  # fmt: skip
        value = getattr(args, name)
        if not low <= value <= high:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: allowed {low} to {high}")
    if args.qps is not None and not 0 < args.qps <= 10**5:
        raise ConfigError(f"--qps {args.qps}: allowed above 0 to 100000")
    if args.plot and not args.plot.endswith((".svg", ".png")):
        raise ConfigError(f"--plot {args.plot}: expected a name that ends with .svg or .png")
    if args.url and args.flag:
        raise ConfigError("--flag is for an own encoder, not for one at --url")
    parse_mix(args.mix)
    own_flags(args.flag)


def new_bank(args: argparse.Namespace) -> PictureBank:
    """Return the pictures that the flags ask for."""
    from transom.bench.encoder_media import PictureBank, read_servegen

    return PictureBank(
        sizes=read_servegen(args.servegen) if args.servegen else None,
        fixed=parse_size(args.image) if args.image else None,
        scale=args.scale,
        seed=args.seed,
    )


def device_of(args: argparse.Namespace) -> str:
    """Return how rows name what computed: a server of others doesn't tell."""
    from transom.bench.encoder_targets import own_device

    return f"of {args.url}" if args.url else own_device(own_flags(args.flag))


def run(args: argparse.Namespace) -> int:
    check(args)
    if args.compare:
        from transom.bench import encoder_compare

        return encoder_compare.run(args)
    rows, summary = asyncio.run(_measure(args))
    if args.out:
        append_rows(args.out, [origin("encoder", device_of(args)) | row for row in rows])
    if args.plot:
        from transom.bench.encoder_plot import plot_run

        plot_run(Path(args.plot), rows, summary)
    if args.json:
        write_json(summary)
    else:
        show(summary)
    return 0 if summary["failed"] == 0 else 1


async def _measure(args: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    from transom.bench.encoder_load import Load, draw_items, drive, summarise
    from transom.bench.encoder_media import ItemMaker, MediaHost
    from transom.bench.encoder_targets import ChatTarget, OwnProcess, Target, WireTarget, read_usage

    load = Load(args.qps, args.concurrency, args.timeout_s, args.seed)
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(MediaHost(args.host_ms / 1000))
        process = None
        url = args.url
        if not url:
            process = await stack.enter_async_context(OwnProcess.encoder(args.model, own_flags(args.flag)))
            url = process.inbox
        target: Target
        if url.startswith(("tcp://", "ipc://")):
            target = WireTarget(url, bind=args.bind, advertise=args.advertise, key_file=args.curve_key_file)
        else:
            target = ChatTarget(url)
        await stack.enter_async_context(target)
        source = host if args.source == "url" else None
        bank, mix = new_bank(args), parse_mix(args.mix)
        # Warm-up items have names and bytes of their own.
        warm = draw_items(ItemMaker(mix, bank, seed=-1 - args.seed), args.warmup, 0.0, args.seed)
        items = draw_items(ItemMaker(mix, bank, seed=args.seed), args.items, args.repeat, args.seed)
        await drive(target, warm, Load(None, args.concurrency, args.timeout_s), source)
        before = await read_usage(process, args.metrics_url)
        with progress_bar("items", len(items), quiet=args.json) as tick:
            rows, wall_s = await drive(target, items, load, source, tick)
        after = await read_usage(process, args.metrics_url)
    summary = {
        "benchmark": "encoder",
        "url": args.url or "own process",
        "model": None if args.url else args.model,
        "mix": args.mix,
        "qps": args.qps,
        "concurrency": None if args.qps else args.concurrency,
        "repeat": args.repeat,
        "source": args.source,
        "seed": args.seed,
    }
    return rows, summary | summarise(rows, wall_s, before, after)


def show(summary: dict[str, Any]) -> None:
    """Print one run."""
    from rich.table import Table

    console = make_console()
    table = Table("ms", "mean", "p50", "p90", "p99", "max")
    for name, label in (("first_ms", "first embeddings"), ("latency_ms", "all embeddings")):
        if summary[name]["mean"] is not None:
            table.add_row(label, *(f"{value:.1f}" for value in summary[name].values()))
    console.print(table)
    if summary["stage_ms"]:
        stages = ", ".join(f"{stage} {value:.1f}" for stage, value in summary["stage_ms"].items())
        console.print(f"mean ms by stage: {stages}")
    if summary["batch_pieces"]:
        sizes = ", ".join(f"<= {size}: {count}" for size, count in summary["batch_pieces"].items())
        console.print(f"forwards by pictures in them: {sizes}")
    if summary["forward_share"] is not None:
        console.print(f"a forward was running {100 * summary['forward_share']:.0f} % of the time")
    hits = "" if summary["cache_hits"] is None else f", {summary['cache_hits']} from the cache"
    console.print(
        f"{summary['items']} items, {summary['failed']} failed, {summary['wall_s']:.1f} s:"
        f" {summary['items_per_s']:.2f} items/s, {summary['tokens_per_s']:.0f} embeddings/s{hits}"
    )
    for error in summary["errors"]:
        console.print(f"error: {error}", style="red")
