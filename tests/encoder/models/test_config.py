from __future__ import annotations

import json

import pytest

from transom.encoder.models.config import AudioConfig, ProcessorConfig, VisionConfig
from transom.errors import CheckpointError

HUB_VISION = {
    "depth": 28,
    "fullatt_block_indexes": [0, 9, 18, 27],
    "hidden_act": "silu",
    "hidden_size": 1280,
    "in_chans": 3,
    "intermediate_size": 4608,
    "num_heads": 32,
    "num_key_value_heads": 8,
    "num_query_groups": 4,
    "out_hidden_size": 4096,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "use_sink": True,
    "visual_token_window_size": 64,
    "vit_window_attn_types": [-1, *([0] * 4 + [1] * 4 + [-1]) * 3],
    "window_size": 128,
}
HUB_AUDIO = {"speech_vocab_size": "1280", "speech_zeroemb_idx": "1024", "input_local_dim": 1024}
HUB_TOKENIZER = {"codebook_size": [1024, 1024, 256] + [128] * 17, "num_quantizers": 20, "fmax": None}


def write(folder, config, tokenizer=None):
    (folder / "config.json").write_text(json.dumps(config))
    if tokenizer is not None:
        (folder / "audio_tokenizer").mkdir()
        (folder / "audio_tokenizer" / "config.json").write_text(json.dumps(tokenizer))
    return folder


def test_hub_spelling_is_read(tmp_path):
    config = {
        "vision_config": HUB_VISION,
        "audio_config": HUB_AUDIO,
        "processor_config": {"image_min_pixels": 8192, "fps": 1, "num_frames": None, "max_frames": None},
    }
    write(tmp_path, config, HUB_TOKENIZER)
    vision = VisionConfig.from_folder(tmp_path)
    assert (vision.qk_channels, vision.patch_dim, vision.merge_unit) == (64, 1536, 4)
    assert [vision.is_full(index) for index in (0, 1, 9, 27)] == [True, False, True, True]
    audio = AudioConfig.from_folder(tmp_path)
    assert [audio.speech_vocab(channel) for channel in (0, 19)] == [1280, 1280]
    assert (audio.projection_dim, audio.frames_per_token, audio.tokens(6001)) == (16384, 16, 376)
    assert audio.tokenizer.window(0) == (128, 0)
    assert audio.tokenizer.window(1) == (None, 0)
    processor = ProcessorConfig.from_folder(tmp_path)
    assert (processor.fps, processor.max_frames, processor.factor) == (1.0, 3600, 32)


def test_a_tower_without_window_types_is_full_everywhere():
    cfg = VisionConfig.from_dict({"depth": 2})
    assert cfg.vit_window_attn_types == (-1, -1)


def test_per_channel_numbers_may_be_dashed():
    cfg = AudioConfig.from_dicts(
        {"speech_vocab_size": "1025-1025-257", "audio_channels": 3},
        {"codebook_size": [1024, 1024, 256], "num_quantizers": 3},
    )
    assert [cfg.speech_vocab(channel) for channel in range(3)] == [1025, 1025, 257]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": "three"}, r"vision_config\.depth is 'three'"),
        ({"hidden_size": 0}, r"hidden_size is 0: must be above 0"),
        ({"num_heads": 3}, "num_key_value_heads is 8"),
        ({"use_sink": "yes"}, "use_sink is 'yes'"),
        ({"sink_mode": "all"}, "sink_mode is 'all'"),
        ({"vit_window_attn_types": [0, 2]}, "vit_window_attn_types"),
        ({"fullatt_block_indexes": [2]}, "fullatt_block_indexes"),
        ({"qk_channels": 30}, "qk_channels is 30"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"patch_size": 16.5}, r"patch_size is 16\.5"),
    ],
)
def test_bad_vision_values_are_named(changes, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        VisionConfig.from_dict({"depth": 2, "vit_window_attn_types": [0, 1], **changes})
    assert caught.value.param in changes or "num_heads" in changes


@pytest.mark.parametrize(
    ("audio", "tokenizer", "message"),
    [
        ({"audio_segment_size": 6001}, {}, "audio_segment_size is 6001"),
        ({"projection_layers": 3}, {}, "projection_layers"),
        ({"speech_vocab_size": "1000"}, {}, "speech_vocab_size"),
        ({"audio_channels": 21}, {}, "audio_channels is 21"),
        ({"partial_rotary_factor": 0.0}, {}, "partial_rotary_factor"),
        ({}, {"kernel_size": 5}, "kernel_size is 5"),
        ({}, {"encoder_skip_layer_id": 25}, "encoder_skip_layer_id is 25"),
        ({}, {"ln_type": "RMSNorm"}, "ln_type"),
        ({}, {"encoder_attn_window_size": [1]}, "encoder_attn_window_size"),
        ({}, {"codebook_size": []}, "codebook_size"),
        ({}, {"window_size": 1000}, "window_size is 1000"),
        ({}, {"fmax": -1.0}, "fmin"),
    ],
)
def test_bad_audio_values_are_named(audio, tokenizer, message):
    with pytest.raises(CheckpointError, match=message):
        AudioConfig.from_dicts(audio, tokenizer)


@pytest.mark.parametrize(
    "changes",
    [
        {"image_max_pixels": 100},
        {"video_min_pixels": 1 << 30},
        {"min_frames": 4000},
        {"interpolation": "nearest"},
        {"image_std": [1, 1]},
        {"fps": 0},
    ],
)
def test_bad_processor_values_are_refused(changes):
    with pytest.raises(CheckpointError):
        ProcessorConfig.from_dict(changes)


def test_the_processor_must_cut_the_patches_that_the_tower_reads(tmp_path):
    write(tmp_path, {"vision_config": {"depth": 1}, "processor_config": {"patch_size": 14}})
    with pytest.raises(CheckpointError, match=r"\(14, 2, 2\): must be \(16, 2, 2\)"):
        ProcessorConfig.from_folder(tmp_path)


def test_files_that_can_not_be_read_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        VisionConfig.from_folder(tmp_path)
    write(tmp_path, {})
    with pytest.raises(CheckpointError, match="no vision_config"):
        VisionConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        ProcessorConfig.from_folder(tmp_path)
