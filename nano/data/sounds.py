"""Sounds by seed at 24 kHz mono: spoken digits and rows of them, tones, silence, and out-of-scope ones.

Used by training and evaluation. Each generator returns samples, the facts that hold for them and,
for the audio tokenizer's training, what is heard when. Knows nothing of mels, tokens or prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import soxr
from numpy.typing import NDArray

from transom.nano.data.datasets import Recording
from transom.nano.data.facts import PITCHES, AudioFacts

RATE = 24_000
Samples = NDArray[np.float32]
Rng = np.random.Generator
# Labels of a stretch of sound, for frame-wise training of the audio tokenizer.
QUIET, NOISE, TONE_BASE, DIGIT_BASE = 0, 1, 2, 5
LABEL_COUNT = DIGIT_BASE + 10
# Most recordings are changed, and some are heard as they are asked about later.
VARIED_SHARE = 0.7


@dataclass(frozen=True)
class Sound:
    """`spans` are (start, end, label) in samples, ascending and disjoint; the rest is quiet."""

    samples: Samples
    facts: AudioFacts
    spans: tuple[tuple[int, int, int], ...]


def upsample(samples: Samples, rate: float) -> Samples:
    """Resample mono sound from `rate` Hz to 24 kHz."""
    return np.asarray(soxr.resample(samples, rate, RATE, quality="HQ"), dtype=np.float32)


def vary_speech(samples: Samples, rng: Rng) -> Samples:
    """Resample an 8 kHz recording to 24 kHz with another speed and pitch, and another level."""
    changed = upsample(samples, 8000 * float(rng.uniform(0.84, 1.2)))
    if rng.random() < 0.3:
        tilt = float(rng.uniform(-0.5, 0.5))
        changed = np.append(changed[:1], changed[1:] - tilt * changed[:-1]).astype(np.float32)
    peak = float(np.abs(changed).max()) + 1e-6
    return changed * np.float32(rng.uniform(0.15, 0.95) / peak)


def _floor(length: int, rng: Rng) -> Samples:
    """Return the hiss of a recording: from none to well audible."""
    if rng.random() < 0.35:
        return np.zeros(length, np.float32)
    level = 10 ** rng.uniform(-4.5, -2.0)
    return (rng.standard_normal(length) * level).astype(np.float32)


def digits_sound(voices: Sequence[Samples], digits: Sequence[int], rng: Rng, *, varied: bool = True) -> Sound:
    """Join 8 kHz recordings of `digits` into one sound, with pauses between and around them."""
    parts: list[Samples] = []
    spans = []
    lead = 0.0 if rng.random() < 0.4 else float(rng.uniform(0, 0.4))
    cursor = int(lead * RATE)
    parts.append(np.zeros(cursor, np.float32))
    for position, (voice, digit) in enumerate(zip(voices, digits, strict=True)):
        samples = vary_speech(voice, rng) if varied and rng.random() < VARIED_SHARE else upsample(voice, 8000)
        parts.append(samples)
        spans.append((cursor, cursor + len(samples), DIGIT_BASE + digit))
        last = position == len(digits) - 1
        pause = 0 if last and rng.random() < 0.4 else int(rng.uniform(0.12, 0.45) * RATE)
        parts.append(np.zeros(pause, np.float32))
        cursor += len(samples) + pause
    joined = np.concatenate(parts)
    if varied:
        joined = joined + _floor(len(joined), rng)
    return Sound(joined, AudioFacts("digits", digits=tuple(digits)), tuple(spans))


def tones_sound(rng: Rng, pitch: str | None = None, count: int | None = None) -> Sound:
    """Beep one to five times at a low, middle or high pitch."""
    name = pitch or str(rng.choice(list(PITCHES)))
    times = count or int(rng.choice([1, 2, 3, 4, 5], p=[0.4, 0.2, 0.2, 0.1, 0.1]))
    low, high = PITCHES[name]
    hertz = float(np.exp(rng.uniform(np.log(low), np.log(high))))
    beep = float(rng.uniform(0.25, 0.5)) if times > 1 else float(rng.uniform(0.3, 1.5))
    gap = float(rng.uniform(0.22, 0.45))
    level, softness = float(rng.uniform(0.08, 0.9)), float(rng.choice([0.0, 0.15, 0.4]))
    lead = 0 if rng.random() < 0.5 else int(rng.uniform(0.05, 0.4) * RATE)
    parts, spans, cursor = [np.zeros(lead, np.float32)], [], lead
    label = TONE_BASE + list(PITCHES).index(name)
    for index in range(times):
        time = np.arange(int(beep * RATE)) / RATE
        wave = np.sin(2 * np.pi * hertz * time) + softness * np.sin(4 * np.pi * hertz * time)
        edge = np.minimum(1, np.minimum(time, time[::-1]) / 0.01)
        parts.append((level * wave * edge / (1 + softness)).astype(np.float32))
        spans.append((cursor, cursor + len(time), label))
        rest = int(gap * RATE) if index < times - 1 or rng.random() < 0.4 else 0
        parts.append(np.zeros(rest, np.float32))
        cursor += len(time) + rest
    joined = np.concatenate(parts)
    return Sound(
        joined + _floor(len(joined), rng), AudioFacts("tones", pitch=name, count=times), tuple(spans)
    )


def silence_sound(rng: Rng) -> Sound:
    """Return silence or a barely audible hiss."""
    length = int(rng.uniform(0.4, 3.0) * RATE)
    level = 0.0 if rng.random() < 0.5 else 10 ** rng.uniform(-5, -3.6)
    return Sound((rng.standard_normal(length) * level).astype(np.float32), AudioFacts("silence"), ())


def unknown_sound(rng: Rng, voices: Sequence[Samples] = ()) -> Sound:
    """Return what the model must not claim to know: noise, chirps, clicks, chords, reversed speech."""
    length = int(rng.uniform(0.5, 3.0) * RATE)
    time = np.arange(length) / RATE
    style = int(rng.integers(6 if voices else 5))
    if style == 0:
        wave = rng.standard_normal(length)
        if rng.random() < 0.5:
            wave = np.convolve(wave, np.ones(8) / 3, mode="same")
    elif style == 1:
        start, end = rng.uniform(150, 900), rng.uniform(1000, 5000)
        sweep = (start, end) if rng.random() < 0.5 else (end, start)
        wave = np.sin(2 * np.pi * (sweep[0] * time + (sweep[1] - sweep[0]) * time**2 / (2 * time[-1])))
    elif style == 2:
        wave = np.zeros(length)
        wave[rng.integers(0, length, int(rng.integers(8, 80)))] = 1.0
        wave = np.convolve(wave, np.exp(-np.arange(400) / 60) * rng.standard_normal(400), mode="same")
    elif style == 3:
        notes = rng.uniform(120, 2500, int(rng.integers(3, 6)))
        wave = sum(np.sin(2 * np.pi * note * time + rng.uniform(0, 6)) for note in notes) / 3
        wave = np.asarray(wave) * (0.6 + 0.4 * np.sin(2 * np.pi * rng.uniform(1, 8) * time))
    elif style == 4:
        pitch = (
            np.cumsum(rng.choice(np.geomspace(200, 1800, 12), 1 + length // 3000).repeat(3000)[:length])
            / RATE
        )
        wave = np.sign(np.sin(2 * np.pi * pitch)) * 0.5
    else:
        chosen = [voices[int(rng.integers(len(voices)))][::-1] for _ in range(int(rng.integers(1, 4)))]
        wave = np.concatenate([vary_speech(np.ascontiguousarray(voice), rng) for voice in chosen])
    peak = float(np.abs(wave).max()) + 1e-6
    samples = (wave * rng.uniform(0.1, 0.8) / peak).astype(np.float32)
    return Sound(samples + _floor(len(samples), rng), AudioFacts("unknown"), ((0, len(samples), NOISE),))


class SpokenDigits:
    """Recordings by digit, to draw voices from."""

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self._by_digit: dict[int, list[Recording]] = {digit: [] for digit in range(10)}
        for recording in recordings:
            self._by_digit[recording.digit].append(recording)
        self.recordings = list(recordings)
        self.voices = [recording.samples for recording in recordings]

    def draw(self, digits: Sequence[int], rng: Rng) -> list[Samples]:
        """Draw one recording per digit, all of one speaker half of the time."""
        speaker = (
            str(rng.choice(sorted({r.speaker for r in self._by_digit[0]}))) if rng.random() < 0.5 else None
        )
        chosen = []
        for digit in digits:
            pool = [r for r in self._by_digit[digit] if speaker is None or r.speaker == speaker]
            chosen.append(pool[int(rng.integers(len(pool)))].samples)
        return chosen

    def sound(self, rng: Rng, count: int | None = None, *, varied: bool = True) -> Sound:
        """Say `count` random digits (by default one to five)."""
        total = count or int(rng.choice([1, 2, 3, 4, 5], p=[0.55, 0.17, 0.14, 0.08, 0.06]))
        digits = [int(d) for d in rng.integers(0, 10, total)]
        return digits_sound(self.draw(digits, rng), digits, rng, varied=varied)


def any_sound(spoken: SpokenDigits, rng: Rng) -> Sound:
    """Draw a sound of any kind, in the shares of the training set."""
    roll = rng.random()
    if roll < 0.6:
        return spoken.sound(rng)
    if roll < 0.82:
        return tones_sound(rng)
    return silence_sound(rng) if roll < 0.88 else unknown_sound(rng, spoken.voices)
