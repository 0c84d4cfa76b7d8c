"""Checkpoints in every layout load to the same model; damaged ones fail with one complete error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from transom.errors import CheckpointError, ConfigError
from transom.llm.model.export import save_language_model
from transom.llm.model.loader import load_language_model
from transom.llm.model.mimo_v2 import MiMoV2ForCausalLM

PRO = {
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "swa_num_attention_heads": 16,
    "swa_num_key_value_heads": 8,
    "attention_value_scale": 0.612,
    "hybrid_layer_pattern": [0, 1, 1, 1, 0],
    "moe_layer_freq": [0, 1, 1, 1, 1],
    "num_hidden_layers": 5,
}
BLOCK = [10, 7]
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": BLOCK}}

Tensors = dict[str, torch.Tensor]


def load(folder: Path, **options: Any) -> MiMoV2ForCausalLM:
    return load_language_model(folder, **{"dtype": torch.float32, "device": "cpu", **options})


def read(folder: Path) -> Tensors:
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


def assert_same(model: MiMoV2ForCausalLM, other: MiMoV2ForCausalLM) -> None:
    ours, theirs = model.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture
def save(
    tmp_path: Path, random_model: Callable[..., MiMoV2ForCausalLM], hub_config: Callable[..., dict[str, Any]]
) -> Callable[..., tuple[MiMoV2ForCausalLM, Path]]:
    def build(fused_qkv: bool = True, **changes: Any) -> tuple[MiMoV2ForCausalLM, Path]:
        model = random_model(**changes)
        save_language_model(model, tmp_path, fused_qkv=fused_qkv)
        (tmp_path / "config.json").write_text(json.dumps(hub_config(**changes)))
        return model, tmp_path

    return build


Save = Callable[..., tuple[MiMoV2ForCausalLM, Path]]


@pytest.mark.parametrize("fused_qkv", [False, True])
@pytest.mark.parametrize("changes", [{}, PRO, {"tie_word_embeddings": True}], ids=["v2.5", "pro", "tied"])
def test_round_trip(save: Save, fused_qkv: bool, changes: dict[str, Any]) -> None:
    model, folder = save(fused_qkv, **changes)
    loaded = load(folder)
    assert_same(model, loaded)
    assert not loaded.training
    assert (loaded.lm_head.weight is loaded.embed_tokens.weight) == bool(changes.get("tie_word_embeddings"))


def test_layout_on_disk(save: Save) -> None:
    """Names and row order as published: shards of [q | k | v], one per KV head of the full layers."""
    model, folder = save()
    names = read(folder)
    assert names["model.layers.1.self_attn.qkv_proj.weight"].shape == (8 * 24 + 4 * 24 + 4 * 16, 48)
    with safe_open(folder / "model_mtp.safetensors", "pt") as file:
        assert all(name.startswith("model.mtp.layers.") for name in file.keys())  # noqa: SIM118
    assert {path.stat().st_mode & 0o777 for path in folder.glob("*.safetensors")} == {0o644}
    q, k, v = torch.split(model.layers[1].self_attn.qkv_proj.weight, [8 * 24, 4 * 24, 4 * 16])
    stored = names["model.layers.1.self_attn.qkv_proj.weight"]
    shard = [q[: 4 * 24], k[: 2 * 24], v[: 2 * 16]]
    torch.testing.assert_close(stored[: len(stored) // 2], torch.cat(shard))
    assert "model.layers.2.mlp.experts.7.down_proj.weight" in names
    assert names["model.mtp.layers.2.eh_proj.weight"].shape == (48, 96)
    assert "model.layers.0.self_attn.attention_sink_bias" not in names


def test_split_names(save: Save) -> None:
    _, folder = save(fused_qkv=False)
    names = read(folder)
    assert names["model.layers.0.self_attn.k_proj.weight"].shape == (2 * 24, 48)
    assert not [name for name in names if "qkv" in name]


def test_sharded(save: Save) -> None:
    model, folder = save()
    tensors = read(folder)
    names = sorted(tensors)
    weight_map = {name: f"model-{i % 3 + 1:05d}-of-00003.safetensors" for i, name in enumerate(names)}
    for path in folder.glob("*.safetensors"):
        path.unlink()
    for file in set(weight_map.values()):
        save_file({n: tensors[n] for n in names if weight_map[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_same(model, load(folder))

    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks files.*model-00002-of-00003"):
        load(folder)


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": {"a": "../../model.safetensors"}}'])
def test_a_bad_index_is_named(save: Save, index: str) -> None:
    _, folder = save()
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        load(folder)


def quantise(weight: torch.Tensor, segments: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (e4m3, scales, what these stand for); the grid starts anew at each segment of rows."""
    stored, scales, meaning = [], [], []
    for part in weight.split(segments):
        for rows in part.split(BLOCK[0]):
            blocks = rows.split(BLOCK[1], dim=1)
            scale = torch.stack([block.abs().max() / 448 for block in blocks])
            values = [(block / s).to(torch.float8_e4m3fn) for block, s in zip(blocks, scale)]
            stored.append(torch.cat(values, dim=1))
            scales.append(scale)
            meaning.append(torch.cat([value.float() * s for value, s in zip(values, scale)], dim=1))
    return torch.cat(stored), torch.stack(scales), torch.cat(meaning)


def quantised(tensors: Tensors, segments: Callable[[str, int], list[int]]) -> tuple[Tensors, Tensors]:
    """Return (the fp8 checkpoint, the fp32 checkpoint with the same meaning)."""
    stored, meaning = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if "_proj.weight" in name and "o_proj" not in name and "eh_proj" not in name:
            fp8, scale, meaning[name] = quantise(weight, segments(name, weight.shape[0]))
            stored |= {name: fp8, f"{name}_scale_inv": scale}
    return stored, meaning


@pytest.mark.parametrize("fused_qkv", [False, True])
@pytest.mark.parametrize("changes", [{}, PRO], ids=["v2.5", "pro"])
def test_fp8(save: Save, fused_qkv: bool, changes: dict[str, Any]) -> None:
    _, folder = save(fused_qkv, **changes, **FP8)
    shards = changes.get("num_key_value_heads", 2)

    def segments(name: str, rows: int) -> list[int]:
        if "qkv_proj" in name:
            return [rows // shards] * shards
        return [24] * (rows // 24) if "k_proj" in name and "layers.0." in name else [rows]

    stored, meaning = quantised(read(folder), segments)
    (folder / "model_mtp.safetensors").unlink()
    save_file(meaning, folder / "model.safetensors")
    expected = load(folder)
    save_file(stored, folder / "model.safetensors")
    assert_same(expected, load(folder))


def test_fp8_scales_are_checked(save: Save) -> None:
    _, folder = save(fused_qkv=False, **FP8)
    stored, _ = quantised(read(folder), lambda _, rows: [rows])
    lost = "model.layers.0.self_attn.q_proj.weight_scale_inv"
    wrong = "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"
    del stored[lost]
    stored[wrong] = stored[wrong][:, :-1].contiguous()
    (folder / "model_mtp.safetensors").unlink()
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert f"missing: {lost} [20, 7]" in caught.value.message
    assert f"mis-shaped: {wrong} expected [3, 7], found [3, 6]" in caught.value.message


def test_all_problems_are_listed_at_once(save: Save) -> None:
    _, folder = save()
    tensors = read(folder)
    (folder / "model_mtp.safetensors").unlink()
    del tensors["model.norm.weight"], tensors["model.layers.2.mlp.experts.4.up_proj.weight"]
    tensors["lm_head.weight"] = torch.zeros(95, 48)
    tensors["model.layers.3.input_layernorm.weight"] = torch.zeros(48, dtype=torch.int32)
    tensors["model.layers.9.input_layernorm.weight"] = torch.zeros(48)
    tensors["model.layers.0.mlp.up_proj.weight_scale_inv"] = torch.zeros(1, 1)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert caught.value.message.splitlines()[1:] == [
        "  missing: model.norm.weight [48]",
        "  missing: model.layers.2.mlp.experts.4.up_proj.weight [24, 48]",
        "  mis-shaped: lm_head.weight expected [96, 48], found [95, 48]",
        "  wrong dtype: model.layers.3.input_layernorm.weight [48] is I32",
        "  unexpected: model.layers.0.mlp.up_proj.weight_scale_inv [1, 1]",
        "  unexpected: model.layers.9.input_layernorm.weight [48]",
    ]


def test_many_problems_of_a_kind_are_one_line(save: Save) -> None:
    _, folder = save()
    tensors = {
        name: t for name, t in read(folder).items() if "up_proj" not in name or ".experts." not in name
    }
    (folder / "model_mtp.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert caught.value.message.splitlines()[1:] == [
        "  missing: model.layers.{1-3}.mlp.experts.{0-7}.up_proj.weight [24, 48] (24 of them)"
    ]


def test_vision_and_audio_tensors_are_left_alone(save: Save) -> None:
    model, folder = save()
    extra = {
        "visual.merger.ln_q.weight": torch.ones(3),
        "speech_embeddings.0.weight": torch.ones(4, 2),
        "audio_encoder.projection.mlp.0.weight": torch.ones(2, 2),
    }
    save_language_model(model, folder, extra=extra)
    assert extra.keys() <= read(folder).keys()
    assert_same(model, load(folder))


def test_mtp_modules(save: Save) -> None:
    model, folder = save(num_nextn_predict_layers=3)
    assert len(load(folder, mtp=False).mtp) == 0
    config = json.loads((folder / "config.json").read_text())
    del config["num_nextn_predict_layers"]
    (folder / "config.json").write_text(json.dumps(config))
    assert_same(model, load(folder))  # counted from the tensors
    (folder / "model_mtp.safetensors").unlink()
    assert len(load(folder).mtp) == 0
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    with pytest.raises(CheckpointError, match=r"missing: model\.mtp\.layers\.0\.eh_proj\.weight"):
        load(folder)


def test_progress_counts_bytes_to_the_end(save: Save) -> None:
    model, folder = save()
    seen: list[tuple[int, int]] = []
    load(folder, progress=lambda done, total: seen.append((done, total)))
    size = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    assert seen[-1] == (size, size)
    assert {total for _, total in seen} == {size}
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_saving_in_half_precision_keeps_routers(save: Save) -> None:
    model, folder = save()
    save_language_model(model, folder, dtype=torch.bfloat16)
    tensors = read(folder)
    assert tensors["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert tensors["model.layers.1.mlp.gate.weight"].dtype == torch.float32
    assert tensors["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert load(folder).lm_head.weight.dtype == torch.float32


def test_a_tensor_in_two_files_is_refused(save: Save) -> None:
    model, folder = save()
    save_file({"model.norm.weight": model.norm.weight.detach()}, folder / "extra_mtp.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is in .* and in"):
        load(folder)


def test_qkv_that_does_not_divide_into_shards(save: Save) -> None:
    _, folder = save()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "qkv_shards": 5}))
    with pytest.raises(CheckpointError, match="5 shards"):
        load(folder)


@pytest.mark.parametrize("content", [None, b"", b"\x10\0\0\0\0\0\0\0not a header...."])
def test_an_absent_or_damaged_file_is_named(save: Save, content: bytes | None) -> None:
    _, folder = save()
    (folder / "model.safetensors").unlink()
    if content is not None:
        (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(folder)


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        load(tmp_path)
