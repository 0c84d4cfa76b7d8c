"""What a decode worker keeps open of a clip between its jobs: the demuxers where the last job left them.

Decode worker. Only speed rests on it: a job that finds nothing open begins anew and gives the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack

from transom.encoder.media.audio import Samples, Track, open_track
from transom.encoder.media.frames import FrameReader
from transom.encoder.media.torchcodec_frames import TorchcodecReader
from transom.encoder.media.video import Pixels, decode_slice, open_frames
from transom.encoder.media.wire import SliceJob, TrackJob

_MOST_CLIPS = 8
_MOST_BYTES = 1024**3


class ClipSession:
    """One clip: its frames and its sound, each at some place."""

    def __init__(self, data: memoryview) -> None:
        self.size_bytes = len(data)
        self._data = data
        self._frames: FrameReader | TorchcodecReader | None = None
        self._open = ExitStack()
        self._track: Track | None = None
        self._pieces: Iterator[tuple[Samples, bool]] | None = None
        self._next_piece = 0

    def close(self) -> None:
        """Let go of everything."""
        self._open.close()
        if self._frames is not None:
            self._frames.close()

    def units(self, job: SliceJob) -> Iterator[tuple[int, Pixels]]:
        """Yield the units of a slice, see `decode_slice`."""
        if self._frames is None:
            self._frames = open_frames(self._data, job)
        return decode_slice(self._frames, job)

    def pieces(self, job: TrackJob) -> Iterator[tuple[Samples, bool]]:
        """Yield the pieces of the sound track that a job asks for."""
        if self._pieces is None or self._next_piece != job.first:
            self._open.close()
            self._track = self._open.enter_context(open_track(self._data, job.sound))
            self._pieces = self._track.pieces()
            for _ in zip(range(job.first), self._pieces, strict=False):
                pass
            self._next_piece = job.first
        for _ in range(job.pieces):
            samples, last = next(self._pieces)
            self._next_piece += 1
            yield samples, last
            if last:
                return

    def notes(self) -> tuple[str, ...]:
        """Return what was wrong with the sound track, once its last piece is out."""
        return tuple(self._track.notes) if self._track is not None else ()


class Sessions:
    """The clips that are open in this process; the least used one goes when they are too many."""

    def __init__(self) -> None:
        self._open: OrderedDict[int, ClipSession] = OrderedDict()

    def of(self, clip: int, data: memoryview) -> ClipSession:
        """Return the session of a clip, opened over its bytes if there is none."""
        session = self._open.get(clip)
        if session is None:
            session = self._open[clip] = ClipSession(data)
        self._open.move_to_end(clip)
        while len(self._open) > 1 and (
            len(self._open) > _MOST_CLIPS
            or sum(open_one.size_bytes for open_one in self._open.values()) > _MOST_BYTES
        ):
            self.forget(next(iter(self._open)))
        return session

    def forget(self, clip: int) -> None:
        """Close a clip's session if it has one."""
        session = self._open.pop(clip, None)
        if session is not None:
            session.close()
