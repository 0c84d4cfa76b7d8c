"""Logging of every process: one line a record on stderr, readable or JSON, with the request id.

stdout belongs to machine-readable output (readiness lines, `--json`).
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from contextvars import ContextVar

import orjson

request_id_var: ContextVar[str | None] = ContextVar("request_id", default=None)


# Texts of clients and of media servers can be in messages: a line break in one must not begin a record, nor
# may one command a terminal or turn the order of a line. JSON itself escapes only those below the blank.
_TURNING = (0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_JSON_ESCAPES = {code: f"\\u{code:04x}" for code in (*range(127, 160), 0x2028, 0x2029, *_TURNING)}
_ESCAPES = {code: f"\\x{code:02x}" for code in range(32)} | _JSON_ESCAPES


class _ContextFilter(logging.Filter):
    def __init__(self, stage: str) -> None:
        super().__init__()
        self._stage = stage

    def filter(self, record: logging.LogRecord) -> bool:
        record.stage = self._stage
        if not hasattr(record, "request_id"):
            record.request_id = request_id_var.get()
        return True


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "stage": getattr(record, "stage", ""),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if getattr(record, "request_id", None):
            line["request_id"] = record.request_id  # type: ignore[attr-defined]
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line).decode().translate(_JSON_ESCAPES)


class _PlainFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        request_id = getattr(record, "request_id", None)
        where = f" [{request_id}]" if request_id else ""
        text = (
            f"{time.strftime('%H:%M:%S', time.localtime(record.created))}"
            f" {record.levelname.lower():7s}{where} {record.getMessage().translate(_ESCAPES)}"
        )
        if record.exc_info:
            trace = self.formatException(record.exc_info)
            text += "".join(f"\n  {line.translate(_ESCAPES)}" for line in trace.splitlines())
        return text


def _no_protocol_errors(record: logging.LogRecord) -> bool:
    """Make one line of what a client sends that is not HTTP, without it: keys may be among its headers."""
    error = record.exc_info[1] if record.exc_info else None
    if type(error).__module__ == "aiohttp.http_exceptions":
        record.levelno, record.levelname = logging.INFO, "INFO"
        record.msg, record.args = "%s (not HTTP: %s)", (record.getMessage(), type(error).__name__)
        record.exc_info = record.exc_text = None
    return True


# What `log_arguments` gives for a process that tells of trouble only.
QUIET = ("warning", "text")


def log_arguments(level: str, json: bool) -> tuple[str, str]:
    """Return the two words of a command line that make a process log as the one that starts it."""
    return level, "json" if json else "text"


def setup_from_arguments(stage: str, words: Sequence[str]) -> None:
    """Set up logging as `log_arguments` of the process that started this one says."""
    level, form = words
    setup_logging(stage, level=level, json=form == "json")


def setup_logging(stage: str, *, level: str = "info", json: bool = False) -> None:
    """Install the one handler of the process on the root logger, replacing earlier ones."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if json else _PlainFormatter())
    handler.addFilter(_ContextFilter(stage))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    server = logging.getLogger("aiohttp.server")
    server.removeFilter(_no_protocol_errors)
    server.addFilter(_no_protocol_errors)
    for noisy in ("aiohttp.access", "asyncio", "PIL", "libav", "httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
