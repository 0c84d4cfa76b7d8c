"""Makers of media files with known content, and the decode jobs of a small model."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import av
import msgspec
import numpy as np
import pytest
from PIL import Image

from transom.encoder.media.wire import AudioJob, ImageJob, VideoJob

IMAGE_JOB = ImageJob(
    factor=32,
    min_pixels=9216,
    max_pixels=16384 * 64,
    max_aspect_ratio=200,
    max_image_pixels=100_000_000,
    full_decode_pixels=16_000_000,
    max_tokens=10**6,
    background=(255, 255, 255),
    frame_index=0,
)
SOUND_JOB = AudioJob(sampling_rate=24_000, piece_samples=24_000 * 60, max_audio_s=3600)
VIDEO_JOB = VideoJob(
    factor=32,
    min_pixels=9216,
    max_pixels=16384,
    total_max_pixels=9216 * 512,
    max_aspect_ratio=200,
    max_image_pixels=100_000_000,
    full_decode_pixels=16_000_000,
    max_tokens=10**6,
    fps=1.0,
    min_frames=8,
    max_frames=128,
    temporal_patch=2,
    max_video_s=3600,
    threads=1,
    sound=SOUND_JOB,
)


@pytest.fixture
def image_job() -> Callable[..., ImageJob]:
    """A job for one picture, with changes."""
    return lambda **changes: msgspec.structs.replace(IMAGE_JOB, **changes)


@pytest.fixture
def sound_job() -> Callable[..., AudioJob]:
    """A job for one sound, with changes."""
    return lambda **changes: msgspec.structs.replace(SOUND_JOB, **changes)


@pytest.fixture
def video_job() -> Callable[..., VideoJob]:
    """A job for one clip, with changes."""
    return lambda **changes: msgspec.structs.replace(VIDEO_JOB, **changes)


def encode_image(image: Image.Image, kind: str, **options: Any) -> memoryview:
    """The file of a picture."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return memoryview(buffer.getvalue())


def encode_sound(samples: np.ndarray, rate: int, container: str, codec: str) -> memoryview:
    """The file of a sound: samples are float (channels, samples)."""
    buffer = io.BytesIO()
    layout = {1: "mono", 2: "stereo", 6: "5.1"}[len(samples)]
    with av.open(buffer, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate, layout=layout)
        _mux_sound(output, stream, samples, rate, layout)
    return memoryview(buffer.getvalue())


def _mux_sound(output: Any, stream: Any, samples: np.ndarray, rate: int, layout: str) -> None:
    frame = av.AudioFrame.from_ndarray(
        np.ascontiguousarray(samples, dtype=np.float32), format="fltp", layout=layout
    )
    frame.sample_rate = rate
    frame.pts = 0
    fifo = av.AudioFifo()
    target = av.AudioResampler(format=stream.format, layout=layout, rate=rate)
    for part in target.resample(frame):
        fifo.write(part)
    size = stream.codec_context.frame_size or 1024
    while (chunk := fifo.read(size, partial=True)) is not None:
        output.mux(stream.encode(chunk))
    output.mux(stream.encode(None))


def numbered_frame(number: int, width: int, height: int) -> np.ndarray:
    """A frame that tells its number through any codec: 10 bars, dark or light, are its bits."""
    frame = np.zeros((height, width, 3), np.uint8)
    for bit in range(10):
        left, right = width * bit // 10, width * (bit + 1) // 10
        frame[:, left:right] = 220 if number >> bit & 1 else 30
    return frame


def read_number(frame: np.ndarray) -> int:
    """The number that a decoded frame tells."""
    width = frame.shape[1]
    middles = [int((bit + 0.5) * width / 10) for bit in range(10)]
    return sum(1 << bit for bit, x in enumerate(middles) if frame[frame.shape[0] // 2, x].mean() > 125)


def encode_video(
    count: int,
    *,
    fps: int = 10,
    size: tuple[int, int] = (160, 96),
    container: str = "mp4",
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    gop: int = 12,
    times_ms: Sequence[int] | None = None,
    sound: np.ndarray | None = None,
    options: dict[str, str] | None = None,
    codec_options: dict[str, str] | None = None,
) -> memoryview:
    """The file of a clip of numbered frames; `times_ms` makes their rate variable."""
    width, height = size
    # A file: some containers read back what they wrote.
    with (
        tempfile.NamedTemporaryFile() as file,
        av.open(file.name, "w", format=container, options=options or {}) as output,
    ):
        stream = output.add_stream(codec, rate=fps, options={"g": str(gop)} | (codec_options or {}))
        stream.width, stream.height, stream.pix_fmt = width, height, pix_fmt
        track = output.add_stream("aac", rate=24_000, layout="mono") if sound is not None else None
        if times_ms is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        for number in range(count):
            frame = av.VideoFrame.from_ndarray(numbered_frame(number, width, height), format="rgb24")
            if times_ms is not None:
                frame.pts, frame.time_base = times_ms[number], Fraction(1, 1000)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
        if track is not None and sound is not None:
            _mux_sound(output, track, sound[None], 24_000, "mono")
        output.close()
        return memoryview(file.read())


@pytest.fixture
def make_image() -> Callable[..., memoryview]:
    return encode_image


@pytest.fixture
def make_sound() -> Callable[..., memoryview]:
    return encode_sound


@pytest.fixture
def make_video() -> Callable[..., memoryview]:
    return encode_video


@pytest.fixture
def frame_number() -> Callable[[np.ndarray], int]:
    return read_number
