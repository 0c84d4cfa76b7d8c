from __future__ import annotations

import numpy as np
import pytest
import torch

from transom.encoder.models.config import MelConfig
from transom.encoder.models.mel import log_mel


def oracle(samples: np.ndarray) -> np.ndarray:
    """numpy frames, FFT and a triangle-by-triangle HTK filterbank in float64."""
    n_fft, hop, bands, rate = 960, 240, 128, 24000
    padded = np.pad(samples.astype(np.float64), n_fft // 2, mode="reflect")
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(n_fft) / n_fft)
    count = 1 + len(samples) // hop
    frames = np.stack([padded[i * hop : i * hop + n_fft] * window for i in range(count)])
    magnitude = np.abs(np.fft.rfft(frames, axis=1))
    top = 2595 * np.log10(1 + (rate / 2) / 700)
    edges = 700 * (10 ** (np.arange(bands + 2) * top / (bands + 1) / 2595) - 1)
    hertz = np.arange(n_fft // 2 + 1) * rate / n_fft
    filters = np.zeros((bands, len(hertz)))
    for band in range(bands):
        low, centre, high = edges[band : band + 3]
        for index, value in enumerate(hertz):
            if low < value <= centre:
                filters[band, index] = (value - low) / (centre - low)
            elif centre < value < high:
                filters[band, index] = (high - value) / (high - centre)
    return np.log(np.clip(magnitude @ filters.T, 1e-7, None))


@pytest.mark.parametrize("samples", [481, 960, 1199, 1200, 24001])
def test_equals_an_independent_computation(samples):
    noise = np.random.default_rng(0).standard_normal(samples).astype(np.float32) * 0.1
    tone = np.sin(2 * np.pi * 440 * np.arange(samples) / 24000).astype(np.float32)
    got = log_mel(torch.from_numpy(noise + tone))
    expected = oracle(noise + tone)
    assert got.shape == expected.shape == (1 + samples // 240, 128)
    # Float32 noise of the FFT dominates only where a band holds almost nothing.
    np.testing.assert_allclose(np.exp(got.numpy()), np.exp(expected), rtol=2e-3, atol=2e-4)
    loud = expected > np.log(1e-2)
    np.testing.assert_allclose(got.numpy()[loud], expected[loud], atol=2e-3)


@pytest.mark.parametrize("samples", [0, 1, 239, 240, 480])
def test_clips_shorter_than_half_a_window_are_padded_with_silence(samples):
    sound = torch.linspace(-1, 1, samples)
    got = log_mel(sound)
    assert got.shape == (1 + samples // 240, 128)
    padded = torch.cat((sound, torch.zeros(481 - samples)))
    assert torch.equal(got, log_mel(padded)[: got.shape[0]])


def test_silence_is_clipped():
    assert torch.equal(log_mel(torch.zeros(2400)), torch.full((11, 128), 1e-7).log())


def test_numbers_come_from_the_config():
    cfg = MelConfig(sampling_rate=16000, nfft=400, window_size=400, hop_length=160, n_mels=80)
    assert log_mel(torch.zeros(16000), cfg).shape == (101, 80)


def test_wrong_waveforms_are_refused():
    with pytest.raises(ValueError, match="1-D float"):
        log_mel(torch.zeros(2, 100))
    with pytest.raises(ValueError, match="int16"):
        log_mel(torch.zeros(100, dtype=torch.int16))
