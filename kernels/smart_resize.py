"""Size that a picture is resized to before it is cut into patches; pure arithmetic.

Runs in encoders and wherever tokens must be counted before decoding. Knows nothing of pixels.
"""

from __future__ import annotations

import math


class UnusableSizeError(ValueError):
    """The picture's sides or their ratio can't be resized within the limits."""


def smart_resize(
    height: int,
    width: int,
    *,
    factor: int,
    min_pixels: int,
    max_pixels: int,
    max_aspect_ratio: float = 200.0,
) -> tuple[int, int]:
    """Return (height, width), both multiples of `factor`, with min_pixels <= area <= max_pixels.

    The aspect ratio is kept as far as rounding allows. A picture with a side below `factor` is first
    scaled up to it and exempt from `max_aspect_ratio`, as in the MiMo-V2 processor; a strip too long
    for the budget is squeezed. Raises UnusableSizeError for an aspect ratio above the limit.
    """
    if min(height, width) < 1:
        raise UnusableSizeError(f"picture of {width}x{height} pixels has no area")
    if max_pixels < factor * factor:
        raise UnusableSizeError(f"max_pixels {max_pixels} is below one token of {factor}x{factor} pixels")
    ratio = max(height, width) / min(height, width)
    if min(height, width) < factor:
        scale = factor / min(height, width)
        height, width = round(height * scale), round(width * scale)
    elif ratio > max_aspect_ratio:
        raise UnusableSizeError(f"aspect ratio {ratio:.1f} is above {max_aspect_ratio:g}")
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
        # A strip whose short side can't shrink below one factor would overshoot: cut its long side.
        longest = max_pixels // factor // factor * factor
        new_height, new_width = min(new_height, longest), min(new_width, longest)
    elif new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


def video_max_pixels(
    frames: int, *, min_pixels: int, max_pixels: int, total_max_pixels: int, temporal_patch_size: int = 2
) -> int:
    """Return the largest frame area of a video of `frames` sampled frames.

    `temporal_patch_size` frames share one slice of patches, so the total counts slices.
    """
    if frames < 1:
        raise UnusableSizeError(f"a video of {frames} frames has no frame area")
    return max(min_pixels, min(total_max_pixels * temporal_patch_size // frames, max_pixels))
