"""The benchmarks of kernels and engine run, check what they time, and say what they timed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
import torch

from transom.bench import kernels
from transom.cli import main
from transom.kernels.native_ops import NativeOps


def test_kernels_reproduce_the_references(
    native_library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    command = ["bench", "kernels", "--device", "cpu", "--shapes", "odd", "--repeats", "3", "--json"]
    assert main([*command, "--out", str(out)]) == 0
    report = orjson.loads(capsys.readouterr().out)
    assert report["kernels"] == "compiled"
    written = [orjson.loads(line) for line in out.read_text().splitlines()]
    assert [row["case"] for row in written] == [row["case"] for row in report["rows"]]
    for row in report["rows"]:
        assert row["error"] < 1e-5
        assert min(row["fused_us"], row["torch_us"], row["dense_us"]) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_of_a_real_width_are_chosen_alike_in_every_dtype(
    native_ops: NativeOps, dtype: torch.dtype
) -> None:
    bench = kernels.Bench(native_ops, kernels.SHAPES["tiny"], torch.device("cpu"), dtype)
    case = bench._moe(16)
    exact = case.exact()
    allowed = 1e-5 if dtype == torch.float32 else 0.03
    assert ((case.plain().double() - exact).abs().max() / exact.abs().max()) < allowed
    if dtype == torch.float32:
        assert ((case.fused().double() - exact).abs().max() / exact.abs().max()) < allowed


def test_a_wrong_kernel_is_not_timed(
    native_library: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = NativeOps.moe

    def wrong(*args: Any, **kwargs: Any) -> torch.Tensor:
        return right(*args, **kwargs) * 1.01

    monkeypatch.setattr(NativeOps, "moe", wrong)
    assert main(["bench", "kernels", "--device", "cpu", "--shapes", "odd", "--repeats", "3"]) == 1
    assert "experts, 3 rows of 3 in 5: off by" in capsys.readouterr().err


@pytest.mark.parametrize("choice", ["auto", "torch"])
def test_engine_shows_where_the_time_goes(
    native_library: Path, capsys: pytest.CaptureFixture[str], choice: str
) -> None:
    sizes = [
        "--requests",
        "2",
        "--prompt-len",
        "40",
        "--shared-len",
        "20",
        "--output-len",
        "4",
        "--repeats",
        "1",
    ]
    assert (
        main(["bench", "engine", *sizes, "--kernels", choice, "--profile", "--json", "--device", "cpu"]) == 0
    )
    report = orjson.loads(capsys.readouterr().out)
    assert report["output_tokens_per_s"] > 0
    assert report["ttft_p50_ms"] > 0
    named = set(report["parts_s"])
    assert {"plan", "pages", "index work", "sampler", "experts", "after the forward"} <= named
    assert ("rope and KV write" in named) == (choice == "auto")


def test_every_set_of_shapes_is_consistent() -> None:
    for shapes in kernels.SHAPES.values():
        assert shapes.heads % shapes.kv_heads == shapes.heads % shapes.swa_kv_heads == 0
        assert shapes.rotary_dim <= shapes.head_dim
        assert shapes.top_k <= shapes.experts
