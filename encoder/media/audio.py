"""A sound's bytes to mono float samples at the model's rate, in pieces.

Decode worker. Any container that FFmpeg reads; memory is bounded by one piece. Knows nothing of mels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import av.error
import numpy as np
import soxr
from numpy.typing import NDArray

from transom.encoder.media.container import (
    NO_FURTHER,
    audio_stream,
    duration_s,
    only,
    open_container,
    reason,
)
from transom.encoder.media.wav_header import wav_length_s
from transom.encoder.media.wire import AudioJob
from transom.errors import MediaError
from transom.messages import MediaSize

Samples = NDArray[np.float32]
# Files of floats may hold anything; a power spectrum of this is finite in float32.
_LOUDEST = 32768.0
# Below, a header is wrong or no sound is meant, and a few bytes become minutes at the model's rate.
MIN_RATE_HZ = 1000
# What may be missing at the end before a sound counts as cut off: lengths include a codec's padding.
_MISSING_SHARE = 0.01
_MISSING_S = 0.25
# Where FFmpeg guesses a length from the size of the file, it claims nothing.
_GUESSED_FORMATS = ("mp3", "aac", "ac3", "eac3", "dts", "amr", "loas")
_MP3_COUNTS = (b"Xing", b"Info", b"VBRI")
_MP3_HEAD_BYTES = 256 * 1024


class _Resampler:
    """Decoded frames in, mono samples at one rate out. Starts anew where the track changes its format."""

    def __init__(self, rate: int) -> None:
        self.rate = rate
        self.silenced = 0  # samples that were no number
        self._format: tuple[int, int] | None = None
        self._stream: Any = None

    def push(self, frame: Any) -> Samples:
        tail = np.empty(0, np.float32)
        current = (frame.sample_rate, len(frame.layout.channels))
        if current != self._format:
            if frame.sample_rate < MIN_RATE_HZ:
                raise MediaError(f"audio of {frame.sample_rate} Hz, at least {MIN_RATE_HZ} Hz are needed")
            tail = self.flush()
            self._format = current
            self._stream = None
            if frame.sample_rate != self.rate:
                self._stream = soxr.ResampleStream(
                    frame.sample_rate, self.rate, current[1], dtype="float32", quality="HQ"
                )
        samples = _to_float(frame)
        finite = np.isfinite(samples)
        if not finite.all():
            self.silenced += int(finite.size - finite.sum())
            samples = np.where(finite, samples, np.float32(0))
        return np.concatenate((tail, self._mono(samples.clip(-_LOUDEST, _LOUDEST))))

    def _mono(self, samples: Samples, last: bool = False) -> Samples:
        """(samples, channels) -> (samples,): each channel is resampled, then their mean."""
        if self._stream is not None:
            channels = self._format[1] if self._format else 1
            samples = self._stream.resample_chunk(np.ascontiguousarray(samples), last=last)
            samples = samples.reshape(-1, channels)
        mean: Samples = samples.mean(axis=1, dtype=np.float32)
        return mean

    def flush(self) -> Samples:
        if self._stream is None or self._format is None:
            return np.empty(0, np.float32)
        return self._mono(np.empty((0, self._format[1]), np.float32), last=True)


def _to_float(frame: Any) -> Samples:
    """Return (samples, channels) in -1 to 1.

    Not by FFmpeg's resampler: in PyAV it crashes on tracks of many channels that have no named layout.
    """
    channels = len(frame.layout.channels)
    raw: NDArray[Any] = frame.to_ndarray()
    stored = raw.T if frame.format.is_planar else raw.reshape(-1, channels)
    samples: Samples = stored.astype(np.float32)
    if stored.dtype == np.uint8:
        return (samples - np.float32(128)) / np.float32(128)
    if stored.dtype.kind == "i":
        return samples / np.float32(2.0 ** (8 * stored.dtype.itemsize - 1))
    return samples


class Track:
    """One sound track on its way; `notes` after the last piece say what was wrong with it."""

    def __init__(self, container: Any, stream: Any, job: AudioJob) -> None:
        only(container, stream)
        self._container = container
        self._stream = stream
        self._job = job
        self._bad_packets = 0
        self._cut_off = False
        # A WAV of unknown length always ends within what its header claims.
        self._marks_count = container.format.name != "wav"
        self.samples = 0  # at the model's rate
        self.notes: list[str] = []

    def _frames(self) -> Iterator[Any]:
        """Decode what can be decoded; broken packets are skipped."""
        try:
            for packet in self._container.demux(self._stream):
                self._cut_off |= packet.is_corrupt and self._marks_count
                try:
                    yield from packet.decode()
                except (av.error.InvalidDataError, av.error.PatchWelcomeError):
                    self._bad_packets += 1
                except av.error.EOFError:
                    return
        except NO_FURTHER:
            self._cut_off = True

    def pieces(self) -> Iterator[tuple[Samples, bool]]:
        """Yield (samples, last): `piece_samples` each, the last one shorter, never empty.

        Raise MediaError when there is no sample or more of them than allowed, or when they are no numbers.
        """
        job, parts = self._job, _Parts(self._job.piece_samples)
        resampler = _Resampler(job.sampling_rate)
        limit = int(job.max_audio_s * job.sampling_rate)
        try:
            for frame in self._frames():
                samples = resampler.push(frame)
                if resampler.silenced and self._stream.codec_context.name.startswith("pcm_f"):
                    at_s = self.samples / job.sampling_rate
                    raise MediaError(f"audio holds samples that are no finite numbers (at {at_s:.3f} s)")
                parts.add(samples)
                self.samples += len(samples)
                if self.samples > limit:
                    raise MediaError(f"audio of more than {job.max_audio_s:g} s, the limit")
                yield from parts.full()
        except (av.error.FFmpegError, ValueError) as error:
            if not self.samples:
                raise MediaError(f"audio can't be decoded: {reason(error)}") from None
            self._cut_off = True
        rest = resampler.flush()
        parts.add(rest)
        self.samples += len(rest)
        if not self.samples:
            raise MediaError("audio holds no samples")
        self._judge(resampler.silenced)
        yield from parts.full()
        yield parts.rest(), True

    def _judge(self, silenced: int) -> None:
        if self._bad_packets:
            self.notes.append(f"audio is damaged: {self._bad_packets} packets could not be decoded")
        elif self._cut_off:
            self.notes.append(f"audio is truncated: {self.samples / self._job.sampling_rate:.1f} s exist")
        if silenced:
            self.notes.append(f"audio is damaged: {silenced} samples were no numbers and are silent")


class _Parts:
    """Joins arrays and cuts them into pieces. One sample is kept back, so that the last is never empty."""

    def __init__(self, piece_len: int) -> None:
        self._piece_len = piece_len
        self._parts: list[Samples] = []
        self._held = 0

    def add(self, samples: Samples) -> None:
        self._parts.append(samples)
        self._held += len(samples)

    def full(self) -> Iterator[tuple[Samples, bool]]:
        while self._held > self._piece_len:
            joined = self.rest()
            self._parts, self._held = [joined[self._piece_len :]], len(joined) - self._piece_len
            yield joined[: self._piece_len], False

    def rest(self) -> Samples:
        return np.concatenate(self._parts)


def decode_audio(
    data: memoryview,
    job: AudioJob,
    notes: list[str],
    on_size: Callable[[MediaSize], None] = lambda _: None,
) -> Iterator[tuple[Samples, bool]]:
    """Yield the pieces of a sound, see `Track.pieces`; before the last one add to `notes`.

    `on_size` is told its length before anything is decoded, if it is more than a guess.

    Raise MediaError when there is no sound, no sample or more of them than allowed.
    """
    with open_container(data, "audio") as container:
        stream = audio_stream(container)
        if stream is None:
            raise MediaError("audio has no sound track")
        claimed_s = duration_s(container, stream)
        if claimed_s is not None and claimed_s > job.max_audio_s:
            raise MediaError(f"audio of {claimed_s:.1f} s, limit {job.max_audio_s:g} s")
        existing_s, claimed_s = claimed_s, _claimed_s(container, stream, data)
        if claimed_s is not None and existing_s is not None:
            on_size(MediaSize(audio_s=existing_s))
        track = Track(container, stream, job)
        for samples, last in track.pieces():
            if last:
                notes += _cut_off(track, claimed_s, job) or track.notes
            yield samples, last


def _claimed_s(container: Any, stream: Any, data: memoryview) -> float | None:
    """Return the length that a sound's header claims; None where it is FFmpeg's guess or another track's."""
    name = container.format.name
    if name == "wav":
        return wav_length_s(data)
    if name == "mp3" and any(mark in bytes(data[:_MP3_HEAD_BYTES]) for mark in _MP3_COUNTS):
        return duration_s(container, stream)
    if name in _GUESSED_FORMATS or (not stream.duration and len(container.streams) > 1):
        return None
    return duration_s(container, stream)


def _cut_off(track: Track, claimed_s: float | None, job: AudioJob) -> list[str]:
    found_s = track.samples / job.sampling_rate
    if claimed_s is None or claimed_s - found_s <= max(_MISSING_S, claimed_s * _MISSING_SHARE):
        return []
    return [f"audio is truncated: {found_s:.1f} of {claimed_s:.1f} s exist"]


@contextmanager
def open_track(data: memoryview, job: AudioJob) -> Iterator[Track]:
    """Open a clip that has a sound track and return the track."""
    with open_container(data, "video") as container:
        stream = audio_stream(container)
        if stream is None:
            raise MediaError("video has no sound track")
        yield Track(container, stream, job)
