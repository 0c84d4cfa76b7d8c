"""The towers of a checkpoint on one device, and how they embed a batch of prepared pieces.

Rank process. Embeds what it is handed; knows nothing of requests, files or other processes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from transom.encoder.models.config import AudioConfig, ProcessorConfig, VisionConfig
from transom.encoder.models.loader import load_audio, load_vision
from transom.encoder.preprocess import Grid
from transom.errors import ConfigError
from transom.messages import Dtype

logger = logging.getLogger(__name__)

_DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Patches:
    """A picture or a video unit."""

    pixels: Tensor  # (patches, patch_dim)
    grid: Grid


class Towers:
    """The vision tower and the audio path of a checkpoint on one device."""

    def __init__(self, folder: Path, device: torch.device, dtype: Dtype) -> None:
        self.vision_cfg = VisionConfig.from_folder(folder)
        self.audio_cfg = AudioConfig.from_folder(folder)
        self.processor_cfg = ProcessorConfig.from_folder(folder)
        self.device = device
        self.dtype: Dtype = dtype
        self._vision = load_vision(folder, _DTYPES[dtype], device)
        self._audio = load_audio(folder, _DTYPES[dtype], device)

    @torch.inference_mode()
    def vision(self, items: Sequence[Patches]) -> list[Tensor]:
        """Embed pictures and units together: one (rows, hidden) tensor each, on the device."""
        pixels = items[0].pixels if len(items) == 1 else torch.cat([item.pixels for item in items])
        rows: Tensor = self._vision(pixels, [item.grid for item in items])
        unit = self.vision_cfg.merge_unit
        counts = [item.grid[0] * item.grid[1] * item.grid[2] // unit for item in items]
        return list(torch.split(rows, counts))

    @torch.inference_mode()
    def audio(self, mels: Sequence[Tensor]) -> list[Tensor]:
        """Embed mel segments together: one (rows, hidden) tensor each, on the device."""
        return list(self._audio(list(mels)))

    def embed(self, payloads: Sequence[Patches | Tensor]) -> list[Tensor | Exception]:
        """Embed pieces of one kind; when the batch fails, one by one, so that only a bad piece fails.

        Returns when the device has finished.
        """
        try:
            return list(self._embed(payloads))
        except Exception as error:
            if len(payloads) == 1:
                logger.exception("forward of one piece failed")
                return [error]
            logger.warning("forward of %d pieces failed (%s); trying one by one", len(payloads), error)
            return [self.embed([payload])[0] for payload in payloads]

    def _embed(self, payloads: Sequence[Patches | Tensor]) -> list[Tensor]:
        pictures = [payload for payload in payloads if isinstance(payload, Patches)]
        rows = (
            self.vision(pictures) if pictures else self.audio([p for p in payloads if isinstance(p, Tensor)])
        )
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return rows

    def to_host(self, rows: Tensor) -> NDArray[Any]:
        """Return rows on the host in the embedding dtype; bfloat16 as its raw 16 bits."""
        host = rows.to("cpu", _DTYPES[self.dtype]).contiguous()
        return (host.view(torch.uint16) if self.dtype == "bfloat16" else host).numpy()


def choose_device(device: str, dtype: str, index: int = 0) -> tuple[torch.device, Dtype]:
    """Return the device and the dtype that the settings mean for rank `index` on this machine.

    Ranks take the CUDA devices in turn unless the setting names one.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError:  # torch's own words list all that it was ever built for
        raise ConfigError(f"device {device!r} is none: expected auto, cpu, cuda or cuda:N") from None
    try:
        if device == "cuda":
            chosen = torch.device("cuda", index % max(1, torch.cuda.device_count()))
        torch.empty(1, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {device!r} can't be used: {str(error).splitlines()[0]}") from None
    if dtype == "auto":
        return chosen, "bfloat16" if chosen.type == "cuda" else "float32"
    return chosen, "bfloat16" if dtype == "bfloat16" else "float32"
