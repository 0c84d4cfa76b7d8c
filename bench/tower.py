"""A checkpoint folder with random weights around a vision tower of a given size, for benchmarks.

Text-model tensors are left out: an encoder serves it, a prefill worker does not. The sound path and
the tokenizer are the demo model's, widened to the tower's output.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

# The size of the towers that small vision-language models have; 28 M parameters.
MEDIUM: dict[str, Any] = {
    "depth": 8,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "out_hidden_size": 512,
    "projection_hidden_size": 2048,
    "num_heads": 8,
    "num_key_value_heads": 8,
    "qk_channels": 64,
    "kv_channels": 64,
    "patch_size": 14,
    "fullatt_block_indexes": [3, 7],
    "vit_window_attn_types": [0, 1, 0, -1, 1, 0, 1, -1],
    "visual_token_window_size": 64,
}
# One with which a picture of 224x224 costs an encoder about 50 ms of CPU time.
SMALL: dict[str, Any] = MEDIUM | {
    "depth": 4,
    "hidden_size": 256,
    "intermediate_size": 768,
    "projection_hidden_size": 1024,
    "num_heads": 4,
    "num_key_value_heads": 4,
    "fullatt_block_indexes": [3],
    "vit_window_attn_types": [0, 1, 0, -1],
}
_PIXELS = {"image_min_pixels": 3136, "image_max_pixels": 1003520, "patch_size": 14}
_TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def write_checkpoint(folder: Path, vision: dict[str, Any], *, seed: int = 0) -> Path:
    """Write the folder; `vision` are the changes to the demo model's `vision_config`."""
    import torch
    from safetensors.torch import save_file

    from transom.encoder.models.audio import AudioEncoder
    from transom.encoder.models.config import AudioConfig, VisionConfig
    from transom.encoder.models.export import save_audio, save_audio_tokenizer, save_vision
    from transom.encoder.models.vision import VisionTower
    from transom.hub import NANO_NAME, resolve_model

    demo = Path(resolve_model(NANO_NAME))
    config: dict[str, Any] = json.loads((demo / "config.json").read_text(encoding="utf-8"))
    config["vision_config"] |= vision
    width = config["vision_config"]["out_hidden_size"]
    config["hidden_size"] = config["audio_config"]["out_hidden_size"] = width
    config["processor_config"] |= _PIXELS | {"patch_size": config["vision_config"]["patch_size"]}
    (folder / "audio_tokenizer").mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    for name in (*_TEXT_FILES, "audio_tokenizer/config.json"):
        shutil.copyfile(demo / name, folder / name)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        tower = VisionTower(VisionConfig.from_folder(folder))
        audio = AudioEncoder(AudioConfig.from_folder(folder))
        for buffer in audio.buffers():  # codebooks are empty until they are trained
            buffer.normal_()
    main = save_vision(tower, torch.float32) | save_audio(audio, torch.float32)
    save_file(main, folder / "model.safetensors")
    save_file(save_audio_tokenizer(audio, torch.float32), folder / "audio_tokenizer" / "model.safetensors")
    return folder
