"""`transom timeline URL`: how an encoder's stages worked side by side lately, from its GET /timeline.

Knows the encoder's HTTP listener only. The file it writes opens in Perfetto or chrome://tracing.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import orjson
from rich import box
from rich.table import Table

from transom.commands.base import Parser, add_json_flag, examples, make_console, write_json
from transom.commands.health import probe
from transom.errors import TransomError, UnavailableError

_MAX_BYTES = 64 * 1024 * 1024


def add_parsers(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "timeline",
        help="show how an encoder's stages worked side by side lately",
        description="Show for each stage of an encoder how long it worked lately, and how much of that while"
        " a forward was running. URL is that of the encoder's HTTP listener, as its readiness line says.",
        epilog=examples(
            "transom timeline http://127.0.0.1:7002",
            "transom timeline http://127.0.0.1:7002 --output encoder.json   # for https://ui.perfetto.dev",
        ),
    )
    parser.add_argument("url", metavar="URL", help="base URL of an encoder's HTTP listener")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write all events there, in the Trace Event Format"
    )
    parser.add_argument("--timeout-s", type=float, default=10.0, metavar="S", help="(default 10)")
    add_json_flag(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    body = _fetch(args.url, args.timeout_s)
    if args.output is not None:
        try:
            args.output.write_bytes(orjson.dumps({"traceEvents": body["traceEvents"]}))
        except OSError as error:
            raise TransomError(f"can't write {args.output}: {error.strerror}") from None
    if args.json:
        write_json(body["summary"])
    else:
        _show(body["summary"])
    return 0


def _fetch(url: str, timeout_s: float) -> dict[str, Any]:
    status, text = probe(url, "/timeline", timeout_s=timeout_s, max_bytes=_MAX_BYTES)
    if status == 0:
        raise UnavailableError(text)
    try:
        body: dict[str, Any] = orjson.loads(text)
        if status == 200 and {"traceEvents", "summary"} <= body.keys():
            return body
    except (ValueError, AttributeError):
        pass
    raise UnavailableError(f"{url} is no encoder: HTTP {status}, {text[:200]!r}")


def _show(summary: dict[str, Any]) -> None:
    table = Table("stage", "events", "busy s", "share", "during a forward", box=box.SIMPLE)
    for name, stage in summary["stages"].items():
        busy_s = stage["busy_s"]
        share = f"{100 * busy_s / summary['window_s']:.0f} %" if summary["window_s"] else "-"
        overlap = f"{100 * stage['during_forward_s'] / busy_s:.0f} %" if busy_s else "-"
        table.add_row(name, str(stage["events"]), f"{busy_s:.3f}", share, overlap)
    console = make_console()
    console.print(table)
    console.print(f"over {summary['window_s']:.3f} s")
