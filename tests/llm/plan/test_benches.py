"""`transom bench scheduler` and `prefix-cache`: what they count is what their tables are read for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from transom.cli import main


def test_the_prefix_cache_hits_where_a_stock_one_does_not(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "rows.jsonl"
    assert (
        main(["bench", "prefix-cache", "--users", "3", "--memory", "1.0", "--json", "--out", str(out)]) == 0
    )
    rows = {row["kind"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert [json.loads(line)["kind"] for line in out.read_text().splitlines()] == list(rows)

    def share(kind: str, name: str) -> float:
        row = rows[kind]
        return float(row[f"{name}_hit_tokens"] / row["reusable_tokens"])

    assert share("second user of a system prompt", "stock") == 0
    assert share("second user of a system prompt", "ours") == 1
    assert share("next turn of a chat", "ours") == 1 > share("next turn of a chat", "stock")
    assert share("a long prompt, cut", "ours") > 0.8 > share("a long prompt, cut", "stock")


def test_simulated_policies(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A burst of short prompts behind a long one: they pass it, and it is not much later for that."""
    trace = tmp_path / "trace.jsonl"
    entries = [{"timestamp": 0, "input_length": 30_000, "output_length": 1, "hash_ids": list(range(59))}]
    entries += [
        {
            "timestamp": 10 * i,
            "input_length": 600,
            "output_length": 1,
            "hash_ids": [1000 + 2 * i, 1001 + 2 * i],
        }
        for i in range(1, 20)
    ]
    trace.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert main(["bench", "scheduler", "--trace", str(trace), "--batch-tokens", "1024", "--json"]) == 0
    rows = {(row["policy"], row["prompts"]): row for row in json.loads(capsys.readouterr().out)["rows"]}
    short, long = "up to 4k", "above 16k"
    assert rows["fewest-uncached", short]["ttft_p50_s"] < 0.5 * rows["fcfs", short]["ttft_p50_s"]
    assert rows["fewest-uncached", long]["ttft_max_s"] <= 1.6 * rows["fcfs", long]["ttft_max_s"]
    assert rows["fcfs", short]["count"] == 19


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["scheduler", "--trace", "missing.jsonl"], "--trace missing.jsonl"),
        (["scheduler", "--load", "0"], "--load: above 0"),
        (["prefix-cache", "--users", "1"], "--users: at least 2"),
    ],
)
def test_nonsense_is_refused(capsys: pytest.CaptureFixture[str], flags: list[str], text: str) -> None:
    assert main(["bench", *flags]) == 2
    assert text in capsys.readouterr().err
