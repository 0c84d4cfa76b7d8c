"""Draws one run of encoder load: latencies over time, their distribution, sizes of the forwards' batches.

Runs in the benchmark's process. A drawing is a list of lines, boxes and words, written as SVG or PNG.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol
from xml.sax.saxutils import escape

from PIL import Image, ImageDraw, ImageFont

_WIDTH, _PANEL, _MARGIN = 900, 250, 60
_COLOURS = {"image": "#1f77b4", "audio": "#2ca02c", "video": "#9467bd", "failed": "#d62728"}
_INK, _FAINT = "#333333", "#dddddd"


class Drawing(Protocol):
    """What the panels draw on; y grows downwards, units are pixels."""

    def box(self, left: float, top: float, right: float, bottom: float, colour: str) -> None: ...

    def line(self, points: Sequence[tuple[float, float]], colour: str) -> None: ...

    def words(self, x: float, y: float, text: str, *, to_right: bool = True) -> None: ...


class Svg:
    """Collects SVG elements."""

    def __init__(self, height: int) -> None:
        size = f'width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}"'
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
            f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        ]

    def box(self, left: float, top: float, right: float, bottom: float, colour: str) -> None:
        at = f'x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}"'
        self._parts.append(f'<rect {at} fill="{colour}"/>')

    def line(self, points: Sequence[tuple[float, float]], colour: str) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}"/>')

    def words(self, x: float, y: float, text: str, *, to_right: bool = True) -> None:
        anchor = "start" if to_right else "end"
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{_INK}">{escape(text)}</text>'
        )

    def save(self, path: Path) -> None:
        """Write the file."""
        path.write_text("\n".join([*self._parts, "</svg>"]), encoding="utf-8")


class Png:
    """Draws with Pillow."""

    def __init__(self, height: int) -> None:
        self._image = Image.new("RGB", (_WIDTH, height), "white")
        self._draw = ImageDraw.Draw(self._image)
        self._font = ImageFont.load_default(12)

    def box(self, left: float, top: float, right: float, bottom: float, colour: str) -> None:
        self._draw.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), fill=colour)

    def line(self, points: Sequence[tuple[float, float]], colour: str) -> None:
        self._draw.line(list(points), fill=colour)

    def words(self, x: float, y: float, text: str, *, to_right: bool = True) -> None:
        anchor = "ls" if to_right else "rs"
        self._draw.text((x, y), text, fill=_INK, font=self._font, anchor=anchor)

    def save(self, path: Path) -> None:
        """Write the file."""
        self._image.save(path, "PNG")


class _Panel:
    """Axes of one panel: data to pixels."""

    def __init__(self, drawing: Drawing, number: int, title: str, x_top: float, y_top: float) -> None:
        self.drawing = drawing
        self._x_top, self._y_top = x_top or 1.0, y_top or 1.0
        self.top = number * _PANEL + 30
        self.bottom = (number + 1) * _PANEL - 30
        drawing.words(_MARGIN, self.top - 10, title)
        for share in (0.0, 0.5, 1.0):
            _, y = self.at(0.0, share * self._y_top)
            drawing.line([(_MARGIN, y), (_WIDTH - 20, y)], _FAINT if share else _INK)
            drawing.words(_MARGIN - 6, y + 4, f"{share * self._y_top:.4g}", to_right=False)

    def at(self, x: float, y: float) -> tuple[float, float]:
        wide, high = _WIDTH - 20 - _MARGIN, self.bottom - self.top
        return _MARGIN + wide * x / self._x_top, self.bottom - high * y / self._y_top

    def label(self, x: float, text: str) -> None:
        self.drawing.words(self.at(x, 0.0)[0], self.bottom + 16, text)


def plot_run(path: Path, rows: Sequence[dict[str, Any]], summary: dict[str, Any]) -> None:
    """Draw a run into an .svg or .png file."""
    batches = summary["batch_pieces"] or {}
    height = (3 if batches else 2) * _PANEL
    drawing = Svg(height) if path.suffix == ".svg" else Png(height)
    _over_time(drawing, rows)
    _distribution(drawing, sorted(row["latency_ms"] for row in rows if row["error"] is None))
    if batches:
        _batches(drawing, batches)
    drawing.save(path)


def _over_time(drawing: Drawing, rows: Sequence[dict[str, Any]]) -> None:
    last_s, worst_ms = max(row["at_s"] for row in rows), max(row["latency_ms"] for row in rows)
    panel = _Panel(drawing, 0, "latency in ms by the moment of sending in s", last_s, worst_ms)
    kinds = sorted({"failed" if row["error"] else row["kind"] for row in rows})
    for row in rows:
        x, y = panel.at(row["at_s"], row["latency_ms"])
        drawing.box(x - 2, y - 2, x + 2, y + 2, _COLOURS["failed" if row["error"] else row["kind"]])
    for place, kind in enumerate(kinds):
        drawing.box(
            _WIDTH - 90, panel.top + 16 * place, _WIDTH - 80, panel.top + 16 * place + 10, _COLOURS[kind]
        )
        drawing.words(_WIDTH - 74, panel.top + 16 * place + 10, kind)
    panel.label(0.0, "0")
    panel.label(0.95 * last_s, f"{last_s:.3g} s")


def _distribution(drawing: Drawing, latencies: Sequence[float]) -> None:
    worst = latencies[-1] if latencies else 1.0
    panel = _Panel(drawing, 1, "share of the items that took up to so many ms, in %", worst, 100.0)
    if latencies:
        steps = [(value, 100.0 * (number + 1) / len(latencies)) for number, value in enumerate(latencies)]
        drawing.line([panel.at(0.0, 0.0), *(panel.at(*step) for step in steps)], _COLOURS["image"])
    for share in (0.0, 0.25, 0.5, 0.75, 0.95):
        panel.label(share * worst, f"{share * worst:.4g}")


def _batches(drawing: Drawing, batches: dict[str, int]) -> None:
    panel = _Panel(drawing, 2, "forwards by pictures in them", float(len(batches)), max(batches.values()))
    for place, (size, count) in enumerate(batches.items()):
        left, top = panel.at(place + 0.1, count)
        right, bottom = panel.at(place + 0.9, 0.0)
        drawing.box(left, top, right, bottom, _COLOURS["image"])
        panel.label(place + 0.4, size if size == "more" else f"≤ {size}")
