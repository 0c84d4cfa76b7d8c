"""A sound's bytes to mono float samples at the model's rate, in pieces.

Decode worker. Any container that FFmpeg reads; memory is bounded by one piece. Knows nothing of mels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import av.error
import numpy as np
import soxr
from numpy.typing import NDArray

from transom.encoder.media.container import audio_stream, duration_s, open_container
from transom.encoder.media.wire import AudioJob
from transom.errors import MediaError

Samples = NDArray[np.float32]


class _Resampler:
    """Decoded frames in, mono samples at one rate out. Starts anew where the track changes its format."""

    def __init__(self, rate: int) -> None:
        self.rate = rate
        self._format: tuple[int, int] | None = None
        self._stream: Any = None

    def push(self, frame: Any) -> Samples:
        tail = np.empty(0, np.float32)
        current = (frame.sample_rate, len(frame.layout.channels))
        if current != self._format:
            tail = self.flush()
            self._format = current
            self._stream = None
            if frame.sample_rate != self.rate:
                self._stream = soxr.ResampleStream(
                    frame.sample_rate, self.rate, current[1], dtype="float32", quality="HQ"
                )
        return np.concatenate((tail, self._mono(_to_float(frame))))

    def _mono(self, samples: Samples, last: bool = False) -> Samples:
        """(samples, channels) -> (samples,): each channel is resampled, then their mean."""
        if self._stream is not None:
            channels = self._format[1] if self._format else 1
            samples = self._stream.resample_chunk(np.ascontiguousarray(samples), last=last)
            samples = samples.reshape(-1, channels)
        mean: Samples = samples.mean(axis=1, dtype=np.float32)
        return np.nan_to_num(mean, posinf=1.0, neginf=-1.0).astype(np.float32, copy=False)

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


def _frames(container: Any, stream: Any) -> Iterator[Any]:
    """Decode what can be decoded; broken packets are skipped."""
    try:
        for packet in container.demux(stream):
            try:
                yield from packet.decode()
            except (av.error.InvalidDataError, av.error.PatchWelcomeError):
                continue
            except av.error.EOFError:
                return
    except (av.error.InvalidDataError, av.error.EOFError):
        return


def decode_audio(data: memoryview, job: AudioJob) -> Iterator[tuple[Samples, bool]]:
    """Yield (samples, last) pieces of `piece_samples` samples each, the last one shorter, never empty.

    Raise MediaError when there is no sound, no sample or more of them than allowed.
    """
    with open_container(data, "audio") as container:
        stream = audio_stream(container)
        if stream is None:
            raise MediaError("audio has no sound track")
        check_length(duration_s(container, stream), job)
        yield from decode_track(container, stream, job)


def check_length(claimed_s: float | None, job: AudioJob) -> None:
    """Raise MediaError when the claimed length passes the limit."""
    if claimed_s is not None and claimed_s > job.max_audio_s:
        raise MediaError(f"audio of {claimed_s:.1f} s, limit {job.max_audio_s:g} s")


def decode_track(container: Any, stream: Any, job: AudioJob) -> Iterator[tuple[Samples, bool]]:
    """Yield the pieces of one stream of an open container."""
    resampler = _Resampler(job.sampling_rate)
    limit = int(job.max_audio_s * job.sampling_rate)
    parts: list[Samples] = []
    held = total = 0

    def take() -> Samples:
        nonlocal held
        joined = np.concatenate(parts)
        piece, rest = joined[: job.piece_samples], joined[job.piece_samples :]
        parts[:] = [rest] if len(rest) else []
        held = len(rest)
        return piece

    try:
        for frame in _frames(container, stream):
            samples = resampler.push(frame)
            parts.append(samples)
            held += len(samples)
            total += len(samples)
            if total > limit:
                raise MediaError(f"audio of more than {job.max_audio_s:g} s, the limit")
            # One sample is kept back, so that the last piece is never empty.
            while held > job.piece_samples:
                yield take(), False
    except (av.error.FFmpegError, ValueError) as error:
        if not total:
            raise MediaError(f"audio can't be decoded: {error}") from None
    rest = resampler.flush()
    parts.append(rest)
    held += len(rest)
    total += len(rest)
    if not total:
        raise MediaError("audio holds no samples")
    while held > job.piece_samples:
        yield take(), False
    yield take(), True
