"""Resize uint8 frames, normalise them and cut them into patches, in the layout the towers read.

Runs in encoders on CPU or CUDA. Knows nothing of files or models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def resize_frames(
    frames: Tensor, height: int, width: int, *, interpolation: str = "bilinear", antialias: bool = False
) -> Tensor:
    """Resize uint8 frames (n, height, width, 3) to (n, 3, height, width) uint8, channels_last.

    The input stays uint8 and channels_last through the resize: on CPU a float or contiguous NCHW
    copy makes the same operation 4 to 26 times slower.
    """
    if frames.dtype != torch.uint8 or frames.ndim != 4 or frames.shape[-1] != 3:
        raise ValueError(f"frames must be uint8 (n, h, w, 3), got {frames.dtype} {tuple(frames.shape)}")
    planes = frames.permute(0, 3, 1, 2)
    if planes.shape[-2:] == (height, width):
        return planes
    resized = F.interpolate(
        planes if planes.device.type == "cpu" else planes.float(),
        (height, width),
        mode=interpolation,
        align_corners=False,
        antialias=antialias,
    )
    # Only the CPU kernels work on uint8; elsewhere round as they do.
    return resized if resized.dtype == torch.uint8 else resized.round_().clamp_(0, 255).to(torch.uint8)


def patchify(
    frames: Tensor,
    *,
    patch_size: int,
    temporal_patch_size: int,
    merge_size: int,
    mean: Sequence[float],
    std: Sequence[float],
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, tuple[int, int, int]]:
    """Normalise uint8 frames (n, 3, h, w) and return patches and their grid.

    Patches are (t * h * w, 3 * temporal * patch * patch) in merge-block order; the last frame repeats
    until the temporal patch is full, so a still image is doubled. Raises ValueError when a side is
    not a multiple of patch_size * merge_size.
    """
    count, channels, height, width = frames.shape
    factor = patch_size * merge_size
    if height % factor or width % factor or count < 1:
        raise ValueError(f"{count} frames of {width}x{height}: sides must be multiples of {factor}")
    # A still is cut once and doubled at the end; other tails repeat their last frame.
    depth = 1 if count == 1 else temporal_patch_size
    missing = -count % depth
    if missing:
        frames = torch.cat((frames, frames[-1:].expand(missing, -1, -1, -1)))
    rows, columns = height // factor, width // factor
    # Planar bytes first: gathering patches out of interleaved ones takes twice as long.
    blocks = (
        frames.contiguous()
        .view(-1, depth, channels, rows, merge_size, patch_size, columns, merge_size, patch_size)
        .permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
        .contiguous()
    )
    # x / 255 then (x - mean) / std, folded into one multiply-add per value.
    device = frames.device
    scale = torch.tensor([1.0 / (255.0 * s) for s in std], device=device).view(-1, 1, 1, 1)
    shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], device=device).view(-1, 1, 1, 1)
    values = blocks.to(torch.float32)
    torch.addcmul(shift, values, scale, out=values)
    if depth < temporal_patch_size:
        values = values.expand(-1, -1, -1, -1, -1, -1, temporal_patch_size, -1, -1)
    grid = (blocks.shape[0], height // patch_size, width // patch_size)
    patches = values.to(dtype).reshape(-1, channels * temporal_patch_size * patch_size**2)
    return patches, grid
