"""Cuts a sound that comes in pieces into windows whose log-mel frames are the segments of the whole sound.

Encoder process, event loop: copies of samples only. A rank makes the mel of a window. Loads no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transom.encoder.models.config import AudioConfig


@dataclass(frozen=True, slots=True)
class SoundWindow:
    """One segment: the mel frames [skip, skip + frames) of `samples` are those of the whole sound."""

    samples: NDArray[Any]
    skip: int
    frames: int


class SoundCutter:
    """Pieces of one sound in, windows out.

    Holds one segment's samples and the half window that its last frame reaches beyond it.
    """

    def __init__(self, cfg: AudioConfig) -> None:
        self._hop = cfg.mel.hop_length
        self._segment = cfg.audio_segment_size
        # Whole hops that cover the half window which centred frames reach to either side.
        self._margin = -(-(cfg.mel.nfft // 2) // self._hop)
        self._held = np.empty(0, np.float32)
        self._start = 0  # index of the first held sample
        self._next_frame = 0

    def push(self, samples: NDArray[Any], last: bool) -> list[SoundWindow]:
        """Return the windows that the piece completes; with `last` all that is left."""
        self._held = np.concatenate((self._held, samples.astype(np.float32, copy=False)))
        hop = self._hop
        end = self._start + len(self._held)
        windows: list[SoundWindow] = []
        while True:
            stop = self._next_frame + self._segment
            total = 1 + end // hop
            reach = (stop - 1) * hop + self._margin * hop
            if last:
                if self._next_frame >= total:
                    return windows
                windows.append(self._window(min(stop, total), whole_end=stop >= total or reach >= end))
            elif reach < end:
                windows.append(self._window(stop, whole_end=False))
            else:
                return windows

    def _window(self, stop: int, *, whole_end: bool) -> SoundWindow:
        """Cut frames up to `stop` and let go of the samples that no later frame needs."""
        hop = self._hop
        first_frame = self._start // hop
        upto = len(self._held) if whole_end else (stop - 1 + self._margin) * hop - self._start
        window = SoundWindow(self._held[:upto], self._next_frame - first_frame, stop - self._next_frame)
        self._next_frame = stop
        # One hop more than the next frame reaches back: reflection at the end needs it.
        keep_from = max(0, (stop - self._margin - 1) * hop)
        self._held = self._held[keep_from - self._start :]
        self._start = keep_from
        return window
