"""Decoded pixels and samples to what the towers read: patches and log-mel segments.

Rank process, preparing threads. Runs on the towers' device. Knows nothing of files or requests.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from transom.encoder.models.config import MelConfig, ProcessorConfig
from transom.encoder.models.mel import log_mel
from transom.kernels.patchify import patchify, resize_frames

logger = logging.getLogger(__name__)

Grid = tuple[int, int, int]


class FramePreprocessor:
    """Resizes, normalises and cuts frames as a checkpoint's processor says."""

    def __init__(self, cfg: ProcessorConfig, device: torch.device) -> None:
        self._cfg = cfg
        self._device = device
        self._layout: dict[str, Any] = {
            "patch_size": cfg.patch_size,
            "temporal_patch_size": cfg.temporal_patch_size,
            "merge_size": cfg.merge_size,
            "mean": cfg.image_mean,
            "std": cfg.image_std,
        }
        self._fused = self._load_fused()

    def _load_fused(self) -> Any:
        """Return the kernel that does all in one pass, or None where it can't run."""
        cfg = self._cfg
        if self._device.type != "cuda" or cfg.interpolation != "bilinear" or cfg.antialias:
            return None
        try:
            from transom.kernels.fused_patchify import fused_patchify

            frame = torch.zeros((1, cfg.factor, cfg.factor, 3), dtype=torch.uint8, device=self._device)
            fused_patchify(frame, cfg.factor, cfg.factor, **self._layout)
        except Exception as error:  # Triton raises what its compiler and driver raise
            logger.warning("pictures are resized without Triton: %s", error)
            return None
        return fused_patchify

    def __call__(self, frames: NDArray[Any], target: tuple[int, int]) -> tuple[Tensor, Grid]:
        """uint8 (frames, height, width, 3) of one temporal patch -> patches and grid."""
        cfg = self._cfg
        pixels = torch.from_numpy(frames).to(self._device, non_blocking=True)
        if self._fused is not None:
            patches, grid = self._fused(pixels, *target, **self._layout)
            return patches, grid
        resized = resize_frames(
            pixels, target[0], target[1], interpolation=cfg.interpolation, antialias=cfg.antialias
        )
        return patchify(resized, **self._layout)


class MelPreprocessor:
    """Makes the log-mel frames of a window of sound."""

    def __init__(self, cfg: MelConfig, device: torch.device) -> None:
        self._cfg = cfg
        self._device = device

    def __call__(self, samples: NDArray[Any], skip: int, frames: int) -> Tensor:
        """float32 (samples,) -> its mel frames [skip, skip + frames): (frames, n_mels)."""
        window = torch.from_numpy(samples).to(self._device)
        return log_mel(window, self._cfg)[skip : skip + frames]
