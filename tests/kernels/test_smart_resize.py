from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as reference

from transom.kernels.smart_resize import UnusableSizeError, smart_resize, video_max_pixels

REAL = {"factor": 32, "min_pixels": 8192, "max_pixels": 8388608}
NANO = {"factor": 32, "min_pixels": 9216, "max_pixels": 36864}
LIMITS = pytest.mark.parametrize("limits", [REAL, NANO], ids=["real", "nano"])
SIDE = st.integers(32, 6000)


@LIMITS
@given(height=SIDE, width=SIDE)
def test_equals_the_reference_from_the_factor_up(limits, height, width):
    if max(height, width) / min(height, width) > 200:
        with pytest.raises(UnusableSizeError):
            smart_resize(height, width, **limits)
        return
    expected = reference(height, width, **limits)
    if expected[0] * expected[1] > limits["max_pixels"]:  # the reference overshoots for long strips
        assert min(expected) == 32
        longest = limits["max_pixels"] // 32
        expected = (min(expected[0], longest), min(expected[1], longest))
    assert smart_resize(height, width, **limits) == expected


@LIMITS
@given(height=st.integers(1, 20000), width=st.integers(1, 20000))
def test_result_is_on_the_raster_and_within_the_budget(limits, height, width):
    try:
        new_height, new_width = smart_resize(height, width, **limits)
    except UnusableSizeError:
        assert max(height, width) / min(height, width) > 200
        return
    assert new_height % 32 == 0
    assert new_width % 32 == 0
    assert limits["min_pixels"] <= new_height * new_width <= limits["max_pixels"]


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((1, 1), (96, 96)),  # 1x1 -> 32x32 -> up to the minimum area
        ((31, 31), (96, 96)),
        ((16, 64), (64, 192)),  # -> 32x128, then up
        ((96, 96), (96, 96)),
        ((192, 192), (192, 192)),
        ((208, 176), (192, 192)),  # 6.5 and 5.5 both round to the even 6
        ((4000, 3000), (192, 160)),
    ],
)
def test_hand_computed_sizes(size, expected):
    assert smart_resize(*size, **NANO) == expected


def test_limits_are_named_in_the_error():
    with pytest.raises(UnusableSizeError, match=r"aspect ratio 201\.0 is above 200"):
        smart_resize(64, 64 * 201, **REAL)
    with pytest.raises(UnusableSizeError, match="0x10"):
        smart_resize(10, 0, **REAL)


def test_a_budget_below_one_token_is_refused():
    with pytest.raises(UnusableSizeError, match="max_pixels 1023 is below one token of 32x32"):
        smart_resize(100, 100, factor=32, min_pixels=1, max_pixels=1023)


def test_a_thin_picture_is_scaled_up_whatever_its_ratio():
    assert smart_resize(1, 1000, **REAL) == (32, 32000)
    assert smart_resize(1, 400_000, **REAL) == (32, 262144)
    assert smart_resize(2000, 40, **NANO) == (1152, 32)


@pytest.mark.parametrize(
    ("frames", "expected"),
    [(1, 8388608), (64, 8388608), (65, 8259552), (3600, 149130), (10**6, 8192)],
)
def test_video_budget_shrinks_with_the_frames(frames, expected):
    budget = video_max_pixels(frames, min_pixels=8192, max_pixels=8388608, total_max_pixels=268435456)
    assert budget == expected


def test_video_without_frames_has_no_budget():
    with pytest.raises(UnusableSizeError):
        video_max_pixels(0, min_pixels=1, max_pixels=2, total_max_pixels=3)
