"""`transom plan` and `transom bench kv-capacity` as a user sees them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from transom.cli import main
from transom.commands.plan import parse_tokens
from transom.errors import ConfigError

PRO = ["plan", "--model", "mimo-v2.5-pro", "--gpu-memory", "141", "--context", "128K", "--concurrency", "64"]


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main([*argv, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert isinstance(value, dict)
    return value


def test_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    plan = run_json(capsys, *PRO)
    assert plan["options"]["weight_dtype"] == "fp8"
    assert plan["options"]["context_len"] == 131072
    assert plan["kv"]["token"] == 358_400
    assert plan["request"]["ratio_theory"] == pytest.approx(6.959, abs=0.0005)
    assert (plan["smallest_single"], plan["smallest_dual"]) == (64, 16)
    assert [size["ep"] for size in plan["sizes"]] == [1, 2, 4, 8, 16, 32, 64, 128]
    weights = plan["sizes"][0]["weights"]
    assert weights.pop("total") == sum(weights.values())


def test_plan_as_text_is_plain_and_narrow(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(PRO) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "smallest EP for 64 x 131072 tokens: single pool 64, dual pools 16"
    row = next(line.split() for line in lines if line.startswith(" 16 "))
    assert row == ["16", "92.998", "33.679", "0", "1,503,232", "64", "10,383,616"]
    assert all(line.isascii() and len(line) <= 110 for line in lines)


def test_flags_reach_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    plan = run_json(
        capsys, "plan", "--model", "mimo-nano", "--gpu-memory", "1", "--context", "4K", "--kv-dtype", "fp32",
        "--weight-dtype", "fp32", "--page-size", "64", "--swa-release-interval", "8",
        "--max-batch-tokens", "256",
        "--max-running-requests", "4", "--memory-fraction", "0.5", "--activation-gb", "0.25", "--tp", "2",
        "--ep", "4,2", "--mtp",
    )  # fmt: skip
    assert plan["options"] == {
        "gpu_memory_bytes": 1_000_000_000, "context_len": 4096, "memory_fraction": 0.5,
        "weight_dtype": "fp32", "kv_dtype": "fp32", "page_size": 64, "release_interval": 8,
        "chunk": 256, "running_requests": 4,
        "activation_bytes": 250_000_000, "concurrency": 1, "tp": 2, "ep": [2, 4], "mtp": True,
    }  # fmt: skip
    for size in plan["sizes"]:
        assert size["kv_bytes"] == 250_000_000 - size["weights"]["total"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "mimo-v9", "--context", "4K"], "--model 'mimo-v9' is neither"),
        (["--model", "mimo-nano", "--context", "4x"], "--context: '4x' is no token count"),
        (["--model", "mimo-nano", "--context", "1M"], "--context: 1048576 is more than the 16384"),
        (["--model", "mimo-nano", "--context", "4K", "--ep", "two"], "--ep: 'two' is no list"),
        (["--model", "mimo-nano", "--context", "4K", "--gpu-memory", "-1"], "--gpu-memory: -1 GB is no size"),
        (["--model", "mimo-nano", "--context", "4K", "--gpu-memory", "nan"], "--gpu-memory: nan GB is no"),
        (["--model", "mimo-nano", "--context", "4K", "--activation-gb", "inf"], "--activation-gb: inf GB is"),
    ],
)
def test_a_wrong_argument_is_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert main(["plan", "--gpu-memory", "1", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"transom plan: {message}")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(("text", "tokens"), [("4096", 4096), ("128k", 131072), (" 1M ", 1048576)])
def test_token_counts(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "-1", "1.5K", "K", "1G"])
def test_no_token_counts(text: str) -> None:
    with pytest.raises(ConfigError, match="no token count"):
        parse_tokens(text)


def test_planning_leaves_torch_unloaded() -> None:
    code = (
        "import sys; from transom.cli import main;"
        " main(['plan', '--model', 'mimo-nano', '--gpu-memory', '1', '--context', '4K']);"
        " sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_bench_counts_what_the_plan_says(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    found = run_json(capsys, "bench", "kv-capacity", "--pool-mb", "80", "--out", str(output))
    rows = found["rows"]
    assert len(rows) == 20
    written = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["ratio"] for row in written] == [row["ratio"] for row in rows]
    assert all(row["benchmark"] == "kv-capacity" and row["transom"] for row in written)
    measured = [row for row in rows if row["held_ratio"] is not None]
    assert [(row["model"], row["context_len"]) for row in measured] == [
        ("mimo-nano", 4096),
        ("mimo-nano", 16384),
    ]
    for row in measured:
        # The pages that decode workers keep for answers weigh something in a short context.
        assert row["held_ratio"] == pytest.approx(
            row["ratio"], rel=0.03 if row["context_len"] < 10_000 else 0.01
        )
        assert row["held_ratio"] >= row["ratio_decoding"]
        assert row["requests_dual"] == row["planned_requests_dual"] >= 4 * row["requests_single"]
        assert row["requests_single"] == row["planned_requests_single"]


def test_bench_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kv-capacity", "--pool-mb", "20"]) == 0
    lines = capsys.readouterr().out.splitlines()
    row = next(line.split() for line in lines if line.split()[:2] == ["mimo-nano", "4096"])
    assert row == ["mimo-nano", "4096", "17.0", "4.0", "4.223", "4.119", "1", "/", "4", "1", "/", "4"]
    assert all(line.isascii() for line in lines)


def test_bench_refuses_nonsense(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kv-capacity", "--page-size", "0"]) == 2
    assert "--page-size 0: must be at least 1" in capsys.readouterr().err
