"""Benchmarks of encoder, radix tree and shared cache in small: every table is there and its rows add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from transom.cli import main


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["bench", *argv, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def written(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_radix_has_a_row_a_case(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    flags = ("--lengths", "10000", "--page-sizes", "1", "16", "--repeats", "5", "--out", str(out))
    found = run_json(capsys, "radix", *flags)
    cases = [(row["tokens"], row["page_size"], row["nodes"]) for row in found["rows"]]
    assert [(row["tokens"], row["page_size"], row["nodes"]) for row in written(out)] == cases
    assert len(set(cases)) == 4
    assert all(0 < row["match_p50_us"] <= row["match_p90_us"] for row in found["rows"])


def test_shm_hits_move_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    flags = ("--arena-mb", "32", "--rounds", "1", "--seconds", "0.05", "--processes", "1", "--out", str(out))
    found = run_json(capsys, "shm", *flags)
    assert len(written(out)) == len(found["rows"]) == 18
    assert {row["what"] for row in found["rows"] if row["gb_per_s"] is None} == {"dict hit", "shm hit"}
    assert found["hits_per_s_together"] > 0


@pytest.mark.process
@pytest.mark.slow
def test_the_encoders_tables(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    small = ("--rounds", "1", "--items", "40", "--warmup", "1", "--concurrency", "2", "--video-s", "30")
    skipped = ("--skip", "write-up", "--skip", "tower")
    found = run_json(capsys, "encoder", "--compare", *small, *skipped, "--out", str(out))
    tables = {table["table"]: table["rows"] for table in found["tables"]}
    assert [row["candidate"] for row in tables["cache"]] == ["cache on", "cache off"]
    assert tables["cache"][0]["hits"] > 0 == tables["cache"][1]["hits"]
    assert [row["what"] for row in tables["video"]] == [
        "one step after the other",
        "streamed, 1 decoder",
        "streamed, 2 decoders",
    ]
    assert all(row["clip_s"] == 30 and 0 < row["first_s"] <= row["last_s"] for row in tables["video"])
    hits = {
        row["policy"]: row["hit_rate"] for row in tables["placement"] if row["scenario"] == "repeated media"
    }
    assert hits["ring, bound 1.25"] > hits["polling"]
    # The same pictures in the same order, on real encoders that hold a part of them each.
    fleet = tables["fleet"]
    assert fleet["ring, bound 1.25"]["hit_rate"] > fleet["polling"]["hit_rate"] > 0
    rows = written(out)
    assert {row["benchmark"] for row in rows} == {"encoder", "video", "placement"}
    measured = [row for row in rows if row["benchmark"] == "placement" and not row["simulated"]]
    assert [row["policy"] for row in measured] == ["polling", "ring, bound 1.25"]
    assert all(max(row["cached"]) < row["items"] and row["items_per_s"] > 0 for row in measured)
