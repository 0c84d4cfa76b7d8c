"""`transom bench serve`: what is sent, what is summed up, and a run against a static-batch server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.patience import PATIENCE_S
from transom.bench import serve, serve_load, serve_report
from transom.bench.processes import Child
from transom.cli import main
from transom.errors import ConfigError

transformers = pytest.importorskip("transformers", reason="the baseline is transformers' generate")


def load(**changes: Any) -> serve_load.Load:
    fields: dict[str, Any] = {
        "requests": 6, "concurrency": 3, "rate": 0.0, "prompt_lens": (20, 30), "shared_len": 8,
        "output_len": 4, "mix": {"text": 1.0}, "token_ids": (10, 60), "rounds": 2, "seed": 5, "model": "",
    }  # fmt: skip
    return serve_load.Load(**fields | changes)


def test_a_round_is_the_same_for_all_and_shares_no_prefix_with_other_rounds() -> None:
    first, again, other = (serve_load.draw_round(load(), number, "m") for number in (1, 1, 2))
    assert first == again
    prompts = [body["prompt"] for _, body in first]
    assert [len(prompt) for prompt in prompts] == [20, 30] * 3
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 1
    assert len({tuple(prompt[8:12]) for prompt in prompts}) == 6
    assert all(10 <= id < 60 for prompt in prompts for id in prompt)
    assert other[0][1]["prompt"][:8] != prompts[0][:8]


def test_media_are_asked_about_by_chat() -> None:
    kinds = serve_load.draw_round(load(mix={"text": 1.0, "image": 1.0}, requests=12), 1, "m")
    assert {kind for kind, _ in kinds} == {"text", "image"}
    for kind, body in kinds:
        assert ("prompt" in body) == (kind == "text") != ("messages" in body)


def test_open_loop_moments_have_the_rate() -> None:
    import random

    moments = serve.arrivals(4000, 8.0, random.Random(1))
    assert moments[0] == 0.0
    assert moments == sorted(moments)
    assert moments[-1] / 3999 == pytest.approx(1 / 8, rel=0.05)


def row(server: str, ttft_ms: float, **changes: Any) -> dict[str, Any]:
    return {
        "server": server, "error": None, "ttft_ms": ttft_ms, "tpot_ms": 2.0, "itl_ms": [1.0, 3.0],
        "e2e_ms": ttft_ms + 8, **changes,
    }  # fmt: skip


def round_row(server: str, output: float, failed: int = 0) -> dict[str, Any]:
    return {
        "server": server, "failed": failed, "output_tokens_per_s": output, "input_tokens_per_s": 5.0,
        "requests_per_s": 1.0, "hit_rate": 0.5,
    }  # fmt: skip


def test_rates_are_medians_over_rounds_and_ratios_are_to_the_last_server() -> None:
    rounds = [round_row("a", output) for output in (10, 90, 40)] + [round_row("b", 20, failed=1)]
    rows = [row("a", value) for value in (5, 7, 100)] + [row("b", 14), row("b", 1, error="broke")]
    summary = serve_report.summarise({"a": "", "b": ""}, load(), rows, rounds)
    assert summary["figures"]["a"]["output_tokens_per_s"] == 40
    assert summary["figures"]["a"]["ttft_ms"] == {"p50": 7, "p90": 100, "p99": 100, "max": 100}
    assert summary["figures"]["b"]["itl_ms"]["max"] == 3.0
    assert summary["ratios"] == {
        "a": {"output_tokens_per_s": 2.0, "ttft_p50": 0.5, "tpot_p50": 1.0, "e2e_p50": round(15 / 22, 3)}
    }
    assert summary["failed"] == 1
    assert summary["errors"] == ["b: broke"]


@pytest.mark.parametrize("name", ["load.svg", "load.png"])
def test_the_drawing_shows_every_server(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    serve_report.plot(path, [row("ours", 5), row("ours", 9), row("theirs", 20)])
    if path.suffix == ".svg":
        text = path.read_text()
        assert text.count("<polyline") > 4
        assert ">ours<" in text
        assert ">theirs<" in text
    else:
        from PIL import Image

        with Image.open(path) as image:
            assert image.size == (900, 500)
            assert len(image.getcolors(maxcolors=100_000) or []) > 4


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--shared-tokens", "512"], "--shared-tokens 512"),
        (["--prompt-tokens", "some"], "--prompt-tokens"),
        (["--server", "nameless"], "--server 'nameless'"),
        (["--token-ids", "9:9"], "--token-ids 9:9"),
        (["--plot", "load.pdf"], "--plot load.pdf"),
        (["--requests", "0"], "--requests 0"),
    ],
)
def test_bad_flags_are_named(flags: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *flags]) == 2
    assert named in capsys.readouterr().err


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("static")
    letters = [*"<", *(chr(n) for n in range(ord("a"), ord("z") + 1)), "<pad>"]
    tokenizer = Tokenizer(models.WordLevel({letter: id for id, letter in enumerate(letters)}, unk_token="<"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Fuse()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(
        folder
    )
    torch.manual_seed(1)
    config = transformers.Gemma3TextConfig(
        vocab_size=len(letters), hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, sliding_window=8,
    )  # fmt: skip
    transformers.Gemma3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[str]:
    argv = [sys.executable, "-m", "transom.bench.static_batch", str(checkpoint), "--batch", "4"]
    with open(os.devnull, "wb") as log, Child(argv, log=log, limit_s=120) as child:
        yield child.line["url"]


def test_a_run_against_the_static_baseline(server: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    done = subprocess.run(
        [
            sys.executable, "-m", "transom", "bench", "serve", "--server", f"one={server}", "--server",
            f"two={server}", "--requests", "5", "--concurrency", "3", "--prompt-tokens", "12,7",
            "--shared-tokens", "3", "--output-tokens", "6", "--token-ids", "1:20", "--rounds", "2",
            "--out", str(rows), "--json",
        ],
        capture_output=True, text=True, check=False, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["failed"] == 0
    assert set(summary["figures"]) == {"one", "two"}
    assert summary["ratios"]["one"]["output_tokens_per_s"] > 0
    written = [json.loads(line) for line in rows.read_text().splitlines()]
    requests = [row for row in written if row["row"] == "request"]
    assert len(requests) == 2 * 2 * 5
    assert {row["completion_tokens"] for row in requests} == {6}
    assert {row["prompt_tokens"] for row in requests} == {12, 7}
    assert all(len(row["itl_ms"]) == 5 for row in requests)


def test_a_server_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--server", "gone=http://127.0.0.1:9", "--requests", "1"]) != 0
    assert "127.0.0.1:9" in capsys.readouterr().err


def test_load_is_refused_where_it_makes_no_sense() -> None:
    with pytest.raises(ConfigError, match="KIND one of"):
        serve.parse_mix("smell=1")
