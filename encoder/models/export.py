"""Tensors of the vision tower and the audio path under the hub's names, to be written to a checkpoint.

Used where checkpoints are made. Writes no files: the main ones are shared with the language model.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from transom.encoder.models.audio import AudioEncoder
from transom.encoder.models.tensor_names import audio_tensors, tokenizer_tensors, vision_tensors
from transom.encoder.models.vision import VisionTower


def save_vision(tower: VisionTower, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return copies of the tower's tensors for the main checkpoint files (`visual.*`)."""
    return _copies(vision_tensors(tower), dtype)


def save_audio(encoder: AudioEncoder, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return copies for the main checkpoint files (`speech_embeddings.*`, `audio_encoder.*`)."""
    return _copies(audio_tensors(encoder), dtype)


def save_audio_tokenizer(encoder: AudioEncoder, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return copies for audio_tokenizer/model.safetensors; the codebooks keep their own dtype."""
    return _copies(tokenizer_tensors(encoder), dtype, keep="._codebook.")


def _copies(tensors: Mapping[str, Tensor], dtype: torch.dtype, keep: str | None = None) -> dict[str, Tensor]:
    return {
        name: tensor.detach().to(
            "cpu", tensor.dtype if keep is not None and keep in name else dtype, copy=True
        )
        for name, tensor in tensors.items()
    }
