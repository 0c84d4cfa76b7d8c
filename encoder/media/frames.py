"""Finds single frames of a video stream: goes on from where it stands, or jumps to a keyframe.

Decode worker. A jump is trusted only when it lands on the very keyframe that was asked for, so what is
found never depends on a container's own index. Knows nothing of units, pixels or jobs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import av.error

from transom.encoder.media.container import NO_FURTHER, only, open_container, video_stream

# A decoder holds frames back for reordering: a shorter way to the next keyframe is gone without a jump.
_WORTH_A_JUMP = 8  # frames
_BEFORE_ALL = -(1 << 62)


class _MissedError(Exception):
    """A jump did not land on its keyframe."""


class FrameReader:
    """The frames of one stream by their stamps: pts, or numbers from 0 where there are no times.

    `can_jump` is False where stamps are numbers or the container can't seek: then frames are found by
    going through the stream, from its start when they lie behind.
    """

    def __init__(
        self, data: memoryview, *, timed: bool, can_jump: bool, frame_ticks: int, threads: int
    ) -> None:
        self._data = data
        self._timed = timed
        self._can_jump = can_jump and timed
        self._jump_ticks = _WORTH_A_JUMP * frame_ticks
        self._threads = threads
        self._stack = ExitStack()
        self._container: Any = None
        self._stream: Any = None
        self._frames: Iterator[tuple[int, Any]] | None = None
        self._goals: frozenset[int] = frozenset()
        self._passed = _BEFORE_ALL  # the last frame that was given or left out
        self._held: tuple[int, Any] | None = None
        self._nothing_from: int | None = None  # no frame has this stamp or a later one

    def close(self) -> None:
        """Let go of the container."""
        self._frames = self._held = None
        self._stack.close()

    def first(self) -> Any | None:
        """Return the first frame that can be decoded, or None."""
        self._goals = frozenset()
        self._open()
        self._frames = self._decoded(None)
        found = next(self._frames, None)
        self._frames = None
        return found[1] if found else None

    def starts_at(self, key: int) -> bool:
        """Tell whether decoding can start at a keyframe: a jump gets there, and a frame comes of it."""
        self._goals = frozenset()
        try:
            self._jump(key)
            for stamp, _ in self._decoded(key):
                if stamp >= key:  # those before belong to the keyframe before
                    return stamp == key
        except (_MissedError, av.error.FFmpegError):
            pass
        return False

    def find(
        self, goals: Sequence[int], keys: Sequence[int], begin: int, stop: int, end: int | None
    ) -> Iterator[tuple[int, Any]]:
        """Yield (position in goals, frame) for positions from `begin` to `stop`, ascending.

        A frame that the stream lists but does not give lets the next one stand in that comes before the
        next goal, or `end`; else it is left out. Frames that nothing refers to are decoded only if they
        are goals, so `goals` must hold those of later calls too that go on from here.
        """
        self._goals = frozenset(goals)
        position = begin
        while position < stop:
            found = self._at_least(goals[position], keys[position])
            if found is None:
                return
            stamp, frame = found
            limit = goals[stop] if stop < len(goals) else end
            if limit is not None and stamp >= limit:
                self._held = found
                return
            while position + 1 < stop and goals[position + 1] <= stamp:
                position += 1
            self._passed = stamp
            yield position, frame
            position += 1

    def _at_least(self, goal: int, key: int) -> tuple[int, Any] | None:
        """Return the first frame at or after a goal; None at the end of the stream."""
        if self._nothing_from is not None and goal >= self._nothing_from:
            return None
        jumped = self._approach(goal, key)
        found = self._next(goal, key)
        if jumped and (found is None or found[0] != goal):
            # Some streams call a frame a keyframe that only leads up to a full picture.
            again = self._from_earlier(goal, key)
            if again is not None and (found is None or again[0] <= found[0]):
                return again
            if found is not None:
                self._frames = None
                self._approach(goal, key)
                found = self._next(goal, key)
        if found is None:
            self._nothing_from = goal
        return found

    def _approach(self, goal: int, key: int) -> bool:
        """Get to where decoding leads to the goal; tell whether that took a jump."""
        if self._frames is not None and self._passed < goal:
            if not self._can_jump or key - self._passed <= self._jump_ticks:
                return False
            if self._held is not None and self._held[0] >= key:
                return False
        self._held = None
        self._passed = _BEFORE_ALL
        if not self._can_jump:
            self._open()
            self._frames = self._decoded(None)
            return False
        self._jump(key)
        self._frames = self._decoded(key)
        return True

    def _next(self, goal: int, key: int) -> tuple[int, Any] | None:
        held, self._held = self._held, None
        if held is not None and held[0] >= goal:
            return held
        assert self._frames is not None
        try:
            for found in self._frames:
                if found[0] >= goal:
                    return found
                self._passed = max(self._passed, found[0])
        except _MissedError:
            # The container's own index is wrong: go through all packets instead, decoding none before.
            self._open()
            self._frames = self._decoded(key, from_start=True)
            return self._next(goal, key)
        self._frames = None
        return None

    def _from_earlier(self, goal: int, key: int) -> tuple[int, Any] | None:
        self._jump(key - 1)
        self._frames = self._decoded(key - 1, exact=False)
        self._held = None
        self._passed = _BEFORE_ALL
        try:
            for found in self._frames:
                if found[0] >= goal:
                    return found
                self._passed = max(self._passed, found[0])
        except _MissedError:
            pass
        self._frames = None
        return None

    def _open(self) -> None:
        """Start anew: streams that FFmpeg has no index of can't be sought back."""
        self._stack.close()
        self._container = self._stack.enter_context(open_container(self._data, "video"))
        self._stream = video_stream(self._container)
        only(self._container, self._stream)
        self._stream.codec_context.thread_count = self._threads
        if self._threads > 1:
            self._stream.thread_type = "AUTO"

    def _jump(self, key: int) -> None:
        if self._container is None:
            self._open()
        try:
            self._container.seek(key, stream=self._stream, backward=True, any_frame=False)
        except av.error.FFmpegError:
            self._open()

    def _decoded(
        self, key: int | None, *, exact: bool = True, from_start: bool = False
    ) -> Iterator[tuple[int, Any]]:
        """Yield (stamp, frame) in presentation order; broken packets are skipped, the rest goes on.

        With a `key`, decoding begins at that keyframe (not `exact`: at any up to it); what comes before
        it is left out. Raises _MissedError when it does not come.
        """
        codec = self._stream.codec_context
        number = 0
        begun = key is None
        for packet in self._packets():
            if not begun:
                begun = self._begins(packet, key, exact, from_start)
                if not begun:
                    continue
            if self._goals and self._timed:
                needed = packet.pts in self._goals or packet.pts is None
                codec.skip_frame = "DEFAULT" if needed else "NONREF"
            try:
                for frame in packet.decode():
                    if not self._timed:
                        yield number, frame
                        number += 1
                    elif frame.pts is not None:
                        yield frame.pts, frame
            except av.error.InvalidDataError:
                continue
            except av.error.EOFError:
                return
        if not begun and not from_start:
            raise _MissedError

    @staticmethod
    def _begins(packet: Any, key: int | None, exact: bool, from_start: bool) -> bool:
        if packet.size == 0 or not packet.is_keyframe or packet.pts is None or key is None:
            return False
        if packet.pts > key and not from_start:
            raise _MissedError
        return bool(packet.pts == key or not exact)

    def _packets(self) -> Iterator[Any]:
        try:
            yield from self._container.demux(self._stream)
        except NO_FURTHER:
            return
