"""Where the frames of a video stream are, from its packets: nothing is decoded.

Decode worker. Tells all frame times and the places that decoding can start from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transom.encoder.media.container import NO_FURTHER, only
from transom.errors import MediaError

_UNORDERED = -1


@dataclass(frozen=True, slots=True)
class FrameIndex:
    """Where the frames of a stream are. Without times (`pts` empty) only their number is known."""

    pts: tuple[int, ...]  # of all shown frames, ascending, in ticks
    keyframes: tuple[int, ...]  # pts of those that decoding can start from, ascending
    count: int
    listed: int  # with those that the container says not to show
    times_s: tuple[float, ...]

    @property
    def frame_ticks(self) -> int:
        """The mean distance of frames."""
        return max(1, (self.pts[-1] - self.pts[0]) // max(1, self.count - 1)) if self.pts else 1


def index_frames(container: Any, stream: Any) -> FrameIndex:
    """List the frames of a stream from its packets; raise MediaError when it has none."""
    only(container, stream)
    base = float(stream.time_base or 0)
    shown: list[int] = []
    keys: list[int] = []
    count = listed = 0
    timed = base > 0
    try:
        for packet in container.demux(stream):
            # A file that ends early ends within a packet, which is marked.
            if packet.size == 0 or packet.is_corrupt:
                continue
            # Nothing before the first keyframe can be decoded.
            if not keys and not packet.is_keyframe:
                continue
            if packet.is_keyframe:
                keys.append(packet.pts if packet.pts is not None else _UNORDERED)
            listed += 1
            if packet.is_discard:
                continue
            count += 1
            if packet.pts is None:
                timed = False
            else:
                shown.append(packet.pts)
    except NO_FURTHER:
        pass
    if not count:
        raise MediaError("video has no frame that can be decoded")
    shown = sorted(shown)
    if not timed or len(set(shown)) != count or not keys or _UNORDERED in keys:
        rate = float(stream.average_rate or stream.guessed_rate or 25)
        return FrameIndex((), (), count, listed, tuple(number / rate for number in range(count)))
    return FrameIndex(tuple(shown), tuple(sorted(keys)), count, listed, tuple(pts * base for pts in shown))
