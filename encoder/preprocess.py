"""Decoded pixels and samples to what the towers read: patches and log-mel segments.

Encoder process, preprocessing threads. Runs on the towers' device. Knows nothing of files or requests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from transom.encoder.models.config import AudioConfig, ProcessorConfig
from transom.encoder.models.mel import log_mel
from transom.kernels.patchify import patchify, resize_frames

Grid = tuple[int, int, int]


class FramePreprocessor:
    """Resizes, normalises and cuts frames as a checkpoint's processor says."""

    def __init__(self, cfg: ProcessorConfig, device: torch.device) -> None:
        self._cfg = cfg
        self._device = device

    def __call__(self, frames: NDArray[Any], target: tuple[int, int]) -> tuple[Tensor, Grid]:
        """uint8 (frames, height, width, 3) of one temporal patch -> patches and grid."""
        cfg = self._cfg
        pixels = torch.from_numpy(frames).to(self._device, non_blocking=True)
        resized = resize_frames(
            pixels, target[0], target[1], interpolation=cfg.interpolation, antialias=cfg.antialias
        )
        return patchify(
            resized,
            patch_size=cfg.patch_size,
            temporal_patch_size=cfg.temporal_patch_size,
            merge_size=cfg.merge_size,
            mean=cfg.image_mean,
            std=cfg.image_std,
        )


class MelStream:
    """Pieces of one sound in, log-mel segments out; equal to the mel of the whole sound, cut up.

    Holds one segment's samples and the half window that its last frame reaches beyond it.
    """

    def __init__(self, cfg: AudioConfig, device: torch.device) -> None:
        self._cfg = cfg.mel
        self._device = device
        self._segment = cfg.audio_segment_size
        hop = cfg.mel.hop_length
        # Whole hops that cover the half window which centred frames reach to either side.
        self._margin = -(-(cfg.mel.nfft // 2) // hop)
        self._held = np.empty(0, np.float32)
        self._start = 0  # index of the first held sample
        self._next_frame = 0

    def push(self, samples: NDArray[Any], last: bool) -> list[Tensor]:
        """Return the segments (frames, n_mels) that the piece completes; with `last` all that is left."""
        self._held = np.concatenate((self._held, samples.astype(np.float32, copy=False)))
        hop = self._cfg.hop_length
        end = self._start + len(self._held)
        segments: list[Tensor] = []
        while True:
            stop = self._next_frame + self._segment
            total = 1 + end // hop
            reach = (stop - 1) * hop + self._margin * hop
            if last:
                if self._next_frame >= total:
                    return segments
                segments.append(self._mel(min(stop, total), whole_end=stop >= total or reach >= end))
            elif reach < end:
                segments.append(self._mel(stop, whole_end=False))
            else:
                return segments

    def _mel(self, stop: int, *, whole_end: bool) -> Tensor:
        """Compute frames up to `stop` and let go of the samples that no later frame needs."""
        hop = self._cfg.hop_length
        first_frame = self._start // hop
        upto = len(self._held) if whole_end else (stop - 1 + self._margin) * hop - self._start
        window = torch.from_numpy(self._held[:upto]).to(self._device)
        mel = log_mel(window, self._cfg)[self._next_frame - first_frame : stop - first_frame]
        self._next_frame = stop
        # One hop more than the next frame reaches back: reflection at the end needs it.
        keep_from = max(0, (stop - self._margin - 1) * hop)
        self._held = self._held[keep_from - self._start :]
        self._start = keep_from
        return mel
