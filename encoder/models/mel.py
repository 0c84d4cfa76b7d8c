"""Log-mel spectrogram of 24 kHz mono sound, as the audio tokenizer was trained on.

Encoder process. Knows nothing of files, resampling or models.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from transom.encoder.models.config import MelConfig

FAMILY_MEL = MelConfig()


@lru_cache(maxsize=8)
def mel_filters(cfg: MelConfig) -> Tensor:
    """Return the HTK mel filterbank, unnormalised triangles: (bins, n_mels)."""
    edges_mel = torch.linspace(_to_mel(cfg.fmin), _to_mel(cfg.top_hz), cfg.n_mels + 2, dtype=torch.float64)
    edges = 700.0 * (10.0 ** (edges_mel / 2595.0) - 1.0)
    bins = torch.linspace(0, cfg.sampling_rate / 2, cfg.nfft // 2 + 1, dtype=torch.float64).unsqueeze(1)
    rising = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    return torch.minimum(rising, falling).clamp_min(0).float()


@lru_cache(maxsize=8)
def _window(cfg: MelConfig) -> Tensor:
    return torch.hann_window(cfg.window_size)


def _to_mel(hertz: float) -> float:
    return 2595.0 * math.log10(1.0 + hertz / 700.0)


def log_mel(waveform: Tensor, cfg: MelConfig = FAMILY_MEL) -> Tensor:
    """Return (1 + samples // hop, n_mels) natural-log magnitudes of a mono waveform (samples,)."""
    if waveform.ndim != 1 or not waveform.is_floating_point():
        raise ValueError(f"waveform must be 1-D float, got {waveform.dtype} {tuple(waveform.shape)}")
    frames = 1 + waveform.shape[0] // cfg.hop_length
    # Centring reflects half a window at both ends, which needs that many samples and one more.
    missing = cfg.nfft // 2 + 1 - waveform.shape[0]
    if missing > 0:
        waveform = torch.nn.functional.pad(waveform, (0, missing))
    spectrum = torch.stft(
        waveform.float(),
        cfg.nfft,
        hop_length=cfg.hop_length,
        win_length=cfg.window_size,
        window=_window(cfg).to(waveform.device),
        center=True,
        pad_mode="reflect",
        return_complex=True,
    )
    mel = spectrum[:, :frames].abs().t() @ mel_filters(cfg).to(waveform.device)
    return mel.clamp_min(cfg.log_clip).log()
