"""Sums up `transom bench serve`: percentiles a server, medians over rounds, ratios, table, rows, drawing.

Runs in the benchmark's process; pure but for what it prints and writes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from transom.bench.chat import percentile
from transom.bench.origin import origin
from transom.bench.report import append_rows
from transom.bench.serve_load import Load, Row
from transom.commands.base import make_console

_QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
_TIMES = (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("itl_ms", "ITL"), ("e2e_ms", "E2E"))
_RATES = ("output_tokens_per_s", "input_tokens_per_s", "requests_per_s", "hit_rate")


def summarise(
    servers: Mapping[str, str], load: Load, rows: Sequence[Row], rounds: Sequence[Row]
) -> dict[str, Any]:
    """Return the figures of a run. Rates are medians over rounds, times percentiles over all requests."""
    figures = {name: _figures(name, rows, rounds) for name in servers}
    last = list(servers)[-1]
    errors = sorted({f"{row['server']}: {row['error']}" for row in rows if row["error"]})
    return {
        "benchmark": "serve",
        "servers": dict(servers),
        "load": _load(load),
        "failed": sum(row["failed"] for row in rounds),
        "errors": errors[:5],
        "figures": figures,
        "ratios_to": last,
        "ratios": {name: _ratios(figures[name], figures[last]) for name in servers if name != last},
    }


def _load(load: Load) -> dict[str, Any]:
    return {**dataclasses.asdict(load), "mix": dict(load.mix)}


def _figures(name: str, rows: Sequence[Row], rounds: Sequence[Row]) -> dict[str, Any]:
    good = [row for row in rows if row["server"] == name and row["error"] is None]
    own = [row for row in rounds if row["server"] == name]
    figures: dict[str, Any] = {key: median(row[key] for row in own) for key in _RATES}
    for key, _ in _TIMES:
        values = [value for row in good for value in _values(row[key])]
        figures[key] = {
            label: round(percentile(values, share), 3) if values else None for label, share in _QUANTILES
        }
    return figures


def _values(cell: Any) -> list[float]:
    if cell is None:
        return []
    return cell if isinstance(cell, list) else [cell]


def _ratios(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, float | None]:
    pairs = {
        "output_tokens_per_s": (one["output_tokens_per_s"], other["output_tokens_per_s"]),
        "ttft_p50": (one["ttft_ms"]["p50"], other["ttft_ms"]["p50"]),
        "tpot_p50": (one["tpot_ms"]["p50"], other["tpot_ms"]["p50"]),
        "e2e_p50": (one["e2e_ms"]["p50"], other["e2e_ms"]["p50"]),
    }
    return {key: round(a / b, 3) if a is not None and b else None for key, (a, b) in pairs.items()}


def write_rows(path: str, load: Load, rows: Sequence[Row], rounds: Sequence[Row]) -> None:
    """Append one JSON object a round and one a request, each with where it comes from."""
    head = {**origin("serve"), "load": _load(load)}
    append_rows(path, [{**head, "row": "round", **row} for row in rounds])
    append_rows(path, [{**head, "row": "request", **row} for row in rows])


def show(summary: Mapping[str, Any]) -> None:
    """Print the tables."""
    from rich.table import Table

    console = make_console()
    table = Table("ms", "server", "p50", "p90", "p99", "max")
    for key, label in _TIMES:
        for name, figures in summary["figures"].items():
            cells = [figures[key][quantile] for quantile, _ in _QUANTILES]
            table.add_row(label, name, *("-" if cell is None else f"{cell:.1f}" for cell in cells))
    console.print(table)
    rates = Table("server", "output tokens/s", "input tokens/s", "requests/s", "prompt tokens from cache")
    for name, figures in summary["figures"].items():
        rates.add_row(
            name,
            f"{figures['output_tokens_per_s']:.1f}",
            f"{figures['input_tokens_per_s']:.1f}",
            f"{figures['requests_per_s']:.2f}",
            f"{figures['hit_rate']:.1%}",
        )
    console.print(rates)
    for name, ratios in summary["ratios"].items():
        told = ", ".join(f"{key} {value:.2f}x" for key, value in ratios.items() if value is not None)
        console.print(f"{name} to {summary['ratios_to']}: {told}")
    for error in summary["errors"]:
        console.print(f"error: {error}", style="red")


def plot(path: Path, rows: Sequence[Row]) -> None:
    """Draw, for each server, the share of requests whose first token and whole answer came within a time."""
    from transom.bench.drawing import draw_distributions, new_drawing

    servers = list(dict.fromkeys(row["server"] for row in rows))
    drawing = new_drawing(path, panels=2)
    for number, (key, label) in enumerate((("ttft_ms", "first token"), ("e2e_ms", "whole answer"))):
        curves = {
            name: sorted(row[key] for row in rows if row["server"] == name and row[key] is not None)
            for name in servers
        }
        title = f"share of requests with the {label} within so many ms, in %"
        draw_distributions(drawing, number, title, curves)
    drawing.save(path)
