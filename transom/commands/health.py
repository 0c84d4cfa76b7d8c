"""`transom health URL`: the exit code says whether a process is alive or ready (container probes)."""

from __future__ import annotations

import argparse
import http.client
from collections.abc import Mapping
from urllib.parse import urlsplit

from transom.commands.base import Parser, base_url, examples, make_console
from transom.errors import ConfigError

_MAX_BYTES = 1024 * 1024


def add_parsers(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "health",
        help="ask a process whether it is ready; for container health checks",
        description="Exit 0 when GET URL/ready answers 200, else 1 with the reason.",
        epilog=examples(
            "transom health http://127.0.0.1:8000", "transom health --alive http://127.0.0.1:8000"
        ),
    )
    parser.add_argument("url", metavar="URL", help="base URL of the process's HTTP listener")
    parser.add_argument("--alive", action="store_true", help="ask /health: alive is enough")
    parser.add_argument("--timeout-s", type=float, default=2.0, metavar="S", help="(default 2)")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    status, text = probe(args.url, "/health" if args.alive else "/ready", timeout_s=args.timeout_s)
    make_console().print(text)
    return 0 if status == 200 else 1


def probe(
    url: str,
    path: str,
    *,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
    max_bytes: int = _MAX_BYTES,
) -> tuple[int, str]:
    """GET a body of at most `max_bytes`; return (status, body), or (0, reason) when nothing answers."""
    parts = urlsplit(base_url(url))
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url!r} is not an http URL")
    make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = make(parts.hostname, parts.port, timeout=timeout_s)
    try:
        connection.request("GET", parts.path + path, headers=dict(headers or {}))
        response = connection.getresponse()
        return response.status, response.read(max_bytes).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        return 0, f"{parts.netloc}: {getattr(error, 'strerror', None) or error}"
    finally:
        connection.close()
