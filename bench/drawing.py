"""Small drawings of benchmarks' figures: a list of lines, boxes and words, written as SVG or PNG.

Runs in a benchmark's process; knows no benchmark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol
from xml.sax.saxutils import escape

from PIL import Image, ImageDraw, ImageFont

WIDTH, PANEL, MARGIN = 900, 250, 60
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")
_INK, _FAINT = "#333333", "#dddddd"


class Drawing(Protocol):
    """What the panels draw on; y grows downwards, units are pixels."""

    def box(self, left: float, top: float, right: float, bottom: float, colour: str) -> None: ...

    def line(self, points: Sequence[tuple[float, float]], colour: str) -> None: ...

    def words(self, x: float, y: float, text: str, *, to_right: bool = True) -> None: ...

    def save(self, path: Path) -> None: ...


class Svg:
    """Collects SVG elements."""

    def __init__(self, height: int) -> None:
        size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
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
        self._image = Image.new("RGB", (WIDTH, height), "white")
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


class Panel:
    """Axes of one panel: data to pixels."""

    def __init__(self, drawing: Drawing, number: int, title: str, x_top: float, y_top: float) -> None:
        self.drawing = drawing
        self._x_top, self._y_top = x_top or 1.0, y_top or 1.0
        self.top = number * PANEL + 30
        self.bottom = (number + 1) * PANEL - 30
        drawing.words(MARGIN, self.top - 10, title)
        for share in (0.0, 0.5, 1.0):
            _, y = self.at(0.0, share * self._y_top)
            drawing.line([(MARGIN, y), (WIDTH - 20, y)], _FAINT if share else _INK)
            drawing.words(MARGIN - 6, y + 4, f"{share * self._y_top:.4g}", to_right=False)

    def at(self, x: float, y: float) -> tuple[float, float]:
        wide, high = WIDTH - 20 - MARGIN, self.bottom - self.top
        return MARGIN + wide * x / self._x_top, self.bottom - high * y / self._y_top

    def label(self, x: float, text: str) -> None:
        self.drawing.words(self.at(x, 0.0)[0], self.bottom + 16, text)


def new_drawing(path: Path, panels: int) -> Drawing:
    """Return an empty drawing of the kind that the file's name asks for: .svg or .png."""
    height = panels * PANEL
    return Svg(height) if path.suffix == ".svg" else Png(height)


def draw_distributions(
    drawing: Drawing, number: int, title: str, curves: Mapping[str, Sequence[float]]
) -> None:
    """Draw, for each name, the share of its sorted values up to each value, in %."""
    worst = max((values[-1] for values in curves.values() if values), default=1.0)
    panel = Panel(drawing, number, title, worst, 100.0)
    for place, (name, values) in enumerate(curves.items()):
        colour = COLOURS[place % len(COLOURS)]
        steps = [(value, 100.0 * (index + 1) / len(values)) for index, value in enumerate(values)]
        if steps:
            drawing.line([panel.at(steps[0][0], 0.0), *(panel.at(*step) for step in steps)], colour)
        top = panel.top + 16 * place
        drawing.box(WIDTH - 130, top, WIDTH - 120, top + 10, colour)
        drawing.words(WIDTH - 114, top + 10, name)
    for share in (0.0, 0.25, 0.5, 0.75, 0.95):
        panel.label(share * worst, f"{share * worst:.4g}")
