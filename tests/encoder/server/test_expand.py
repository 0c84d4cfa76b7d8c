"""Literal expansions of media items for the demo checkpoint's vocabulary."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transom.encoder.expand import Expander, timestamp_text, video_units
from transom.hub import resolve_model


@pytest.fixture(scope="module")
def expander() -> Expander:
    return Expander.from_folder(resolve_model("mimo-nano"))


def spelled(expander: Expander, ids: list[int]) -> str:
    return expander._tokenizer.decode(ids, skip_special=False)


def test_each_modality_is_spelled_as_the_model_reads_it(expander: Expander) -> None:
    assert spelled(expander, expander.image(3)) == (
        "<|vision_start|>" + "<|image_pad|>" * 3 + "<|vision_end|>"
    )
    assert spelled(expander, expander.audio(2)) == (
        "<|mimo_audio_start|><|audio_pad|><|audio_pad|><|mimo_audio_end|>"
    )
    assert spelled(expander, expander.video([(0.0, 2, 0), (61.5, 1, 1)])) == (
        "<|mimo_video_start|>00:00<|vision_start|><|video_pad|><|video_pad|><|vision_end|>"
        "01:01<|vision_start|><|video_pad|><|vision_end|>"
        "<|mimo_audio_start|><|audio_pad|><|mimo_audio_end|><|mimo_video_end|>"
    )


def test_pads_are_what_takes_a_row(expander: Expander) -> None:
    ids = expander.video([(0.0, 5, 7), (2.0, 5, 6)])
    assert sum(token in expander.ids.pads("video") for token in ids) == 23
    assert sum(token in expander.ids.pads("image") for token in expander.image(9)) == 9


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "00:00"),
        (1.9995, "00:02"),
        (59.99, "00:59"),
        (60, "01:00"),
        (3599.9995, "60:00"),
        (6000, "100:00"),
        (-0.01, "00:00"),
    ],
)
def test_times_round_down_but_for_container_rounding(seconds: float, text: str) -> None:
    assert timestamp_text(seconds) == text


@given(
    starts=st.lists(st.floats(0, 4000), min_size=1, max_size=40, unique=True).map(sorted),
    rate=st.sampled_from([6.25, 12.5, 1.0]),
)
def test_units_share_out_the_whole_sound_once(starts: list[float], rate: float) -> None:
    timestamps = [time for start in starts for time in (start, start + 0.1)]
    units = video_units(timestamps, 2, rate)
    assert [unit.start_s for unit in units] == starts
    assert units[0].audio_start == 0
    assert units[-1].audio_end is None
    for before, after in itertools.pairwise(units):
        assert before.audio_end == after.audio_start == int(after.start_s * rate)


def test_without_sound_units_have_none() -> None:
    assert all((u.audio_start, u.audio_end) == (0, 0) for u in video_units([0, 1, 2, 3], 2, None))
