"""Reading config.json: the published values, both spellings, and what must be refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from transom.errors import ConfigError
from transom.kernels.weights import grid_shape
from transom.llm.model.config import MiMoV2Config
from transom.llm.model.mimo_v2 import MiMoV2ForCausalLM
from transom.llm.model.tensors import language_model_slots

HubConfig = Callable[..., dict[str, Any]]
REMOVED = object()
FULL_LAYERS = [0, 5, 11, 17, 23, 29, 35, 41, 47]


def v2_5(hub_config: HubConfig) -> MiMoV2Config:
    return MiMoV2Config.from_dict(
        hub_config(
            vocab_size=152576,
            hidden_size=4096,
            intermediate_size=16384,
            num_hidden_layers=48,
            hybrid_layer_pattern=[int(i not in FULL_LAYERS) for i in range(48)],
            moe_layer_freq=[0] + [1] * 47,
            moe_intermediate_size=2048,
            num_attention_heads=64,
            num_key_value_heads=4,
            head_dim=192,
            v_head_dim=128,
            swa_num_attention_heads=64,
            swa_num_key_value_heads=8,
            swa_head_dim=192,
            swa_v_head_dim=128,
            sliding_window=128,
            n_routed_experts=256,
            num_experts_per_tok=8,
            quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
            eos_token_id=[151645, 151643],
            pad_token_id=None,
            processor_config={"image_token_id": 151655},
            audio_token_id=151669,
        )
    )


def test_published_v2_5(hub_config: HubConfig) -> None:
    config = v2_5(hub_config)
    assert config.num_layers == 48
    assert [i for i, full in enumerate(s.full for s in config.layers) if full] == FULL_LAYERS
    full, sliding = config.layers[0], config.layers[1]
    assert (full.heads, full.kv_heads, full.head_dim, full.v_head_dim, full.rotary_dim) == (
        64,
        4,
        192,
        128,
        64,
    )
    assert (sliding.heads, sliding.kv_heads, sliding.rotary_dim) == (64, 8, 64)
    assert (full.window, full.has_sink, full.rope_theta, full.moe, full.intermediate) == (
        None, False, 1e7, False, 16384,
    )  # fmt: skip
    assert (sliding.window, sliding.has_sink, sliding.rope_theta, sliding.moe, sliding.intermediate) == (
        129, True, 1e4, True, 2048,
    )  # fmt: skip
    assert full.scale == pytest.approx(192**-0.5)
    assert config.mtp_specs == (config.mtp_spec,) * 3
    assert config.mtp_spec is not None
    assert (config.mtp_spec.moe, config.mtp_spec.intermediate) == (False, 16384)
    assert (config.mtp_spec.window, config.mtp_spec.kv_heads, config.mtp_spec.has_sink) == (129, 8, True)
    assert (config.qkv_shards, config.weight_block) == (4, (128, 128))
    assert (config.eos_token_ids, config.pad_token_id) == ((151645, 151643), None)
    assert config.special_token_ids == {"image": 151655, "audio": 151669}
    assert config.routed_scaling_factor == 1.0


def test_published_v2_5_tensors(hub_config: HubConfig) -> None:
    """Names, shapes and fp8 scale shapes of the real manifest, without its bytes."""
    with torch.device("meta"):
        model = MiMoV2ForCausalLM(v2_5(hub_config))
    slots = language_model_slots(model, lambda _: True)
    shapes = {name: list(slot.target.shape) for name, slot in slots.items()}
    experts = 47 * 256 * 3
    assert len(shapes) == 3 + 48 * 4 + 39 + 3 + 47 * 2 + experts + 3 * (6 + 3 + 3)
    layer, mtp = "model.layers.{}.", "model.mtp.layers.2."
    assert {
        layer.format(0) + "self_attn.qkv_proj.weight": [13568, 4096],
        layer.format(1) + "self_attn.qkv_proj.weight": [14848, 4096],
        layer.format(1) + "self_attn.o_proj.weight": [4096, 64 * 128],
        layer.format(1) + "self_attn.attention_sink_bias": [64],
        layer.format(0) + "mlp.up_proj.weight": [16384, 4096],
        layer.format(1) + "mlp.gate.weight": [256, 4096],
        layer.format(1) + "mlp.gate.e_score_correction_bias": [256],
        layer.format(47) + "mlp.experts.255.down_proj.weight": [4096, 2048],
        mtp + "eh_proj.weight": [4096, 8192],
        mtp + "self_attn.qkv_proj.weight": [14848, 4096],
        mtp + "mlp.gate_proj.weight": [16384, 4096],
        "lm_head.weight": [152576, 4096],
    }.items() <= shapes.items()
    for i, scales in ((0, (108, 32)), (1, (116, 32))):
        slot = slots[layer.format(i) + "self_attn.qkv_proj.weight"]
        assert grid_shape(slot.grids[0], slot.target.shape, (128, 128)) == scales


def test_window_keys_and_mtp_size_can_be_set(hub_config: HubConfig) -> None:
    config = MiMoV2Config.from_dict(hub_config(window_keys=6, mtp_intermediate_size=10))
    assert config.layers[1].window == 6
    assert config.mtp_specs[0].intermediate == 10


def test_both_spellings_agree(hub_config: HubConfig) -> None:
    hub = hub_config(num_nextn_predict_layers=0, num_attention_heads=8, swa_num_key_value_heads=4)
    other = {key: value for key, value in hub.items() if not key.startswith("swa_")}
    for key in ("hybrid_layer_pattern", "moe_layer_freq", "rope_theta", "partial_rotary_factor"):
        del other[key]
    del other["layernorm_epsilon"]
    other |= {
        "model_type": "mimo_v2_flash",
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "rope_parameters": {
            "full_attention": {"rope_theta": 1e7, "partial_rotary_factor": 0.334},
            "sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 0.334},
        },
        "rms_norm_eps": 1e-5,
    }
    assert MiMoV2Config.from_dict(other) == MiMoV2Config.from_dict(hub)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model_type", "llama", "model_type = 'llama'.*mimo_v2"),
        ("vocab_size", REMOVED, "vocab_size is missing"),
        ("vocab_size", "96", "vocab_size = '96' must be a whole number"),
        ("vocab_size", True, "vocab_size = True"),
        ("hidden_size", 0, "hidden_size = 0 must be a whole number >= 1"),
        ("hybrid_layer_pattern", [0, 1], r"hybrid_layer_pattern must list one value per layer \(4\)"),
        ("hybrid_layer_pattern", REMOVED, "layer_types must list"),
        ("hybrid_layer_pattern", [0, 1, 2, 0], r"hybrid_layer_pattern holds 2; allowed: \[0, 1\]"),
        ("moe_layer_freq", "0111", "moe_layer_freq holds '0'"),
        ("num_experts_per_tok", 9, r"num_experts_per_tok = 9 must be in 1\.\.n_routed_experts = 8"),
        ("scoring_func", "softmax", "scoring_func = 'softmax' is not supported; allowed: 'sigmoid'"),
        ("topk_method", "greedy", "topk_method"),
        ("n_group", 4, "n_group = 4"),
        ("n_shared_experts", 1, "n_shared_experts = 1"),
        ("attention_bias", True, "attention_bias = True"),
        ("hidden_act", "gelu", "hidden_act"),
        ("layernorm_epsilon", -1e-5, "layernorm_epsilon = -1e-05 must be a number > 0"),
        ("rope_theta", float("nan"), "rope_theta = nan"),
        ("partial_rotary_factor", REMOVED, "partial_rotary_factor is missing"),
        ("partial_rotary_factor", 0.3, "rotates 7 of 24 dims"),
        ("partial_rotary_factor", 1.5, "rotates 36 of 24 dims"),
        ("rope_scaling", {"type": "yarn", "factor": 4}, "rope_scaling type = 'yarn'"),
        ("rope_parameters", {"full_attention": {"rope_type": "yarn"}}, "rope_type = 'yarn'"),
        ("num_key_value_heads", 3, "8 attention heads cannot share 3 KV heads"),
        ("sliding_window", None, "sliding_window is missing"),
        ("quantization_config", {"weight_block_size": [128]}, "weight_block_size"),
    ],
)
def test_refused(hub_config: HubConfig, key: str, value: Any, message: str) -> None:
    raw = hub_config(**{key: value})
    if value is REMOVED:
        del raw[key]
    with pytest.raises(ConfigError, match=message):
        MiMoV2Config.from_dict(raw)


@pytest.mark.parametrize(("text", "message"), [("{", "not valid JSON"), ("[]", "not list")])
def test_files_that_hold_no_config(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        MiMoV2Config.from_folder(tmp_path)


def test_from_folder(tmp_path: Path, hub_config: HubConfig) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hub_config()))
    assert MiMoV2Config.from_folder(tmp_path) == MiMoV2Config.from_dict(hub_config())
