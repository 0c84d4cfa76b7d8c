"""Draws one run of encoder load: latencies over time, their distribution, sizes of the forwards' batches.

Runs in the benchmark's process.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transom.bench.drawing import WIDTH, Drawing, Panel, draw_distributions, new_drawing

_COLOURS = {"image": "#1f77b4", "audio": "#2ca02c", "video": "#9467bd", "failed": "#d62728"}


def plot_run(path: Path, rows: Sequence[dict[str, Any]], summary: dict[str, Any]) -> None:
    """Draw a run into an .svg or .png file."""
    batches = summary["batch_pieces"] or {}
    drawing = new_drawing(path, 3 if batches else 2)
    _over_time(drawing, rows)
    good = [row for row in rows if row["error"] is None]
    curves = {"all embeddings": sorted(row["latency_ms"] for row in good)}
    firsts = sorted(row["first_ms"] for row in good if row.get("first_ms") is not None)
    draw_distributions(
        drawing,
        1,
        "share of the items that took up to so many ms, in %",
        curves | ({"first": firsts} if firsts else {}),
    )
    if batches:
        _batches(drawing, batches)
    drawing.save(path)


def _over_time(drawing: Drawing, rows: Sequence[dict[str, Any]]) -> None:
    last_s, worst_ms = max(row["at_s"] for row in rows), max(row["latency_ms"] for row in rows)
    panel = Panel(drawing, 0, "latency in ms by the moment of sending in s", last_s, worst_ms)
    kinds = sorted({"failed" if row["error"] else row["kind"] for row in rows})
    for row in rows:
        x, y = panel.at(row["at_s"], row["latency_ms"])
        drawing.box(x - 2, y - 2, x + 2, y + 2, _COLOURS["failed" if row["error"] else row["kind"]])
    for place, kind in enumerate(kinds):
        drawing.box(
            WIDTH - 90, panel.top + 16 * place, WIDTH - 80, panel.top + 16 * place + 10, _COLOURS[kind]
        )
        drawing.words(WIDTH - 74, panel.top + 16 * place + 10, kind)
    panel.label(0.0, "0")
    panel.label(0.95 * last_s, f"{last_s:.3g} s")


def _batches(drawing: Drawing, batches: dict[str, int]) -> None:
    panel = Panel(drawing, 2, "forwards by pictures in them", float(len(batches)), max(batches.values()))
    for place, (size, count) in enumerate(batches.items()):
        left, top = panel.at(place + 0.1, count)
        right, bottom = panel.at(place + 0.9, 0.0)
        drawing.box(left, top, right, bottom, _COLOURS["image"])
        panel.label(place + 0.4, size if size == "more" else f"≤ {size}")
