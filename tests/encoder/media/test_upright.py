"""Clips whose container says to turn or mirror them."""

from __future__ import annotations

import io
import shutil
import struct
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import av
import numpy as np
import pytest

from tests.encoder.media.test_video import Decoded
from tests.patience import PATIENCE_S
from transom.encoder.media.torchcodec_frames import is_sure, is_usable
from transom.encoder.media.wire import VideoJob

Job = Callable[..., VideoJob]
ONE = 1 << 16
# a b / c d of the matrix, and what it does to pixels.
TURNS: dict[str, tuple[tuple[int, int, int, int], Callable[[np.ndarray], np.ndarray]]] = {
    "as stored": ((1, 0, 0, 1), lambda p: p),
    "a quarter clockwise": ((0, 1, -1, 0), lambda p: np.rot90(p, -1)),
    "a half": ((-1, 0, 0, -1), lambda p: np.rot90(p, 2)),
    "a quarter counterclockwise": ((0, -1, 1, 0), lambda p: np.rot90(p, 1)),
    "left and right": ((-1, 0, 0, 1), lambda p: p[:, ::-1]),
    "top and bottom": ((1, 0, 0, -1), lambda p: p[::-1]),
    "rows and columns": ((0, 1, 1, 0), lambda p: p.swapaxes(0, 1)),
    "both and turned": ((0, -1, -1, 0), lambda p: np.rot90(p.swapaxes(0, 1), 2)),
}


@cache
def stored() -> bytes:
    """An MP4 of pictures that no turn leaves as they are.

    Encoded once: x264 now and then gives other bytes for the same pictures.
    """
    buffer = io.BytesIO()
    rng = np.random.default_rng(5)
    blocks = rng.integers(0, 255, (6, 10, 3), dtype=np.uint8).repeat(16, 0).repeat(16, 1)
    with av.open(buffer, "w", format="mp4") as output:
        stream = output.add_stream("libx264", rate=10, options={"g": "6"})
        stream.width, stream.height, stream.pix_fmt = 160, 96, "yuv420p"
        for _ in range(24):
            output.mux(stream.encode(av.VideoFrame.from_ndarray(blocks, format="rgb24")))
        output.mux(stream.encode(None))
    return buffer.getvalue()


def turned(matrix: tuple[int, int, int, int]) -> memoryview:
    """The clip with a display matrix in its track header."""
    data = bytearray(stored())
    a, b, c, d = (value * ONE for value in matrix)
    struct.pack_into(">9i", data, data.index(b"tkhd") + 44, a, b, 0, c, d, 0, 0, 0, 1 << 30)
    return memoryview(bytes(data))


@pytest.mark.parametrize("kind", TURNS)
@pytest.mark.parametrize("decoder", ["pyav", "torchcodec"])
def test_frames_come_upright(kind: str, decoder: str, video_job: Job) -> None:
    """With torchcodec too, which is not asked for such clips."""
    matrix, turn = TURNS[kind]
    data = turned(matrix)
    assert is_sure(data)
    assert is_usable(data) == (kind == "as stored")
    if decoder == "torchcodec" and kind == "as stored":
        return  # test_torchcodec has those
    frames = Decoded(data, video_job(), decoder=decoder).frames
    plain = Decoded(turned((1, 0, 0, 1)), video_job()).frames
    assert len(frames) == len(plain) == 8
    for frame, original in zip(frames, plain, strict=True):
        np.testing.assert_array_equal(frame, turn(original))


@pytest.mark.parametrize("kind", TURNS)
def test_frames_are_turned_as_ffmpeg_does(kind: str, video_job: Job, tmp_path: Path) -> None:
    if shutil.which("ffmpeg") is None:
        pytest.skip("ffmpeg is not installed")
    data = turned(TURNS[kind][0])
    (tmp_path / "turned.mp4").write_bytes(data)
    command = ["ffmpeg", "-v", "error", "-i", str(tmp_path / "turned.mp4"), "-frames:v", "1"]
    command += ["-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    raw = subprocess.run(command, capture_output=True, check=True, timeout=PATIENCE_S).stdout
    frame = Decoded(data, video_job()).frames[0]
    theirs = np.frombuffer(raw, np.uint8).reshape(frame.shape)
    assert np.abs(frame.astype(int) - theirs).mean() < 1.0
