"""Videos as files: what a lossy codec makes of generated frames.

Used by evaluation and by whoever needs a sample file. Knows nothing of models.
"""

from __future__ import annotations

import io
from fractions import Fraction

import av
import numpy as np

from transom.nano.data.images import Pixels
from transom.nano.data.videos import Video


def encode_h264(video: Video, crf: int = 26) -> bytes:
    """Render all frames of a video into an MP4 without sound."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        height, width = video.frame(0).shape[:2]
        stream = container.add_stream(
            "libx264", rate=video.fps, options={"crf": str(crf), "preset": "veryfast"}
        )
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.time_base = Fraction(1, video.fps)
        for index in range(video.frame_count):
            frame = av.VideoFrame.from_ndarray(video.frame(index / video.fps), format="rgb24")
            frame.pts = index
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def decode_frames(content: bytes) -> list[Pixels]:
    """Decode all frames as RGB."""
    with av.open(io.BytesIO(content), "r") as container:
        return [np.asarray(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]


def through_h264(video: Video) -> Video:
    """Return the same video as it looks after encoding and decoding."""
    frames = decode_frames(encode_h264(video))

    def frame(t: float) -> Pixels:
        return frames[min(round(t * video.fps), len(frames) - 1)]

    return Video(frame, video.duration_s, video.fps, video.facts)
