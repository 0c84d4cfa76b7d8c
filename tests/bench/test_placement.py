"""The placement benchmark: what it counts adds up, and the ring beats polling where media repeat."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from transom.bench import placement
from transom.cli import main


def arguments(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    placement.add_arguments(parser)
    return parser.parse_args(["--requests", "3000", "--items", "600", "--cached", "80", *flags])


@pytest.mark.parametrize("scenario", placement.SCENARIOS)
def test_the_ring_meets_more_caches_than_polling(scenario: str) -> None:
    args = arguments()
    rows = {policy: placement.simulate(args, scenario, policy) for policy in placement.POLICIES}
    for row in rows.values():
        assert row["encoded"] == pytest.approx((1 - row["hit_rate"]) * 3000, abs=0.5)
        assert row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"]
    bounded = rows["ring, bound 1.25"]
    assert bounded["hit_rate"] > 1.15 * rows["polling"]["hit_rate"]
    assert bounded["hit_rate"] <= rows["ring"]["hit_rate"] + 0.01
    if scenario == "one hot item":
        assert bounded["busiest_to_mean"] <= rows["ring"]["busiest_to_mean"]


def test_with_room_for_everything_each_item_is_encoded_once_by_its_owner() -> None:
    args = arguments("--items", "50", "--cached", "50", "--utilisation", "0.01")
    assert placement.simulate(args, "repeated media", "ring")["encoded"] == 50
    assert placement.simulate(args, "repeated media", "ring, bound 1.25")["encoded"] == 50
    assert placement.simulate(args, "repeated media", "polling")["encoded"] > 150


def test_rows_are_written_and_bad_settings_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "rows.jsonl"
    flags = ["--requests", "200", "--items", "20", "--cached", "5", "--out", str(output)]
    assert main(["bench", "placement", *flags, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(rows) == len(summary["rows"]) == len(placement.SCENARIOS) * len(placement.POLICIES)
    assert all(row["benchmark"] == "placement" and row["simulated"] for row in rows)
    moved = summary["moved_keys"]
    assert moved["ring, one joins"] < 0.3 < moved["modulo, one joins"]
    assert main(["bench", "placement", "--encoders", "1"]) == 2
    assert "--encoders 1" in capsys.readouterr().err
