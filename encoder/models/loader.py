"""Build the vision tower and the audio path of a checkpoint folder and fill them from safetensors.

Encoder process. Knows nothing of the language model's tensors, which share the files.
"""

from __future__ import annotations

from pathlib import Path

import torch

from transom.encoder.models.audio import AudioEncoder
from transom.encoder.models.config import AudioConfig, VisionConfig
from transom.encoder.models.hub_json import read_json
from transom.encoder.models.tensor_names import (
    AUDIO_PREFIXES,
    TOKENIZER_PREFIX,
    TOKENIZER_SPARE,
    VISION_PREFIX,
    audio_tensors,
    tokenizer_tensors,
    vision_tensors,
)
from transom.encoder.models.vision import VisionTower
from transom.errors import CheckpointError
from transom.kernels.weights import Progress, Slot, TensorFiles, checkpoint_files, fill_slots


def load_vision(
    folder: str | Path, dtype: torch.dtype, device: torch.device | str, progress: Progress | None = None
) -> VisionTower:
    """Return the vision tower of a checkpoint, ready for inference.

    Raises one CheckpointError that lists all missing, mis-shaped and unexpected `visual.*` tensors.
    """
    cfg = VisionConfig.from_folder(folder)
    _check_width(folder, "vision_config", cfg.out_hidden_size)
    with torch.device("meta"):
        tower = VisionTower(cfg)
    tower = tower.to(dtype).to_empty(device=device).requires_grad_(False).eval()
    slots = {name: Slot(tensor) for name, tensor in vision_tensors(tower).items()}
    with TensorFiles.in_folder(folder) as files:
        fill_slots(files, slots, ignore=lambda name: not name.startswith(VISION_PREFIX), progress=progress)
    return tower


def load_audio(
    folder: str | Path, dtype: torch.dtype, device: torch.device | str, progress: Progress | None = None
) -> AudioEncoder:
    """Return the audio path of a checkpoint, tokenizer included, ready for inference.

    The codebooks stay fp32 whatever `dtype` is. Raises one CheckpointError that lists all missing,
    mis-shaped and unexpected tensors of the main files and of audio_tokenizer/.
    """
    cfg = AudioConfig.from_folder(folder)
    _check_width(folder, "audio_config", cfg.out_hidden_size)
    with torch.device("meta"):
        encoder = AudioEncoder(cfg).to(dtype)
        encoder.tokenizer.quantizer.float()
    encoder = encoder.to_empty(device=device).requires_grad_(False).eval()
    tensors = audio_tensors(encoder) | tokenizer_tensors(encoder)
    paths = checkpoint_files(Path(folder)) + checkpoint_files(Path(folder) / "audio_tokenizer")
    with TensorFiles(paths) as files:
        fill_slots(
            files,
            {name: Slot(tensor) for name, tensor in tensors.items()},
            ignore=_is_not_audio,
            progress=progress,
        )
    return encoder


def _is_not_audio(name: str) -> bool:
    return not name.startswith((*AUDIO_PREFIXES, TOKENIZER_PREFIX)) or bool(TOKENIZER_SPARE.match(name))


def _check_width(folder: str | Path, section: str, width: int) -> None:
    """Embeddings must be as wide as the language model that reads them."""
    hidden = read_json(Path(folder) / "config.json").get("hidden_size", width)
    if hidden != width:
        raise CheckpointError(f"{section}.out_hidden_size is {width}, but hidden_size is {hidden!r}")
