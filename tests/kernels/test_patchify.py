from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from transom.kernels.patchify import patchify, resize_frames

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
SIZES = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "mean": MEAN, "std": STD}


def random_frames(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, (*shape, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("size", [(64, 64), (96, 160), (160, 32)])
def test_layout_equals_the_qwen2_vl_processor(size):
    frames = random_frames(1, *size)
    processor = Qwen2VLImageProcessorPil(
        patch_size=16, temporal_patch_size=2, merge_size=2, min_pixels=1024, max_pixels=1 << 20
    )
    expected = processor(images=[Image.fromarray(frames[0].numpy())], return_tensors="pt")
    patches, grid = patchify(resize_frames(frames, *size), **SIZES)
    assert list(grid) == expected["image_grid_thw"][0].tolist()
    torch.testing.assert_close(patches, expected["pixel_values"], atol=2e-6, rtol=0)


@pytest.mark.parametrize(("height", "width"), [(96, 96), (320, 256)])
def test_antialiased_bicubic_equals_pillow(height, width):
    frames = random_frames(1, 200, 170)
    expected = np.asarray(Image.fromarray(frames[0].numpy()).resize((width, height), Image.BICUBIC))
    resized = resize_frames(frames, height, width, interpolation="bicubic", antialias=True)
    assert int((resized[0].permute(1, 2, 0).int() - torch.from_numpy(expected.copy()).int()).abs().max()) <= 1


@pytest.mark.parametrize(("height", "width"), [(32, 64), (96, 64), (64, 160)])
def test_bilinear_samples_pixel_centres_without_antialias(height, width):
    frames = random_frames(2, 77, 131)
    expected = torch.empty(2, 3, height, width)
    for y in range(height):
        for x in range(width):
            v = min(max((y + 0.5) * 77 / height - 0.5, 0), 76)
            u = min(max((x + 0.5) * 131 / width - 0.5, 0), 130)
            top, left = int(v), int(u)
            bottom, right = min(top + 1, 76), min(left + 1, 130)
            fv, fu = v - top, u - left
            corners = frames[:, [top, top, bottom, bottom], [left, right, left, right]].float()
            weights = torch.tensor([(1 - fv) * (1 - fu), (1 - fv) * fu, fv * (1 - fu), fv * fu])
            expected[:, :, y, x] = (corners * weights.view(1, 4, 1)).sum(1)
    resized = resize_frames(frames, height, width)
    assert resized.dtype == torch.uint8
    assert float((resized.float() - expected).abs().max()) <= 1.0


def test_resize_keeps_channels_last_and_does_not_copy_an_unchanged_picture():
    frames = random_frames(1, 64, 96)
    same = resize_frames(frames, 64, 96)
    assert same.data_ptr() == frames.data_ptr()
    resized = resize_frames(frames, 32, 32)
    assert resized.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("count", [2, 3, 6])
def test_videos_pair_frames_and_repeat_the_last(count):
    frames = random_frames(count, 64, 32).permute(0, 3, 1, 2)
    patches, grid = patchify(frames, **SIZES)
    assert grid == ((count + 1) // 2, 4, 2)
    values = patches.view(*grid[:1], 2, 1, 2, 2, 3, 2, 16, 16)  # t, bh, bw, mh, mw, c, dt, y, x
    for t, dt in [(t, dt) for t in range(grid[0]) for dt in range(2)]:
        frame = frames[min(2 * t + dt, count - 1)].double() / 255
        expected = (frame - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
        for h, w in [(h, w) for h in range(4) for w in range(2)]:
            got = values[t, h // 2, w // 2, h % 2, w % 2, :, dt]
            want = expected[:, h * 16 : h * 16 + 16, w * 16 : w * 16 + 16]
            torch.testing.assert_close(got, want.float(), atol=2e-6, rtol=0)


def test_dtype_is_cast_after_the_fp32_arithmetic():
    frames = random_frames(1, 32, 32).permute(0, 3, 1, 2)
    exact, _ = patchify(frames, **SIZES)
    half, _ = patchify(frames, **SIZES, dtype=torch.bfloat16)
    assert torch.equal(half, exact.to(torch.bfloat16))


def test_wrong_input_is_refused():
    with pytest.raises(ValueError, match="33x32"):
        patchify(torch.zeros(1, 3, 32, 33, dtype=torch.uint8), **SIZES)
    with pytest.raises(ValueError, match=r"torch\.float32"):
        resize_frames(torch.zeros(1, 32, 32, 3), 32, 32)
