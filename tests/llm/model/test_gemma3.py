"""Gemma 3 text against transformers' eager `gemma3_text`: logits, window crossing, spellings, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from transom.errors import CheckpointError, ConfigError
from transom.kernels.weights import save_tensors
from transom.llm.model.attention import PackedAttention
from transom.llm.model.causal_lm import CausalLM
from transom.llm.model.gemma3_config import Gemma3Config
from transom.llm.model.loader import load_language_model
from transom.llm.model.registry import ARCHITECTURES, read_config

WINDOW = 8
LENGTH = 5 * WINDOW
TOLERANCE = 1e-4

transformers = pytest.importorskip("transformers", reason="transformers is the oracle of these tests")


def tiny_config(**changes: Any) -> Any:
    return transformers.Gemma3TextConfig(
        **{
            "vocab_size": 256,
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_hidden_layers": 7,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": WINDOW,
            "max_position_embeddings": 512,
            "attn_implementation": "eager",
            **changes,
        }
    )


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def oracle(request: pytest.FixtureRequest, randomise: Callable[[torch.nn.Module], None]) -> Any:
    model = transformers.Gemma3ForCausalLM(tiny_config(tie_word_embeddings=request.param)).eval()
    randomise(model)
    return model


@pytest.fixture(scope="module")
def folder(oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma")
    oracle.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalLM:
    return load_language_model(folder, dtype=torch.float32, device="cpu")


@torch.no_grad()
def logits_of(model: CausalLM, prompts: list[torch.Tensor]) -> list[torch.Tensor]:
    lens = [len(prompt) for prompt in prompts]
    positions = torch.cat([torch.arange(length) for length in lens])
    hidden = model(model.embed(torch.cat(prompts)), positions, PackedAttention(lens))
    return list(model.logits(hidden).split(lens))


def test_logits_equal_transformers_beyond_the_window(oracle: Any, model: CausalLM) -> None:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 256, (length,), generator=generator) for length in (LENGTH, 3, WINDOW + 1)]
    assert [spec.full for spec in model.config.layers] == [False] * 5 + [True, False]
    for prompt, ours in zip(prompts, logits_of(model, prompts), strict=True):
        with torch.no_grad():
            expected = oracle(prompt[None]).logits[0]
        assert expected.std() > 0.1
        torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=0)


def test_the_window_matters(model: CausalLM, folder: Path) -> None:
    """A wider window changes the logits, so the parity above does depend on it."""
    prompt = torch.arange(LENGTH)
    wide = json.loads((folder / "config.json").read_text()) | {"sliding_window": WINDOW + 1}
    other = load_language_model(folder, dtype=torch.float32, device="cpu")
    for layer, spec in zip(other.layers, Gemma3Config.from_dict(wide).layers, strict=True):
        layer.self_attn.spec = spec
    (ours,), (theirs,) = logits_of(model, [prompt]), logits_of(other, [prompt])
    torch.testing.assert_close(ours[:WINDOW], theirs[:WINDOW], atol=TOLERANCE, rtol=0)
    assert (ours[WINDOW:] - theirs[WINDOW:]).abs().max() > 10 * TOLERANCE


def test_older_spelling_gives_the_same_layers() -> None:
    new = json.loads(tiny_config(sliding_window=WINDOW).to_json_string(use_diff=False))
    old = {key: value for key, value in new.items() if key not in ("layer_types", "rope_parameters")}
    old |= {"sliding_window_pattern": 6, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0}
    assert Gemma3Config.from_dict(old).layers == Gemma3Config.from_dict(new).layers


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"hidden_activation": "silu"}, "hidden_activation = 'silu'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}, "'linear'"),
        ({"layer_types": ["full_attention"]}, "layer_types must list one value per layer (7)"),
        ({"layer_types": ["chunked"] * 7}, "layer_types holds 'chunked'"),
        ({"num_key_value_heads": 3}, "cannot share 3 KV heads"),
        ({"vocab_size": None}, "vocab_size is missing"),
    ],
)
def test_what_would_change_the_arithmetic_is_refused(change: dict[str, Any], named: str) -> None:
    raw = json.loads(tiny_config().to_json_string(use_diff=False)) | change
    with pytest.raises(ConfigError) as caught:
        Gemma3Config.from_dict(raw)
    assert named in str(caught.value)


def test_an_unknown_architecture_is_named_with_those_that_are_served(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2}')
    with pytest.raises(ConfigError) as caught:
        read_config(tmp_path)
    assert "'llama'" in str(caught.value)
    assert all(repr(name) in str(caught.value) for name in ARCHITECTURES)


def test_missing_and_surplus_tensors_are_listed(folder: Path, oracle: Any, tmp_path: Path) -> None:
    tensors = dict(oracle.state_dict())
    tensors.pop("lm_head.weight")
    del tensors["model.layers.3.self_attn.q_norm.weight"]
    tensors["model.layers.3.surplus.weight"] = torch.zeros(2)
    save_tensors(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointError) as caught:
        load_language_model(tmp_path, dtype=torch.float32, device="cpu")
    assert "model.layers.3.self_attn.q_norm.weight" in str(caught.value)
    assert "model.layers.3.surplus.weight" in str(caught.value)
