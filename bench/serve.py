"""Load on chat servers: closed or open loop, unique and shared prefixes, long and short, text and media.

Runs in `transom bench serve` against any OpenAI-compatible servers; several are measured in turns, round by
round, so that what else the machine does hits all of them. Imports late what a help text does not need.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transom.bench.chat import parse_mix
from transom.commands.base import base_url, write_json
from transom.errors import ConfigError

EXAMPLES = (
    "transom bench serve --requests 32 --concurrency 16 --prompt-tokens 512 --output-tokens 64",
    "transom bench serve --shared-tokens 384 --rate 4 --plot load.svg",
    "transom bench serve --server ours=http://127.0.0.1:8000 --server other=http://127.0.0.1:8101 --rounds 5",
    "transom bench serve --mix text=3,image=1 --out rows.jsonl",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--server", action="append", default=[], metavar="NAME=URL",
        help="a server to measure, again for more of them (default: transom=http://127.0.0.1:8000);"
        " ratios are to the last one",
    )  # fmt: skip
    parser.add_argument("--model", default="", metavar="ID", help="model id (default: each server's first)")
    parser.add_argument("--requests", type=int, default=16, metavar="N", help="a round (default %(default)s)")
    parser.add_argument(
        "--concurrency", type=int, default=16, metavar="N", help="closed loop: clients (default %(default)s)"
    )
    parser.add_argument(
        "--rate", type=float, default=0.0, metavar="QPS",
        help="open loop: requests a second, at random moments; 0: closed loop",
    )  # fmt: skip
    parser.add_argument(
        "--prompt-tokens", default="512", metavar="N[,N]",
        help="lengths of text prompts, in turns (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--shared-tokens", type=int, default=0, metavar="N",
        help="leading tokens that all prompts of a round have in common (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--output-tokens", type=int, default=64, metavar="N", help="(default %(default)s)")
    parser.add_argument(
        "--mix", default="text=1", metavar="KIND=W,...",
        help="weights of text, image, video and audio requests (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--token-ids", default="300:1200", metavar="LOW:HIGH",
        help="ids that text prompts are drawn from (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="(default %(default)s)")
    parser.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="of prompts and arrivals (default: a new one, as a warm server may have cached earlier prompts)",
    )
    parser.add_argument("--out", default="", metavar="FILE", help="append a JSON row a request and a round")
    parser.add_argument("--plot", default="", metavar="FILE", help="draw the run: FILE.svg or FILE.png")


def run(args: argparse.Namespace) -> int:
    from transom.bench import serve_load, serve_report

    load = _load(args)
    if args.plot and not args.plot.endswith((".svg", ".png")):
        raise ConfigError(f"--plot {args.plot}: expected a name that ends with .svg or .png")
    servers = _servers(args.server)
    rows, rounds = asyncio.run(serve_load.measure(servers, load, quiet=args.json))
    summary = serve_report.summarise(servers, load, rows, rounds)
    if args.out:
        serve_report.write_rows(args.out, load, rows, rounds)
    if args.plot:
        serve_report.plot(Path(args.plot), rows)
    if args.json:
        write_json(summary)
    else:
        serve_report.show(summary)
    return 0 if not summary["failed"] else 1


def _servers(given: Sequence[str]) -> dict[str, str]:
    servers: dict[str, str] = {}
    for text in given or ["transom=http://127.0.0.1:8000"]:
        name, found, url = text.partition("=")
        if not found or not name or name in servers:
            raise ConfigError(f"--server {text!r}: expected NAME=URL, each name once")
        servers[name] = base_url(url)
    return servers


def _load(args: argparse.Namespace) -> Any:
    from transom.bench.serve_load import Load

    for name, low in (("requests", 1), ("concurrency", 1), ("output_tokens", 1), ("rounds", 1)):
        if getattr(args, name) < low:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {low}")
    try:
        lengths = tuple(int(part) for part in args.prompt_tokens.split(","))
        low_id, high_id = (int(part) for part in args.token_ids.split(":"))
    except ValueError:
        raise ConfigError("--prompt-tokens takes N[,N], --token-ids LOW:HIGH") from None
    if min(lengths) < 1 or not 0 <= args.shared_tokens < min(lengths):
        raise ConfigError(
            f"--shared-tokens {args.shared_tokens}: must be in 0..{min(lengths) - 1},"
            " less than the shortest of --prompt-tokens"
        )
    if not 0 <= low_id < high_id:
        raise ConfigError(f"--token-ids {args.token_ids}: LOW must be below HIGH")
    if not args.rate >= 0:
        raise ConfigError(f"--rate {args.rate}: must be 0 or more")
    seed = secrets.randbelow(1 << 31) if args.seed is None else args.seed
    return Load(
        requests=args.requests, concurrency=args.concurrency, rate=args.rate, prompt_lens=lengths,
        shared_len=args.shared_tokens, output_len=args.output_tokens, mix=parse_mix(args.mix),
        token_ids=(low_id, high_id), rounds=args.rounds, seed=seed, model=args.model,
    )  # fmt: skip


def arrivals(count: int, rate: float, rng: random.Random) -> list[float]:
    """Return the moments of an open loop's requests, in seconds: a Poisson process."""
    moments, at = [], 0.0
    for _ in range(count):
        moments.append(at)
        at += rng.expovariate(rate)
    return moments
