"""Files of a benchmark's rows, and a progress bar on a terminal. Knows no benchmark."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from transom.commands.base import make_console


def append_rows(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append one JSON object a line."""
    with Path(path).open("ab") as out:
        out.writelines(orjson.dumps(row) + b"\n" for row in rows)


@contextmanager
def progress_bar(label: str, total: int, *, quiet: bool) -> Iterator[Callable[[], None]]:
    """Show progress on a terminal's stderr; yield what to call after each of `total` steps."""
    console = make_console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(label, total=total)
        yield lambda: progress.advance(task)
