"""Mel segments of a sound that comes in pieces equal the mel of the whole sound, cut up."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from transom.encoder.models.config import AudioConfig
from transom.encoder.models.mel import log_mel
from transom.encoder.preprocess import MelPreprocessor
from transom.encoder.sound import SoundCutter
from transom.hub import resolve_model

SEGMENT = 80
HOP = 240


@pytest.mark.parametrize(
    "count",
    [
        1,
        100,
        479,
        480,
        481,
        960,
        *(HOP * 80 + extra for extra in (-240, -1, 0, 1, 480)),
        HOP * 160 + 5,
        77_777,
    ],
)
def test_any_cut_gives_the_same_segments(count: int) -> None:
    cfg = dataclasses.replace(AudioConfig.from_folder(resolve_model("mimo-nano")), audio_segment_size=SEGMENT)
    samples = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    wanted = log_mel(torch.from_numpy(samples), cfg.mel)
    mel = MelPreprocessor(cfg.mel, torch.device("cpu"))
    for size in (997, HOP * SEGMENT, count):
        cutter = SoundCutter(cfg)
        segments = [
            mel(window.samples.copy(), window.skip, window.frames)
            for start in range(0, count, size)
            for window in cutter.push(samples[start : start + size], start + size >= count)
        ]
        assert [len(segment) for segment in segments[:-1]] == [SEGMENT] * (len(segments) - 1)
        torch.testing.assert_close(torch.cat(segments), wanted, atol=2e-4, rtol=1e-4)
