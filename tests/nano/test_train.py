"""Training continues from a shipped checkpoint, and from what a stage has saved."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from transom.encoder.models.loader import load_audio
from transom.nano import train
from transom.nano.data.datasets import Recording
from transom.nano.data.sounds import SpokenDigits
from transom.nano.export import CHECKPOINT
from transom.nano.stages import audio as audio_stage
from transom.nano.stages.loop import Loop, LoopConfig, save_start, settle_head, starts_from_weights


def test_an_unpacked_checkpoint_exports_to_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, again = tmp_path / "runs", tmp_path / "again"
    for arguments in (["unpack"], ["export", "--checkpoint", str(again)]):
        monkeypatch.setattr("sys.argv", ["train", *arguments, "--runs", str(runs)])
        train.main()
    compared = 0
    for path in CHECKPOINT.rglob("*.safetensors"):
        shipped, exported = load_file(path), load_file(again / path.relative_to(CHECKPOINT))
        assert shipped.keys() == exported.keys()
        for name, tensor in shipped.items():
            assert exported[name].dtype == tensor.dtype
            assert torch.equal(exported[name], tensor), name
            compared += 1
    assert compared > 100
    for name in ("tokenizer.json", "config.json"):
        assert json.loads((again / name).read_text()) == json.loads((CHECKPOINT / name).read_text())


def filled(value: float) -> nn.Linear:
    module = nn.Linear(2, 2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)
    return module


def a_loop(folder: Path, steps: int, value: float) -> tuple[Loop, dict[str, nn.Module]]:
    modules: dict[str, nn.Module] = {"tower": filled(value), "heads": filled(value)}
    return Loop("test", folder, modules, LoopConfig(steps, 0.1, save_every=1)), modules


def first_weight(module: nn.Module) -> float:
    return float(next(module.parameters()).detach()[0, 0])


def test_a_stage_starts_from_given_weights_and_continues_from_its_own(tmp_path: Path) -> None:
    seen: list[tuple[float, float]] = []

    def run(steps: int, value: float) -> None:
        loop, modules = a_loop(tmp_path, steps, value)

        def step(_: int, rng: np.random.Generator) -> tuple[Tensor, dict[str, float]]:
            seen.append((first_weight(modules["tower"]), first_weight(modules["heads"])))
            return sum((p.square().sum() for m in modules.values() for p in m.parameters()), Tensor([0])), {}

        loop.run(step)

    save_start(tmp_path, {"tower": filled(5.0)})
    run(1, 1.0)
    assert seen == [(5.0, 1.0)]  # heads are not in the file: they stay as they were made
    run(2, 1.0)
    tower, heads = seen[1]
    assert 4.9 < tower < 5.0
    assert 0.9 < heads < 1.0
    save_start(tmp_path, {"tower": filled(7.0)})
    run(1, 3.0)
    assert seen[2] == (7.0, 3.0)


def test_a_new_head_settles_on_weights_that_stay_as_they_were_given(tmp_path: Path) -> None:
    body, head = filled(1.0), filled(1.0)
    save_start(tmp_path, {"body": filled(5.0)})
    assert starts_from_weights(tmp_path)

    def step(_: int, rng: np.random.Generator) -> tuple[Tensor, dict[str, float]]:
        assert not any(parameter.requires_grad for parameter in body.parameters())
        return head(body(torch.ones(1, 2))).square().sum(), {}

    settle_head(tmp_path, {"body": body}, {"head": head}, step, seed=1)
    assert first_weight(body) == 5.0
    assert first_weight(head) < 0.99
    assert all(parameter.requires_grad for parameter in body.parameters())
    assert starts_from_weights(tmp_path)


def test_fitted_codebooks_move_from_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audio_stage, "CODEBOOK_SOUNDS", 100)
    wave = np.sin(np.arange(3000) / 5).astype(np.float32)
    spoken = SpokenDigits([Recording(digit, "sine", 5, wave) for digit in range(10)])
    encoder = load_audio(CHECKPOINT, torch.float32, "cpu").tokenizer
    book = encoder.quantizer.codebook(0)
    book[3] = 1000.0
    before = book.clone()
    audio_stage.fit_codebooks(encoder, spoken, seed=1)
    nearest = torch.cdist(book, before).argmin(1)
    assert torch.equal(book[3], before[3])  # no sound is near it
    assert not torch.equal(book, before)
    assert float((nearest == torch.arange(len(book))).float().mean()) > 0.8
    book.zero_()
    audio_stage.fit_codebooks(encoder, spoken, seed=1)
    assert bool(book.any())
