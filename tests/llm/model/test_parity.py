"""Logits against transformers' eager `mimo_v2_flash`, through save_pretrained and our loader."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from transom.llm.model.attention import PackedAttention
from transom.llm.model.loader import load_language_model
from transom.llm.model.mimo_v2 import MiMoV2ForCausalLM

WINDOW = 8
LENGTH = 5 * WINDOW
TOLERANCE = 1e-4

transformers = pytest.importorskip("transformers", reason="transformers is the oracle of these tests")


def tiny_config() -> Any:
    full = {"rope_type": "default", "rope_theta": 5_000_000.0, "partial_rotary_factor": 0.334}
    return transformers.MiMoV2FlashConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=24,
        v_head_dim=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        layer_types=["full_attention", *["sliding_attention"] * 2] * 2,
        mlp_layer_types=["dense", *["sparse"] * 5],
        rope_parameters={
            "full_attention": full,
            "sliding_attention": {**full, "rope_theta": 10_000.0},
        },
        rms_norm_eps=1e-5,
    )


@pytest.fixture(scope="module")
def oracle(randomise: Callable[[torch.nn.Module], None]) -> Any:
    model = transformers.MiMoV2FlashForCausalLM(tiny_config()).eval()
    randomise(model)
    return model


@pytest.fixture(scope="module")
def folder(oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    oracle.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    # this version's window counts the query among `sliding_window` keys; the family's default is one more
    config["window_keys"] = WINDOW
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> MiMoV2ForCausalLM:
    model = load_language_model(folder, dtype=torch.float32, device="cpu")
    assert isinstance(model, MiMoV2ForCausalLM)
    return model


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, 256, (LENGTH,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def expected(oracle: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = oracle(ids[None]).logits[0]
    return logits


@torch.no_grad()
def prefill(model: MiMoV2ForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    hidden = model(model.embed(ids), torch.arange(len(ids)), PackedAttention([len(ids)]))
    return model.logits(hidden)


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


def test_config_is_read_from_the_transformers_spelling(model: MiMoV2ForCausalLM) -> None:
    config = model.config
    assert tuple(spec.full for spec in config.layers) == (True, False, False, True, False, False)
    assert [spec.moe for spec in config.layers] == [False, True, True, True, True, True]
    full, sliding = config.layers[0], config.layers[1]
    assert (full.kv_heads, sliding.kv_heads) == (1, 2)
    assert (full.window, sliding.window) == (None, WINDOW)
    assert (full.has_sink, sliding.has_sink) == (False, True)
    assert (full.rope_theta, sliding.rope_theta) == (5e6, 1e4)
    assert full.rotary_dim == 8


def test_prefill(model: MiMoV2ForCausalLM, ids: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.std() > 0.3
    assert difference(prefill(model, ids), expected) < TOLERANCE


@pytest.mark.parametrize("length", [1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 2 * WINDOW + 1])
def test_lengths_around_the_window(
    model: MiMoV2ForCausalLM, oracle: Any, ids: torch.Tensor, length: int
) -> None:
    with torch.no_grad():
        alone = oracle(ids[None, :length]).logits[0]
    assert difference(prefill(model, ids[:length]), alone) < TOLERANCE


@pytest.mark.parametrize("steps", [[1] * LENGTH, [5] + [1] * 35, [7, 7, 7, 7, 7, 5], [20, 1, 1, 18]])
def test_with_a_cache(
    model: MiMoV2ForCausalLM,
    ids: torch.Tensor,
    expected: torch.Tensor,
    steps: list[int],
    cached_attention: Callable[[], Any],
) -> None:
    backend = cached_attention()
    rows = []
    with torch.no_grad():
        for positions in torch.arange(LENGTH).split(steps):
            rows.append(model.logits(model(model.embed(ids[positions]), positions, backend)))
    assert difference(torch.cat(rows), expected) < TOLERANCE


def test_decoding_like_the_oracle_decodes(
    model: MiMoV2ForCausalLM, oracle: Any, ids: torch.Tensor, cached_attention: Callable[[], Any]
) -> None:
    prompt, new = ids[: WINDOW - 2], 3 * WINDOW
    theirs = oracle.generate(
        prompt[None], max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
    )
    backend = cached_attention()
    ours, step, position = prompt.tolist(), prompt, 0
    with torch.no_grad():
        for _ in range(new):
            hidden = model(model.embed(step), position + torch.arange(len(step)), backend)
            position += len(step)
            step = model.logits(hidden[-1:]).argmax(-1)
            ours.append(int(step))
    assert ours == theirs[0].tolist()


def test_packed_requests_do_not_see_each_other(
    model: MiMoV2ForCausalLM, oracle: Any, ids: torch.Tensor
) -> None:
    requests = [ids[:5], ids[3:33], ids[10:11], ids[8:38], ids[2:20]]
    lengths = [len(request) for request in requests]
    with torch.no_grad():
        positions = torch.cat([torch.arange(length) for length in lengths])
        hidden = model(model.embed(torch.cat(requests)), positions, PackedAttention(lengths))
        for request, rows in zip(requests, model.logits(hidden).split(lengths)):
            assert difference(rows, oracle(request[None]).logits[0]) < TOLERANCE


@pytest.mark.parametrize("part", ["sinks", "correction_bias", "value_scale", "window", "rotary", "theta"])
def test_the_comparison_would_notice(
    part: str, folder: Path, tmp_path: Path, ids: torch.Tensor, expected: torch.Tensor
) -> None:
    """Take one part of the architecture away: the logits must move by far more than the tolerance."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config["rope_parameters"]
    if part == "value_scale":
        config["attention_value_scale"] = None
    elif part == "window":
        config["window_keys"] = WINDOW + 1
    elif part == "rotary":
        rope["full_attention"]["partial_rotary_factor"] = 0.25
    elif part == "theta":
        rope["sliding_attention"]["rope_theta"] = 5_000.0
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_language_model(tmp_path, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if (part, name.rsplit(".", 1)[-1]) in {
                ("sinks", "attention_sink_bias"),
                ("correction_bias", "e_score_correction_bias"),
            }:
                tensor.zero_()
    assert difference(prefill(model, ids), expected) > 100 * TOLERANCE


def test_half_precision_keeps_the_router_exact(
    folder: Path, ids: torch.Tensor, expected: torch.Tensor
) -> None:
    model = load_language_model(folder, dtype=torch.bfloat16, device="cpu")
    gate = model.layers[1].mlp.gate
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert gate.weight.dtype == gate.e_score_correction_bias.dtype == torch.float32
    logits = prefill(model, ids)
    assert logits.dtype == torch.float32
    # single tokens may be routed elsewhere after rounding, so compare on the whole
    agreement = torch.nn.functional.cosine_similarity(logits, expected, dim=-1)
    assert agreement.median() > 0.99
