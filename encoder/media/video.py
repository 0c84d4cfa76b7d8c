"""A video's bytes to the frames that the model samples, one temporal patch at a time, and its sound.

Decode worker. First the packets are listed, which tells all frame times without decoding; then only
the stretches that hold sampled frames are decoded. At most one unit is held. Knows nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import av.error
import numpy as np
from av.video.reformatter import Interpolation
from numpy.typing import NDArray

from transom.encoder.media import audio
from transom.encoder.media.container import audio_stream, duration_s, open_container, video_stream
from transom.encoder.media.sampling import SamplePlan, sample_frames
from transom.encoder.media.wire import AudioJob, VideoJob
from transom.errors import MediaError
from transom.kernels.smart_resize import UnusableSizeError, smart_resize, video_max_pixels

Pixels = NDArray[np.uint8]
_UNORDERED = -1
# Containers with an index of keyframes; a jump in others lands anywhere.
_INDEXED_FORMATS = ("mov", "matroska")


@dataclass(frozen=True, slots=True)
class FrameIndex:
    """Where the frames of a stream are. Without times (`pts` empty) only their number is known."""

    pts: tuple[int, ...]  # of all shown frames, ascending, in ticks
    keyframes: tuple[int, ...]  # pts of those that decoding can start from, ascending
    count: int
    listed: int  # with those that the container says not to show
    times_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Clip:
    """Frames (height, width, 3), resized later to `target` (height, width)."""

    plan: SamplePlan
    height: int
    width: int
    target: tuple[int, int]
    has_sound: bool


@dataclass(frozen=True, slots=True)
class Unit:
    """`frames` is uint8 (1 to temporal_patch, height, width, 3)."""

    start_s: float
    frames: Pixels


@dataclass(frozen=True, slots=True)
class SoundPiece:
    """A piece of the sound track; `last` ends it."""

    samples: audio.Samples
    last: bool


@dataclass(frozen=True, slots=True)
class Note:
    """Something that the client should hear about."""

    text: str


def index_frames(container: Any, stream: Any) -> FrameIndex:
    """List the frames of a stream from its packets; raise MediaError when it has none."""
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
    except (av.error.InvalidDataError, av.error.EOFError):
        pass
    if not count:
        raise MediaError("video has no frame that can be decoded")
    shown = sorted(shown)
    if not timed or len(set(shown)) != count or not keys or _UNORDERED in keys:
        rate = float(stream.average_rate or stream.guessed_rate or 25)
        return FrameIndex((), (), count, listed, tuple(number / rate for number in range(count)))
    return FrameIndex(tuple(shown), tuple(sorted(keys)), count, listed, tuple(pts * base for pts in shown))


def _plan(index: FrameIndex, job: VideoJob) -> SamplePlan:
    span = index.times_s[-1] - index.times_s[0]
    if max(span, 0.0) > job.max_video_s:
        raise MediaError(f"video of {span:.1f} s, limit {job.max_video_s:g} s")
    return sample_frames(
        index.times_s,
        fps=job.fps,
        min_frames=job.min_frames,
        max_frames=job.max_frames,
        multiple=job.temporal_patch,
    )


def target_size(height: int, width: int, frames: int, job: VideoJob) -> tuple[int, int]:
    """Return the size that the model wants for the frames of a clip of so many sampled frames."""
    limit = video_max_pixels(
        frames,
        min_pixels=job.min_pixels,
        max_pixels=job.max_pixels,
        total_max_pixels=job.total_max_pixels,
        temporal_patch_size=job.temporal_patch,
    )
    try:
        target = smart_resize(
            height,
            width,
            factor=job.factor,
            min_pixels=job.min_pixels,
            max_pixels=limit,
            max_aspect_ratio=job.max_aspect_ratio,
        )
    except UnusableSizeError as error:
        raise MediaError(f"video of {width}x{height} pixels can't be used: {error}") from None
    units = -(-frames // job.temporal_patch)
    tokens = units * target[0] * target[1] // job.factor**2
    if tokens > job.max_tokens:
        raise MediaError(f"video costs {tokens} tokens, limit {job.max_tokens}")
    return target


def _decoded(container: Any, stream: Any, goals: frozenset[int] | None = None) -> Iterator[Any]:
    """Yield frames in presentation order; broken packets are skipped, the rest goes on.

    With `goals` (pts), frames that no other frame refers to are only decoded where they are goals.
    """
    codec = stream.codec_context
    try:
        for packet in container.demux(stream):
            if goals is not None:
                codec.skip_frame = "DEFAULT" if packet.pts in goals or packet.pts is None else "NONREF"
            try:
                yield from packet.decode()
            except av.error.InvalidDataError:
                continue
            except av.error.EOFError:
                return
    except (av.error.InvalidDataError, av.error.EOFError):
        return


def _by_count(container: Any, stream: Any, wanted: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """Yield (position in wanted, frame), counting frames from the start."""
    position = 0
    for number, frame in enumerate(_decoded(container, stream)):
        if position >= len(wanted):
            return
        if number == wanted[position]:
            yield position, frame
            position += 1


def _by_time(
    container: Any, stream: Any, index: FrameIndex, wanted: Sequence[int]
) -> Iterator[tuple[int, Any]]:
    """Yield (position in wanted, frame), jumping to a keyframe where that skips work.

    A frame that the stream lists but does not yield gives way to the next one that exists.
    """
    goals = [index.pts[number] for number in wanted]
    ends = frozenset(goals)
    keys = np.asarray(index.keyframes)
    jumps = container.format.name.startswith(_INDEXED_FORMATS)
    position = 0
    current = index.keyframes[0]
    while position < len(goals):
        start = int(keys[max(int(np.searchsorted(keys, goals[position], side="right")) - 1, 0)])
        jumped = jumps and start > current
        if jumped:
            container.seek(start, stream=stream, backward=True, any_frame=False)
        for frame in _decoded(container, stream, ends):
            if frame.pts is None:
                continue
            if jumped and frame.pts > start:
                # The container's own index is wrong: go through all frames instead.
                container.seek(index.keyframes[0], stream=stream, backward=True, any_frame=False)
                jumps = False
                break
            jumped = False
            current = max(current, frame.pts)
            if frame.pts < goals[position]:
                continue
            hit = position
            while position < len(goals) and goals[position] <= frame.pts:
                position += 1
            yield hit, frame
            if position >= len(goals) or (jumps and _jump_pays(keys, current, goals[position])):
                break
        else:
            return


def _jump_pays(keys: NDArray[np.int64], current: int, goal: int) -> bool:
    """Whether a keyframe lies between the frame just decoded and the next goal."""
    nearest = int(np.searchsorted(keys, goal, side="right")) - 1
    return nearest > 0 and int(keys[nearest]) > current


def _to_pixels(frame: Any, height: int, width: int) -> Pixels:
    """Return the upright RGB pixels of a frame, (height, width, 3); scaled where it has another size."""
    turns = (round(frame.rotation / 90) % 4) if frame.rotation else 0
    stored = (width, height) if turns % 2 == 0 else (height, width)
    pixels: Pixels = frame.to_ndarray(
        format="rgb24", width=stored[0], height=stored[1], interpolation=Interpolation.AREA
    )
    return np.rot90(pixels, turns) if turns else pixels


def _spared(size: tuple[int, int], target: tuple[int, int], job: VideoJob) -> tuple[int, int]:
    """Return the size to hand over frames in: their own, or a whole fraction of it when they are huge."""
    spare = min(size[0] // target[0], size[1] // target[1])
    if size[0] * size[1] <= job.full_decode_pixels or spare < 2:
        return size
    return size[0] // spare, size[1] // spare


def _upright_size(frame: Any) -> tuple[int, int]:
    turned = frame.rotation and round(frame.rotation / 90) % 2
    return (frame.width, frame.height) if turned else (frame.height, frame.width)


def _frames(data: memoryview, job: VideoJob) -> Iterator[FrameIndex | SamplePlan | tuple[int, Any] | Note]:
    """Yield the plan, then (position, frame) of the sampled frames that exist, then notes."""
    with open_container(data, "video") as container:
        stream = video_stream(container)
        width, height = stream.codec_context.width, stream.codec_context.height
        if width * height > job.max_image_pixels:
            raise MediaError(f"video of {width}x{height} pixels a frame, limit {job.max_image_pixels}")
        claimed = duration_s(container, stream)
        if claimed is not None and claimed > job.max_video_s:
            raise MediaError(f"video of {claimed:.1f} s, limit {job.max_video_s:g} s")
        claimed_frames = int(stream.frames)
        index = index_frames(container, stream)
    plan = _plan(index, job)
    yield plan
    given = 0
    # A fresh demuxer: seeking back fails in streams that FFmpeg has no index of.
    with open_container(data, "video") as container:
        stream = video_stream(container)
        stream.codec_context.thread_count = job.threads
        if job.threads > 1:
            stream.thread_type = "AUTO"
        found = (
            _by_time(container, stream, index, plan.indices)
            if index.pts
            else _by_count(container, stream, plan.indices)
        )
        for position, frame in found:
            given += 1
            yield position, frame
    if not given:
        raise MediaError("video has no frame that can be decoded")
    missing_tail = claimed_frames - index.listed
    if given < len(plan.indices):
        yield Note(f"video is damaged: {given} of {len(plan.indices)} sampled frames could be decoded")
    elif missing_tail > max(1, claimed_frames // 50):
        yield Note(f"video is truncated: {index.listed} of {claimed_frames} frames exist")


def decode_video(data: memoryview, job: VideoJob) -> Iterator[Clip | Unit | SoundPiece | Note]:
    """Yield the Clip, then its Units, each preceded by the sound up to its end, then Notes.

    Raise MediaError when nothing can be decoded or a limit is passed.
    """
    frames = _frames(data, job)
    plan = next(frames)
    assert isinstance(plan, SamplePlan)
    sound = _Sound(data, job.sound)
    try:
        yield from _units(frames, plan, job, sound)
        yield from sound.rest()
    finally:
        sound.close()


def _units(frames: Iterator[Any], plan: SamplePlan, job: VideoJob, sound: _Sound) -> Iterator[Any]:
    pending: list[Pixels] = []
    start_s = 0.0
    size: tuple[int, int] | None = None
    for item in frames:
        if isinstance(item, Note):
            yield item
            continue
        position, frame = item
        if size is None:
            size = _upright_size(frame)
            target = target_size(*size, len(plan.indices), job)
            size = _spared(size, target, job)
            yield Clip(plan, size[0], size[1], target, sound.present)
        if not pending:
            start_s = plan.timestamps[position]
        pending.append(_to_pixels(frame, size[0], size[1]))
        if len(pending) == job.temporal_patch:
            later = position + 1
            yield from sound.until(plan.timestamps[later] if later < len(plan.timestamps) else None)
            yield Unit(start_s, np.stack(pending))
            pending = []
    if pending:
        yield from sound.rest()
        yield Unit(start_s, np.stack(pending))


class _Sound:
    """The sound track of a clip, decoded as far as the pictures need it."""

    def __init__(self, data: memoryview, job: AudioJob | None) -> None:
        self.present = False
        self._pieces: Iterator[tuple[audio.Samples, bool]] | None = None
        self._rate = job.sampling_rate if job else 1
        self._given = 0
        if job is None:
            return
        pieces = self._open(data, job)
        first = next(pieces, None)
        if first is not None:
            self.present = True
            self._pieces = pieces
            self._held: tuple[audio.Samples, bool] | None = first

    @staticmethod
    def _open(data: memoryview, job: AudioJob) -> Iterator[tuple[audio.Samples, bool]]:
        with open_container(data, "video") as container:
            stream = audio_stream(container)
            if stream is None:
                return
            try:
                yield from audio.decode_track(container, stream, job)
            except MediaError as error:
                # A track without samples is no sound; one that is too long is an error.
                if "limit" in error.message:
                    raise

    def until(self, time_s: float | None) -> Iterator[SoundPiece]:
        """Yield pieces until the track is given up to a time; None: to its end."""
        while self._pieces is not None and (time_s is None or self._given < time_s * self._rate):
            if self._held is None:
                self._pieces = None
                return
            samples, last = self._held
            self._given += len(samples)
            self._held = None if last else next(self._pieces, None)
            yield SoundPiece(samples, self._held is None)
            if self._held is None:
                self._pieces = None

    def rest(self) -> Iterator[SoundPiece]:
        return self.until(None)

    def close(self) -> None:
        if self._pieces is not None:
            self._pieces.close()  # type: ignore[attr-defined]
            self._pieces = None
