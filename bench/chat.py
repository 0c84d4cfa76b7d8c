"""Closed-loop chat load: N clients, each sending its next request when the last one is answered.

Runs in `transom bench chat` against any OpenAI-compatible URL. Media are made here, seeded, each
request another one, so that no cache of embeddings answers unless --distinct asks for repeats.
Imports late what a help text does not need.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from transom.bench.report import progress_bar
from transom.commands.base import base_url, make_console, write_json
from transom.config import client_api_key
from transom.errors import ConfigError, TransomError

if TYPE_CHECKING:
    from transom.client import Answer, ChatClient

EXAMPLES = (
    "transom bench chat --requests 64 --concurrency 8",
    "transom bench chat --mix text=2,image=1,audio=1 --out rows.jsonl",
    "transom bench chat --url http://host-a:8000 --json",
)
KINDS = ("text", "image", "video", "audio")
_QUESTIONS = {
    "text": "Who are you, and what can you do?",
    "image": "What do you see in this picture?",
    "video": "What happens in this video?",
    "audio": "What do you hear?",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", metavar="URL", help="server (default %(default)s)"
    )
    parser.add_argument("--model", default="", metavar="ID", help="model id (default: the server's first)")
    parser.add_argument("--requests", type=int, default=32, metavar="N", help="in all (default %(default)s)")
    parser.add_argument(
        "--concurrency", type=int, default=4, metavar="N", help="clients (default %(default)s)"
    )
    parser.add_argument(
        "--mix", default="text=1", metavar="KIND=W,...",
        help="weights of text, image, video and audio requests (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--max-tokens", type=int, default=32, metavar="N", help="(default %(default)s)")
    parser.add_argument(
        "--distinct", type=int, default=0, metavar="N", help="only N different items a kind; 0: all differ"
    )
    parser.add_argument(
        "--warmup", type=int, default=2, metavar="N", help="not counted (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(default %(default)s)")
    parser.add_argument("--out", default="", metavar="FILE", help="write one JSON row a request here")


def parse_mix(text: str) -> dict[str, float]:
    """Return the weights of request kinds; raise ConfigError naming the part that is wrong."""
    mix = {}
    for item in text.split(","):
        kind, _, weight = item.partition("=")
        try:
            value = float(weight or 1)
        except ValueError:
            value = math.nan
        if kind.strip() not in KINDS or not 0 < value < math.inf:
            raise ConfigError(f"--mix {item!r}: expected KIND=WEIGHT, KIND one of {', '.join(KINDS)}")
        mix[kind.strip()] = value
    return mix


def percentile(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile; NaN when there is no value."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def run(args: argparse.Namespace) -> int:
    for name, low in (("requests", 1), ("concurrency", 1), ("max_tokens", 1), ("warmup", 0), ("distinct", 0)):
        if getattr(args, name) < low:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {low}")
    load = _Load(args, parse_mix(args.mix))
    rows, wall_s = asyncio.run(load.run())
    if args.out:
        lines = [orjson.dumps(row).decode() + "\n" for row in rows]
        Path(args.out).write_text("".join(lines), encoding="utf-8")
    summary = summarise(rows, wall_s, args)
    if args.json:
        write_json(summary)
    else:
        _show(summary)
    return 0 if summary["failed"] == 0 else 1


def summarise(rows: list[dict[str, Any]], wall_s: float, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a run; NaN does not survive JSON, so what was not measured is None."""
    good = [row for row in rows if row["error"] is None]
    figures: dict[str, Any] = {}
    for name in ("ttft_ms", "e2e_ms", "tpot_ms"):
        values = [row[name] for row in good if row[name] is not None]
        figures[name] = {
            label: round(percentile(values, share), 3) if values else None
            for label, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
        }
    output = sum(row["completion_tokens"] for row in good)
    return {
        "benchmark": "chat",
        "url": base_url(args.url),
        "mix": args.mix,
        "concurrency": args.concurrency,
        "max_tokens": args.max_tokens,
        "seed": args.seed,
        "requests": len(rows),
        "failed": len(rows) - len(good),
        "errors": sorted({row["error"] for row in rows if row["error"]})[:5],
        "wall_s": round(wall_s, 3),
        "requests_per_s": round(len(good) / wall_s, 3),
        "output_tokens_per_s": round(output / wall_s, 3),
        **figures,
    }


class _Load:
    def __init__(self, args: argparse.Namespace, mix: dict[str, float]) -> None:
        self._args = args
        self._mix = mix
        self._model = args.model

    async def run(self) -> tuple[list[dict[str, Any]], float]:
        """Run warm-up and load; return the rows in the order of sending, and the load's duration."""
        from transom.client import ChatClient

        args = self._args
        rng = random.Random(args.seed)
        kinds = rng.choices(list(self._mix), list(self._mix.values()), k=args.warmup + args.requests)
        async with ChatClient(base_url(args.url), api_key=client_api_key()) as client:
            self._model = args.model or (await client.models())[0]
            # Warm-up items come from another part of the seed space than the measured ones.
            for number, kind in enumerate(kinds[: args.warmup]):
                await self._one(client, -1 - number, kind)
            jobs = list(enumerate(kinds[args.warmup :]))
            jobs.reverse()
            rows: list[dict[str, Any]] = []
            begin = time.perf_counter()
            with progress_bar("requests", len(jobs), quiet=args.json) as advance:

                async def worker() -> None:
                    while jobs:
                        rows.append(await self._one(client, *jobs.pop()))
                        advance()

                await asyncio.gather(*(worker() for _ in range(args.concurrency)))
            return sorted(rows, key=lambda row: int(row["number"])), time.perf_counter() - begin

    async def _one(self, client: ChatClient, number: int, kind: str) -> dict[str, Any]:
        from transom.client import Answer

        args = self._args
        item = number % args.distinct if args.distinct else number
        text = {"type": "text", "text": f"{_QUESTIONS[kind]}"}
        content: Any = text["text"]
        if kind != "text":
            from transom.bench.media import make_part

            part = await asyncio.to_thread(make_part, kind, (args.seed, item))
            content = [part, text]
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": args.max_tokens,
            "temperature": 0,
        }
        answer, error = Answer(), None
        try:
            async for _ in client.stream(body, answer):
                pass
        except TransomError as failure:
            error = failure.message
        return _row(number, kind, answer, error)


def _row(number: int, kind: str, answer: Answer, error: str | None) -> dict[str, Any]:
    tokens = int(answer.usage.get("completion_tokens") or 0)
    tpot = None
    if answer.ttft_s is not None and tokens > 1:
        tpot = 1000 * (answer.e2e_s - answer.ttft_s) / (tokens - 1)
    return {
        "number": number,
        "kind": kind,
        "ttft_ms": None if answer.ttft_s is None else 1000 * answer.ttft_s,
        "e2e_ms": 1000 * answer.e2e_s,
        "tpot_ms": tpot,
        "prompt_tokens": int(answer.usage.get("prompt_tokens") or 0),
        "completion_tokens": tokens,
        "finish_reason": answer.finish_reason,
        "error": error,
    }


def _show(summary: dict[str, Any]) -> None:
    from rich.table import Table

    console = make_console()
    table = Table("ms", "p50", "p90", "p99", "max")
    for name, label in (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("e2e_ms", "E2E")):
        cells = [summary[name][key] for key in ("p50", "p90", "p99", "max")]
        table.add_row(label, *("-" if cell is None else f"{cell:.1f}" for cell in cells))
    console.print(table)
    console.print(
        f"{summary['requests']} requests, {summary['failed']} failed, {summary['wall_s']:.1f} s:"
        f" {summary['requests_per_s']:.2f} requests/s, {summary['output_tokens_per_s']:.1f} tokens/s"
    )
    for error in summary["errors"]:
        console.print(f"error: {error}", style="red")
