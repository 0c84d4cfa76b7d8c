"""`transom bench NAME`: run one of the benchmarks of transom.bench.

A benchmark module has `add_arguments(parser)` and `run(args) -> int`; it is imported when it is named.
"""

from __future__ import annotations

import argparse
import importlib
import os
from functools import partial
from pathlib import Path
from types import ModuleType

from transom.commands.base import Parser, add_json_flag, examples
from transom.errors import ConfigError

# Named here and not found by listing, so that help works without importing a benchmark's needs.
BENCHMARKS = {
    "chat": "closed-loop chat load against a server: latency percentiles and throughput",
    "gateway": "latency and CPU time that the gateway adds, against a pretended model and other proxies",
    "serve": "closed or open loop on one or several servers: TTFT, TPOT, ITL, throughput, hit rate, ratios",
    "encoder": "media load on an encoder, open or closed loop; --compare: sequential encoder, cache, a peer",
    "radix": "match and insert of the prefix cache's radix tree, no server needed",
    "scheduler": "time to the first token under each scheduling policy, live or simulated, no server needed",
    "prefix-cache": "what a multi-user trace hits, against a stock engine's retention, no server needed",
    "kv-capacity": "bytes of KV a request takes, single pool against dual pools, no server needed",
    "placement": "media placed by polling and by the hash ring: hits, simulated; --live: on real encoders",
    "engine": "speed of one engine in this process and the parts of its steps, no server needed",
    "kernels": "fused kernels, checked and timed against torch and a dense baseline, no server needed",
    "images": "decoding pictures with the installed Pillow and with another build, pillow-simd for example",
    "video": "an hour of video to embeddings: step by step, and in runs that decode side by side",
    "shm": "put and get of the shared embedding cache against memcpy and a dict, no server needed",
}


def add_parsers(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "bench",
        help="run a benchmark",
        description="Run a benchmark.",
        epilog=examples(
            "transom bench chat --requests 64 --concurrency 8",
            "transom bench chat --mix text=2,image=1 --json > result.json",
        ),
    )
    names = parser.add_subparsers(dest="benchmark", metavar="NAME", required=True)
    for name, summary in BENCHMARKS.items():
        bench = names.add_parser(name, help=summary, description=f"{summary[:1].upper()}{summary[1:]}.")
        bench.fill_later(partial(_add_arguments, name=name))
        bench.set_defaults(run=_run)


def _add_arguments(parser: Parser, *, name: str) -> None:
    module = load(name)
    parser.epilog = examples(*module.EXAMPLES)
    module.add_arguments(parser)
    add_json_flag(parser)


def _check_writable(flag: str, file: Path) -> None:
    if (
        not file.parent.is_dir()
        or file.is_dir()
        or not os.access(file if file.exists() else file.parent, os.W_OK)
    ):
        raise ConfigError(f"{flag} {file}: no file can be written there")


def load(name: str) -> ModuleType:
    """Import a benchmark's module."""
    return importlib.import_module(f"transom.bench.{name.replace('-', '_')}")


def _run(args: argparse.Namespace) -> int:
    for name in ("out", "plot"):  # better now than when a long run is over
        file = getattr(args, name, None)
        if file:
            _check_writable(f"--{name}", Path(file))
    return int(load(args.benchmark).run(args))
