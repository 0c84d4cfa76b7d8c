"""What the subcommands share: parser behaviour, output that is plain off a terminal, JSON output.

Runs in the `transom` command; knows no stage.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Callable
from typing import Any, NoReturn

import orjson
from rich.console import Console

Run = Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line: the usage of a stage alone fills a screen."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)
        self._fill: Callable[[Parser], None] | None = None

    def fill_later(self, fill: Callable[[Parser], None]) -> None:
        """Let `fill` add arguments once they are needed: it may import what other commands do without."""
        self._fill = fill

    def fill(self) -> None:
        """Add the arguments that were put off."""
        fill, self._fill = self._fill, None
        if fill is not None:
            fill(self)

    def parse_known_args(self, *args: Any, **options: Any) -> Any:
        self.fill()
        return super().parse_known_args(*args, **options)

    def format_help(self) -> str:
        self.fill()
        # The formatter that leaves the examples as they are leaves long descriptions so too.
        text, width = self.description, shutil.get_terminal_size().columns - 2
        lines = (text or "").splitlines()
        self.description = "\n".join(textwrap.fill(line, max(width, 20)) for line in lines) or None
        try:
            return super().format_help()
        finally:
            self.description = text

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def examples(*lines: str) -> str:
    """Return an epilog of example command lines."""
    return "examples:\n" + "\n".join(f"  {line}" for line in lines)


_FILE_WIDTH = 120  # of tables in a file or pipe, which has no width of its own


def make_console(*, stderr: bool = False) -> Console:
    """Return a console that neither wraps nor decorates lines when it is not a terminal."""
    console = Console(stderr=stderr, soft_wrap=True, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    return console


def write_json(value: Any) -> None:
    """Write the one JSON object of a `--json` run to stdout."""
    sys.stdout.write(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode() + "\n")
    sys.stdout.flush()


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def base_url(url: str) -> str:
    """Return a server's base URL: scheme added when it lacks one, trailing slash and /v1 dropped."""
    if "://" not in url:
        url = f"http://{url}"
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
