"""Which checkpoint tensor is which parameter of the vision tower and the audio path (hub's names).

Encoder process and training. The returned tensors are the live parameters and buffers.
"""

from __future__ import annotations

import re

from torch import Tensor, nn

from transom.encoder.models.audio import AudioEncoder
from transom.encoder.models.vision import VisionTower

VISION_PREFIX = "visual."
AUDIO_PREFIXES = ("speech_embeddings.", "audio_encoder.")
TOKENIZER_PREFIX = "encoder."
# The tokenizer's file also holds its decoder and what its training kept beside each codebook.
TOKENIZER_SPARE = re.compile(r"decoder\.|.*\._codebook\.(inited|cluster_size|embed_avg)$")


def vision_tensors(tower: VisionTower) -> dict[str, Tensor]:
    """Return the tower's tensors as the main checkpoint files name them."""
    return {VISION_PREFIX + name: tensor for name, tensor in _live(tower).items()}


def audio_tensors(encoder: AudioEncoder) -> dict[str, Tensor]:
    """Return embeddings, group encoder and projection as the main checkpoint files name them."""
    tensors = {}
    for name, tensor in _live(encoder).items():
        if name.startswith("speech_embeddings."):
            tensors[name] = tensor
        elif not name.startswith("tokenizer."):
            tensors[f"audio_encoder.{name}"] = tensor
    return tensors


def tokenizer_tensors(encoder: AudioEncoder) -> dict[str, Tensor]:
    """Return the tokenizer encoder's and quantiser's tensors as audio_tokenizer/ names them."""
    codebook = re.compile(r"quantizer\.codebook_(\d+)$")
    return {
        TOKENIZER_PREFIX + codebook.sub(r"quantizer.vq.layers.\1._codebook.embed", name): tensor
        for name, tensor in _live(encoder.tokenizer).items()
    }


def _live(module: nn.Module) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = dict(module.named_parameters())
    tensors.update(module.named_buffers())
    return tensors
