"""Finds single frames of a video stream with torchcodec, and with PyAV what torchcodec does not give.

Decode worker. The only place that knows torchcodec; the first clip loads torch into the process. Which frames
there are was found by PyAV, and a frame counts only if it has the very time that was asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import av.error
import numpy as np

from transom.encoder.media.container import MemoryReader, open_container, video_stream
from transom.encoder.media.frames import FrameReader
from transom.encoder.media.upright import Turn, turn_of
from transom.encoder.media.wire import SliceJob

logger = logging.getLogger(__name__)

_HEAD_BYTES = 64


def is_sure(data: memoryview) -> bool:
    """Tell whether FFmpeg takes the bytes for MP4 or Matroska and for nothing else.

    torchcodec can't be told which demuxers it may use, and some open what a file names. Those are known by
    text: MP4 begins with a zero byte, where text ends, and no text matches better than a Matroska header with
    its document type does.
    """
    head = bytes(data[:_HEAD_BYTES])
    if head[:1] == b"\0" and head[4:8] == b"ftyp":
        return True
    return head[:4] == b"\x1aE\xdf\xa3" and any(kind in head for kind in (b"matroska", b"webm"))


def is_usable(data: memoryview) -> bool:
    """Tell whether torchcodec may have a clip: sure of its container, and shown as it is stored."""
    if not is_sure(data):
        return False
    try:
        with open_container(data, "video") as container:
            frame = next(container.decode(video_stream(container)), None)
    except av.error.FFmpegError:
        return False
    return frame is not None and turn_of(frame) == Turn()


class TorchcodecReader:
    """As FrameReader, but frames may come as upright pixels, (height, width, 3) in uint8."""

    def __init__(self, data: memoryview, job: SliceJob, fallback: FrameReader) -> None:
        self._data = data
        self._fallback = fallback
        self._size = (job.height, job.width)
        self._threads = job.threads
        self._decoder: Any = None
        with open_container(data, "video") as container:
            stream = video_stream(container)
            self._tick_s = stream.time_base
            self._stream_index = stream.index

    def close(self) -> None:
        """Let go of the decoders."""
        self._decoder = None
        self._fallback.close()

    def find(
        self, goals: Sequence[int], keys: Sequence[int], begin: int, stop: int, end: int | None
    ) -> Iterator[tuple[int, Any]]:
        """As FrameReader.find. Each frame is tried anew, so that what comes of it hangs on nothing before."""
        for position in range(begin, stop):
            pixels = self._at(goals[position])
            if pixels is not None:
                yield position, pixels
            else:
                yield from self._fallback.find(goals, keys, position, position + 1, end)

    def _at(self, goal: int) -> np.ndarray | None:
        """Return the pixels of the frame with a stamp; None unless torchcodec has just that one."""
        try:
            if self._decoder is None:
                self._decoder = self._open()
            # In the middle of its first tick: rounding leads to no neighbour.
            frame = self._decoder.get_frame_played_at(float((goal + 0.5) * self._tick_s))
        except (RuntimeError, ValueError, IndexError, OSError, ImportError) as error:
            logger.debug("torchcodec: %s", error)
            self._decoder = None  # what it does after an error depends on the error
            return None
        if abs(frame.pts_seconds - float(goal * self._tick_s)) > float(self._tick_s) / 4:
            return None
        pixels: np.ndarray = frame.data.numpy()
        return pixels if pixels.shape == (*self._size, 3) else None

    def _open(self) -> Any:
        from torchcodec.decoders import VideoDecoder

        return VideoDecoder(
            MemoryReader(self._data),
            stream_index=self._stream_index,
            dimension_order="NHWC",
            num_ffmpeg_threads=self._threads,
            seek_mode="exact",  # anything else fails on variable rates
        )
