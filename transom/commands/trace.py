"""`transom trace ID`: draw where the time of a request went, from a gateway's GET /v1/requests/{id}/trace.

Knows the public API only. Colours and bars follow the terminal; off a terminal the lines are plain.
"""

from __future__ import annotations

import argparse
from typing import Any
from urllib.parse import quote

import orjson
from rich.console import Console
from rich.text import Text

from transom.commands.base import Parser, add_json_flag, base_url, examples, make_console, write_json
from transom.commands.health import probe
from transom.config import client_api_key
from transom.errors import NotFoundError, TransomError, UnavailableError

_COLOURS = {"gateway": "white", "encoder": "yellow", "prefill": "cyan", "decode": "magenta"}
_MIN_BAR, _MAX_BAR = 16, 60


def add_parsers(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "trace",
        help="draw where the time of a request went",
        description="Draw the timeline of a request that a gateway remembers. ID is that of the answer, also"
        " in its header X-Request-Id. A key for the API is read from TRANSOM_API_KEY; with keys, only the"
        " key that sent the request sees it.",
        epilog=examples(
            "transom trace chatcmpl-0123456789abcdef",
            "transom trace --url http://host-a:8000 --json chatcmpl-0123456789abcdef",
        ),
    )
    parser.add_argument("id", metavar="ID", help="id of the request")
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", metavar="URL", help="server (default %(default)s)"
    )
    parser.add_argument("--timeout-s", type=float, default=5.0, metavar="S", help="(default 5)")
    add_json_flag(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    trace = _fetch(base_url(args.url), args.id, args.timeout_s)
    if args.json:
        write_json(trace)
    else:
        draw(trace, make_console())
    return 0


def _fetch(url: str, id: str, timeout_s: float) -> dict[str, Any]:
    key = client_api_key()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    path = f"/v1/requests/{quote(id, safe='')}/trace"
    status, text = probe(url, path, timeout_s=timeout_s, headers=headers)
    if status == 0:
        raise UnavailableError(text)
    try:
        body = orjson.loads(text)
        message = None if status == 200 else str(body["error"]["message"])
    except (ValueError, KeyError, TypeError):
        raise UnavailableError(f"{url} is no gateway: HTTP {status}, {text[:200]!r}") from None
    if message is not None:
        raise (NotFoundError if status == 404 else TransomError)(message)
    trace: dict[str, Any] = body
    return trace


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f} ms" if value < 1000 else f"{value / 1000:.2f} s"


def _clean(text: object) -> str:
    """Return text without control characters: what a server says must not steer the terminal."""
    return "".join(one if one.isprintable() else "?" for one in str(text))


def draw(trace: dict[str, Any], console: Console) -> None:
    """Print the head, one bar per span, and the media items."""
    usage = trace["usage"]
    ended = f"{trace['status']} {trace['error'] or ''}".strip() if trace["state"] == "finished" else "running"
    console.print(Text(_clean(f"{trace['id']}  {trace['kind']} of {trace['model']}, {ended}"), style="bold"))
    console.print(
        f"{_ms(trace['duration_ms'])} in all, first token after {_ms(trace['ttft_ms'])},"
        f" {usage['prompt_tokens']} prompt tokens ({usage['prompt_tokens_details']['cached_tokens']} cached),"
        f" {usage['completion_tokens']} output tokens"
    )
    total_ms = max(trace["duration_ms"], 1e-3)
    # What takes turns, like the stages of a clip, is one line.
    lines: dict[str, list[dict[str, Any]]] = {}
    for span in trace["spans"]:
        lines.setdefault(_label(span), []).append(span)
    width = max(map(len, lines), default=0)
    bar_len = min(_MAX_BAR, max(_MIN_BAR, console.width - width - 14)) if console.is_terminal else 40
    for label, spans in lines.items():
        line = Text(f"{label:{width}}  ")
        line.append(_bar(spans, total_ms, bar_len), style=_COLOURS.get(spans[0]["stage"], "white"))
        line.append(f"  {_ms(sum(span['duration_ms'] for span in spans))}")
        console.print(line)
    for item in trace["media"]:
        open_state = "in work" if trace["state"] == "running" else "not finished"
        state = {None: open_state, True: "cache hit", False: "encoded"}[item["cache_hit"]]
        notes = "".join(f"; {_clean(note)}" for note in item["notes"])
        tokens = "" if item["tokens"] is None else f", {item['tokens']} tokens"
        kind = _clean(item["modality"] or "media")
        console.print(f"{kind} {item['item'] + 1}: {state}{tokens}, {_ms(item['duration_ms'])}{notes}")


def _label(span: dict[str, Any]) -> str:
    item = "" if span["item"] is None else f" {span['item'] + 1}"
    return _clean(f"{span['worker'] or span['stage']}  {span['name']}{item}")


def _bar(spans: list[dict[str, Any]], total_ms: float, length: int) -> str:
    """Return dots with the spans' shares filled in, at least one cell for each."""
    cells = ["."] * length
    for span in spans:
        first = min(length - 1, int(length * span["start_ms"] / total_ms))
        count = max(1, min(length - first, round(length * span["duration_ms"] / total_ms)))
        cells[first : first + count] = "#" * count
    return "".join(cells)
