from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from transom.encoder.models.audio import AudioEncoder
from transom.encoder.models.config import AudioConfig, VisionConfig
from transom.encoder.models.export import save_audio, save_audio_tokenizer, save_vision
from transom.encoder.models.loader import load_audio, load_vision
from transom.encoder.models.tensor_names import audio_tensors, tokenizer_tensors, vision_tensors
from transom.encoder.models.vision import VisionTower
from transom.errors import CheckpointError

VISION = {
    "depth": 3,
    "hidden_size": 16,
    "intermediate_size": 24,
    "out_hidden_size": 12,
    "num_heads": 2,
    "num_key_value_heads": 1,
    "qk_channels": 8,
    "kv_channels": 8,
    "patch_size": 4,
    "fullatt_block_indexes": [0],
    "vit_window_attn_types": [-1, 0, 1],
    "visual_token_window_size": 2,
}
AUDIO = {
    "out_hidden_size": 12,
    "audio_channels": 2,
    "audio_segment_size": 32,
    "input_local_dim": 8,
    "input_local_layers": 1,
    "input_local_attn_heads": 2,
    "input_local_head_dim": 4,
    "input_local_intermediate_size": 12,
    "speech_vocab_size": "9",
}
TOKENIZER = {
    "d_model": 8,
    "encoder_layers": 3,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 12,
    "n_mels": 128,
    "num_quantizers": 2,
    "codebook_size": [8, 4],
}


@pytest.fixture
def models():
    torch.manual_seed(0)
    tower = VisionTower(VisionConfig.from_dict(VISION))
    encoder = AudioEncoder(AudioConfig.from_dicts(AUDIO, TOKENIZER))
    with torch.no_grad():
        for parameter in [*tower.parameters(), *encoder.parameters(), *encoder.buffers()]:
            parameter.normal_()
    return tower, encoder


@pytest.fixture
def folder(tmp_path, models):
    tower, encoder = models
    config = {"hidden_size": 12, "vision_config": VISION, "audio_config": AUDIO}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "audio_tokenizer").mkdir()
    (tmp_path / "audio_tokenizer" / "config.json").write_text(json.dumps(TOKENIZER))
    language = {"model.norm.weight": torch.ones(12), "lm_head.weight": torch.ones(3, 12)}
    main = language | save_vision(tower, torch.float32) | save_audio(encoder, torch.float32)
    save_file(main, tmp_path / "model.safetensors")
    spare = {
        "decoder.conv1.weight": torch.ones(2),
        "encoder.quantizer.vq.layers.0._codebook.inited": torch.ones(1),
        "encoder.quantizer.vq.layers.0._codebook.cluster_size": torch.ones(8),
        "encoder.quantizer.vq.layers.0._codebook.embed_avg": torch.ones(8, 8),
    }
    tokenizer = save_audio_tokenizer(encoder, torch.float32)
    save_file(tokenizer | spare, tmp_path / "audio_tokenizer" / "model.safetensors")
    return tmp_path


def change_file(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_names_and_shapes_are_the_hub_s(folder):
    main = {name: tuple(t.shape) for name, t in load_file(folder / "model.safetensors").items()}
    assert main["visual.patch_embed.proj.weight"] == (16, 3, 2, 4, 4)
    assert main["visual.blocks.2.attn.qkv.weight"] == (32, 16)
    assert main["visual.blocks.1.attn.sinks"] == (2,)
    assert "visual.blocks.0.attn.sinks" not in main
    assert main["visual.merger.mlp.2.weight"] == (12, 64)
    assert "visual.merger.ln_q.bias" not in main
    assert main["speech_embeddings.1.weight"] == (9, 8)
    assert main["audio_encoder.input_local_transformer.layers.0.self_attn.q_proj.bias"] == (8,)
    assert main["audio_encoder.input_local_transformer.norm.weight"] == (8,)
    assert main["audio_encoder.projection.mlp.0.weight"] == (128, 32)
    tokenizer = load_file(folder / "audio_tokenizer" / "model.safetensors")
    shapes = {name: tuple(t.shape) for name, t in tokenizer.items()}
    assert shapes["encoder.quantizer.vq.layers.1._codebook.embed"] == (4, 8)
    assert shapes["encoder.down_sample_layer.0.weight"] == (8, 8, 2)
    assert "encoder.layers.0.self_attn.k_proj.bias" not in shapes
    assert {"encoder.conv2.bias", "encoder.layers.2.fc1.bias", "encoder.down_sample_norm.weight"} <= set(
        shapes
    )


def test_loaded_models_compute_what_the_saved_ones_did(folder, models):
    tower, encoder = models
    pixels, mel = torch.randn(16, 96), torch.randn(40, 128)
    loaded_tower = load_vision(folder, torch.float32, "cpu")
    loaded_encoder = load_audio(folder, torch.float32, "cpu")
    with torch.no_grad():
        assert torch.equal(loaded_tower(pixels, [(1, 4, 4)]), tower(pixels, [(1, 4, 4)]))
        assert torch.equal(loaded_encoder([mel])[0], encoder([mel])[0])
    assert not any(p.requires_grad for p in [*loaded_tower.parameters(), *loaded_encoder.parameters()])


def test_a_sharded_checkpoint_loads_alike(folder, models):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for shard in range(3):
        part = {name: t for i, (name, t) in enumerate(sorted(tensors.items())) if i % 3 == shard}
        file = f"model-{shard}.safetensors"
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for name, value in load_vision(folder, torch.float32, "cpu").state_dict().items():
        assert torch.equal(value, models[0].state_dict()[name])
    for name, value in load_audio(folder, torch.float32, "cpu").state_dict().items():
        assert torch.equal(value, models[1].state_dict()[name])


def test_half_precision_keeps_the_codebooks_in_fp32(folder):
    encoder = load_audio(folder, torch.bfloat16, "cpu")
    assert encoder.tokenizer.quantizer.codebook(0).dtype == torch.float32
    assert {p.dtype for p in encoder.parameters()} == {torch.bfloat16}
    (embedding,) = encoder([torch.randn(40, 128)])
    assert embedding.dtype == torch.bfloat16
    tower = load_vision(folder, torch.bfloat16, "cpu")
    assert tower(torch.randn(16, 96), [(1, 4, 4)]).dtype == torch.bfloat16


def test_all_faults_of_the_vision_tensors_are_in_one_error(folder):
    def damage(tensors):
        del tensors["visual.merger.ln_q.weight"]
        tensors["visual.blocks.0.attn.sinks"] = torch.zeros(2)
        tensors["visual.blocks.1.norm1.weight"] = torch.zeros(17)

    change_file(folder / "model.safetensors", damage)
    with pytest.raises(CheckpointError) as caught:
        load_vision(folder, torch.float32, "cpu")
    lines = caught.value.message.splitlines()[1:]
    assert [line.split()[:2] for line in lines] == [
        ["missing:", "visual.merger.ln_q.weight"],
        ["mis-shaped:", "visual.blocks.1.norm1.weight"],
        ["unexpected:", "visual.blocks.0.attn.sinks"],
    ]


def test_faults_of_both_audio_files_are_in_one_error(folder):
    def damage_main(tensors):
        tensors["speech_embeddings.2.weight"] = torch.zeros(9, 8)
        del tensors["audio_encoder.projection.mlp.2.weight"]

    def damage_tokenizer(tensors):
        tensors["encoder.quantizer.vq.layers.1._codebook.embed"] = torch.zeros(5, 8)

    change_file(folder / "model.safetensors", damage_main)
    change_file(folder / "audio_tokenizer" / "model.safetensors", damage_tokenizer)
    with pytest.raises(CheckpointError) as caught:
        load_audio(folder, torch.float32, "cpu")
    for part in ("unexpected: speech_embeddings.2", "missing: audio_encoder.projection", "found [5, 8]"):
        assert part in caught.value.message


def test_a_missing_tokenizer_folder_is_named(folder):
    (folder / "audio_tokenizer" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="audio_tokenizer"):
        load_audio(folder, torch.float32, "cpu")


def test_embeddings_must_fit_the_language_model(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 16}))
    for load in (load_vision, load_audio):
        with pytest.raises(CheckpointError, match="out_hidden_size is 12, but hidden_size is 16"):
            load(folder, torch.float32, "cpu")


def test_saved_tensors_are_copies_and_convert_all_but_the_codebooks(models):
    tower, encoder = models
    saved = save_vision(tower, torch.float32)
    with torch.no_grad():
        tower.merger.ln_q.weight.zero_()
    assert float(saved["visual.merger.ln_q.weight"].abs().sum()) > 0
    tokenizer = save_audio_tokenizer(encoder, torch.bfloat16)
    kinds = {(name.endswith("_codebook.embed"), tensor.dtype) for name, tensor in tokenizer.items()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}


def test_progress_reaches_the_total(folder):
    seen = []
    load_vision(folder, torch.float32, "cpu", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0


def test_the_released_sizes_give_the_released_shapes():
    kinds = [-1, *([0] * 4 + [1] * 4 + [-1]) * 3]
    vision = {"fullatt_block_indexes": [0, 9, 18, 27], "vit_window_attn_types": kinds}
    with torch.device("meta"):
        tower = VisionTower(VisionConfig.from_dict(vision))
        encoder = AudioEncoder(AudioConfig.from_dicts({"speech_vocab_size": "1280"}, {}))
    shapes = {name: tuple(t.shape) for name, t in vision_tensors(tower).items()}
    shapes |= {name: tuple(t.shape) for name, t in audio_tensors(encoder).items()}
    expected = {
        "visual.patch_embed.proj.weight": (1280, 3, 2, 16, 16),
        "visual.blocks.27.attn.qkv.weight": (3072, 1280),
        "visual.blocks.27.attn.qkv.bias": (3072,),
        "visual.blocks.0.attn.proj.weight": (1280, 2048),
        "visual.blocks.26.attn.sinks": (32,),
        "visual.blocks.0.mlp.gate_proj.weight": (4608, 1280),
        "visual.blocks.0.mlp.down_proj.bias": (1280,),
        "visual.merger.ln_q.weight": (1280,),
        "visual.merger.mlp.0.weight": (5120, 5120),
        "visual.merger.mlp.2.weight": (4096, 5120),
        "speech_embeddings.19.weight": (1280, 1024),
        "audio_encoder.input_local_transformer.layers.5.self_attn.q_proj.weight": (1024, 1024),
        "audio_encoder.projection.mlp.0.weight": (16384, 4096),
        "audio_encoder.projection.mlp.2.weight": (4096, 16384),
    }
    assert {name: shapes[name] for name in expected} == expected
    assert sum(name.endswith("sinks") for name in shapes) == 24
    codebooks = [t.shape[0] for name, t in tokenizer_tensors(encoder).items() if name.endswith(".embed")]
    assert codebooks == [1024, 1024, 256] + [128] * 17
