"""From pixels, samples and videos to what the towers read, by the same rules as serving.

Used by training and evaluation. Sampling, sizes, patches and mels are the encoder's own functions; here
they are only applied to generated media.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from transom.encoder.media.sampling import sample_frames
from transom.encoder.models.config import ProcessorConfig
from transom.encoder.models.mel import log_mel
from transom.kernels.patchify import patchify, resize_frames
from transom.kernels.smart_resize import smart_resize, video_max_pixels
from transom.nano.data.images import Pixels
from transom.nano.data.sounds import Samples
from transom.nano.data.videos import Video

Grid = tuple[int, int, int]


def image_patches(pixels: Pixels, cfg: ProcessorConfig) -> tuple[Tensor, Grid]:
    """Resize and cut one RGB picture."""
    return frames_patches([pixels], cfg, cfg.image_min_pixels, cfg.image_max_pixels)


def frames_patches(
    frames: Sequence[Pixels], cfg: ProcessorConfig, min_pixels: int, max_pixels: int
) -> tuple[Tensor, Grid]:
    """Resize and cut frames of one size."""
    height, width = frames[0].shape[:2]
    size = smart_resize(
        height,
        width,
        factor=cfg.patch_size * cfg.merge_size,
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        max_aspect_ratio=cfg.max_aspect_ratio,
    )
    stacked = torch.from_numpy(np.stack(frames))
    resized = resize_frames(stacked, *size, interpolation=cfg.interpolation, antialias=cfg.antialias)
    return patchify(
        resized,
        patch_size=cfg.patch_size,
        temporal_patch_size=cfg.temporal_patch_size,
        merge_size=cfg.merge_size,
        mean=cfg.image_mean,
        std=cfg.image_std,
    )


def video_patches(video: Video, cfg: ProcessorConfig) -> tuple[Tensor, Grid, list[float]]:
    """Render, resize and cut the sampled frames: (patches, grid, second of each frame)."""
    plan = sample_frames(
        [index / video.fps for index in range(video.frame_count)],
        fps=cfg.fps,
        min_frames=cfg.min_frames,
        max_frames=cfg.max_frames,
        multiple=cfg.temporal_patch_size,
    )
    seconds = list(plan.timestamps)
    limit = video_max_pixels(
        len(seconds),
        min_pixels=cfg.video_min_pixels,
        max_pixels=cfg.video_max_pixels,
        total_max_pixels=cfg.video_total_max_pixels,
        temporal_patch_size=cfg.temporal_patch_size,
    )
    frames = [video.frame(second) for second in seconds]
    patches, grid = frames_patches(frames, cfg, cfg.video_min_pixels, limit)
    return patches, grid, seconds


def sound_mel(samples: Samples) -> Tensor:
    """Return the log mel of 24 kHz mono samples: (frames, mels)."""
    return log_mel(torch.from_numpy(np.ascontiguousarray(samples)))
