"""Triton: resize, normalise and patchify uint8 frames in one pass; the reference is `patchify.py`.

Runs in encoders on CUDA, and under Triton's interpreter in tests. Bilinear without antialias only; knows
nothing of files or models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _source(index, scale, size):  # type: ignore[no-untyped-def]
    """Return the two source pixels of an output pixel along one side, and the weight of the second."""
    place = tl.maximum((index.to(tl.float32) + 0.5) * scale - 0.5, 0.0)
    low = tl.minimum(place.to(tl.int32), size - 1)
    return low, tl.minimum(low + 1, size - 1), place - low.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    frames_ptr, out_ptr, scale_ptr, shift_ptr,
    frame_count, in_height, in_width, height_scale, width_scale, columns,
    patch: tl.constexpr, merge: tl.constexpr, depth: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """One program: one patch of one output slice, all channels and times."""
    number = tl.program_id(0)
    time = tl.program_id(1)
    # Patches come in merge-block order: block row, block column, row in the block, column in the block.
    inner = number % (merge * merge)
    unit = number // (merge * merge)
    row = (unit // columns) * merge + inner // merge
    column = (unit % columns) * merge + inner % merge
    pixel = tl.arange(0, block)
    inside = pixel < patch * patch
    top, bottom, down = _source(row * patch + pixel // patch, height_scale, in_height)
    left, right, across = _source(column * patch + pixel % patch, width_scale, in_width)
    patches = tl.num_programs(0)
    out = out_ptr + (time.to(tl.int64) * patches + number) * (3 * depth * patch * patch) + pixel
    for moment in tl.static_range(depth):
        frame = tl.minimum(time * depth + moment, frame_count - 1).to(tl.int64)
        base = frames_ptr + frame * in_height * in_width * 3
        for channel in tl.static_range(3):
            a = tl.load(base + (top * in_width + left) * 3 + channel, mask=inside, other=0).to(tl.float32)
            b = tl.load(base + (top * in_width + right) * 3 + channel, mask=inside, other=0).to(tl.float32)
            c = tl.load(base + (bottom * in_width + left) * 3 + channel, mask=inside, other=0).to(tl.float32)
            d = tl.load(base + (bottom * in_width + right) * 3 + channel, mask=inside, other=0).to(tl.float32)
            upper = a + across * (b - a)
            lower = c + across * (d - c)
            # The reference resizes to whole levels before it normalises.
            level = tl.floor(upper + down * (lower - upper) + 0.5)
            value = level * tl.load(scale_ptr + channel) + tl.load(shift_ptr + channel)
            place = (channel * depth + moment) * patch * patch
            tl.store(out + place, value.to(out_ptr.dtype.element_ty), mask=inside)


def fused_patchify(
    frames: Tensor,
    height: int,
    width: int,
    *,
    patch_size: int,
    temporal_patch_size: int,
    merge_size: int,
    mean: Sequence[float],
    std: Sequence[float],
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, tuple[int, int, int]]:
    """Return what `patchify(resize_frames(frames, height, width), ...)` does, from contiguous frames.

    uint8 frames (n, h, w, 3). A resized level may differ by one from the reference's, which adds up in
    fixed point. Each source pixel is read once or, where the picture grows, from cache.
    """
    if frames.dtype != torch.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or not len(frames):
        raise ValueError(f"frames must be uint8 (n, h, w, 3), got {frames.dtype} {tuple(frames.shape)}")
    factor = patch_size * merge_size
    if height % factor or width % factor or min(height, width) < factor:
        raise ValueError(f"target {width}x{height}: sides must be multiples of {factor}")
    frames = frames.contiguous()
    count, in_height, in_width, _ = frames.shape
    slices = -(-count // temporal_patch_size)
    rows, columns = height // patch_size, width // patch_size
    size = 3 * temporal_patch_size * patch_size**2
    patches = torch.empty((slices * rows * columns, size), dtype=dtype, device=frames.device)
    scale = torch.tensor([1.0 / (255.0 * s) for s in std], device=frames.device)
    shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], device=frames.device)
    _kernel[(rows * columns, slices)](
        frames, patches, scale, shift,
        count, in_height, in_width, in_height / height, in_width / width, columns // merge_size,
        patch=patch_size, merge=merge_size, depth=temporal_patch_size,
        block=triton.next_power_of_2(patch_size**2),
    )  # fmt: skip
    return patches, (slices, rows, columns)
