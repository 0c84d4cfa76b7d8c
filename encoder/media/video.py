"""A clip before and while it is decoded: its plan, then the frames of it in units of a temporal patch.

Decode worker. The packets tell all frame times; then only the stretches that hold sampled frames are
decoded, in runs that need nothing of each other. At most one unit is held. Knows nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import av.error
import numpy as np
from av.video.reformatter import Interpolation
from numpy.typing import NDArray

from transom.encoder.media.container import audio_stream, duration_s, only, open_container, video_stream
from transom.encoder.media.cutting import cut
from transom.encoder.media.frame_index import FrameIndex, index_frames
from transom.encoder.media.frames import FrameReader
from transom.encoder.media.sampling import SamplePlan, sample_frames
from transom.encoder.media.torchcodec_frames import TorchcodecReader, is_usable
from transom.encoder.media.upright import turn_of
from transom.encoder.media.wire import ClipHead, SliceJob, VideoJob
from transom.errors import MediaError
from transom.kernels.smart_resize import UnusableSizeError, smart_resize, video_max_pixels
from transom.messages import MediaSize

Pixels = NDArray[np.uint8]
# What is missing at the end before a clip counts as cut off: containers claim roughly.
_MISSING_SHARE = 0.02
_MISSING_S = 1.0


def plan_clip(data: memoryview, job: VideoJob) -> ClipHead:
    """List a clip's frames, choose from them, cut them into runs, and look at the first one.

    Raise MediaError when nothing can be decoded or a limit is passed.
    """
    index, note = _listed(data, job)
    sampled = _sampled(index, job)
    timed = bool(index.pts)
    reader = FrameReader(data, timed=timed, can_jump=True, frame_ticks=index.frame_ticks, threads=job.threads)
    with closing(reader):
        frame = reader.first()
        if frame is None:
            raise MediaError("video has no frame that can be decoded")
        size = turn_of(frame).size(frame.height, frame.width)
        can_jump = timed and len(index.keyframes) > 1 and _can_jump(reader, index)
    target = target_size(*size, len(sampled.indices), job)
    sound_s = _sound_s(data) if job.sound is not None else None
    goals = [index.pts[number] for number in sampled.indices] if timed else list(sampled.indices)
    # Without a way to jump all frames are reached from the first keyframe.
    keyframes = index.keyframes if can_jump else index.keyframes[:1] if timed else (0,)
    height, width = _spared(size, target, job)
    return ClipHead(
        timestamps=sampled.timestamps,
        height=height,
        width=width,
        target=target,
        runs=tuple(cut(goals, keyframes, job.temporal_patch)),
        timed=timed,
        can_jump=can_jump,
        frame_ticks=index.frame_ticks,
        has_sound=sound_s is not None,
        notes=(note,) if note else (),
        size=MediaSize(
            pixels=size[0] * size[1],
            video_s=_length_s(index),
            audio_s=sound_s or 0.0,
            visual_tokens=_tokens(target, len(sampled.indices), job),
        ),
    )


def _can_jump(reader: FrameReader, index: FrameIndex) -> bool:
    """Whether the container can be sought and its keyframes are some, tried at two of them.

    Streams that refresh the picture bit by bit call frames so that only lead up to a full one.
    """
    keys = index.keyframes
    return all(reader.starts_at(key) for key in {keys[len(keys) // 2], keys[len(keys) * 3 // 4]})


def _listed(data: memoryview, job: VideoJob) -> tuple[FrameIndex, str]:
    """Return where the frames are, and words on what is missing of them."""
    with open_container(data, "video") as container:
        stream = video_stream(container)
        width, height = stream.codec_context.width, stream.codec_context.height
        if width * height > job.max_image_pixels:
            raise MediaError(f"video of {width}x{height} pixels a frame, limit {job.max_image_pixels}")
        claimed_s = duration_s(container, stream)
        if claimed_s is not None and claimed_s > job.max_video_s:
            raise MediaError(f"video of {claimed_s:.1f} s, limit {job.max_video_s:g} s")
        # The length that a container claims may be that of a longer sound track.
        own_s = claimed_s if stream.duration or len(container.streams) == 1 else None
        claimed = int(stream.frames)
        index = index_frames(container, stream)
    return index, _missing(index, claimed, own_s)


def _missing(index: FrameIndex, claimed: int, claimed_s: float | None) -> str:
    """Return words on what a container claims and does not have, if it is more than imprecision."""
    if claimed - index.listed > max(1, claimed * _MISSING_SHARE):
        return f"video is truncated: {index.listed} of {claimed} frames exist"
    if claimed or claimed_s is None or not index.pts:  # a count of frames is the better claim
        return ""
    span_s = index.times_s[-1] - index.times_s[0]
    if claimed_s - span_s > max(_MISSING_S, claimed_s * _MISSING_SHARE):
        return f"video is truncated: {span_s:.1f} of {claimed_s:.1f} s exist"
    return ""


def _sampled(index: FrameIndex, job: VideoJob) -> SamplePlan:
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


def _length_s(index: FrameIndex) -> float:
    """Return how long the frames that exist last; the last one as long as all do on average."""
    span_s = max(index.times_s[-1] - index.times_s[0], 0.0)
    return span_s * index.count / max(1, index.count - 1)


def _sound_s(data: memoryview) -> float | None:
    """Return the length that the clip's sound track claims, 0 if it claims none.

    None: there is no track of which at least something can be decoded.
    """
    with open_container(data, "video") as container:
        stream = audio_stream(container)
        if stream is None:
            return None
        claimed_s = float(stream.duration * stream.time_base) if stream.duration and stream.time_base else 0.0
        only(container, stream)
        try:
            for packet in container.demux(stream):
                try:
                    if any(frame.samples for frame in packet.decode()):
                        return max(claimed_s, 0.0)
                except (av.error.InvalidDataError, av.error.PatchWelcomeError):
                    continue
        except av.error.FFmpegError:
            pass
    return None


def _tokens(target: tuple[int, int], frames: int, job: VideoJob) -> int:
    return -(-frames // job.temporal_patch) * target[0] * target[1] // job.factor**2


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
    tokens = _tokens(target, frames, job)
    if tokens > job.max_tokens:
        raise MediaError(f"video costs {tokens} tokens, limit {job.max_tokens}")
    return target


def _to_pixels(frame: Any, height: int, width: int) -> Pixels:
    """Return the upright RGB pixels of a frame, (height, width, 3); scaled where it has another size."""
    if isinstance(frame, np.ndarray):
        return frame
    turn = turn_of(frame)
    stored = turn.size(height, width)
    # One thread: else each frame starts as many as there are cores, which is slower and may fail.
    pixels: Pixels = frame.to_ndarray(
        format="rgb24", height=stored[0], width=stored[1], interpolation=Interpolation.AREA, threads=1
    )
    return turn.apply(pixels)


def _spared(size: tuple[int, int], target: tuple[int, int], job: VideoJob) -> tuple[int, int]:
    """Return the size to hand over frames in: their own, or a whole fraction of it when they are huge."""
    spare = min(size[0] // target[0], size[1] // target[1])
    if size[0] * size[1] <= job.full_decode_pixels or spare < 2:
        return size
    return size[0] // spare, size[1] // spare


def open_frames(data: memoryview, job: SliceJob) -> FrameReader | TorchcodecReader:
    """Return what finds the frames of a clip's slices; the caller closes it."""
    reader = FrameReader(
        data, timed=job.timed, can_jump=job.can_jump, frame_ticks=job.frame_ticks, threads=job.threads
    )
    if job.decoder == "torchcodec" and job.timed and job.can_jump and is_usable(data):
        return TorchcodecReader(data, job, reader)
    return reader


def decode_slice(reader: FrameReader | TorchcodecReader, job: SliceJob) -> Iterator[tuple[int, Pixels]]:
    """Yield (position of its first frame among all sampled ones, frames) of the units that exist.

    The frames of a unit are (1 to temporal_patch, height, width, 3); a unit none of whose frames can be
    decoded is left out.
    """
    pending: list[Pixels] = []
    first = 0
    for position, frame in reader.find(job.goals, job.keys, job.begin, job.stop, job.end):
        number = job.first + position
        if pending and number // job.temporal_patch != first // job.temporal_patch:
            yield first, np.stack(pending)
            pending = []
        if not pending:
            first = number
        pending.append(_to_pixels(frame, job.height, job.width))
        if number % job.temporal_patch == job.temporal_patch - 1:
            yield first, np.stack(pending)
            pending = []
    if pending:
        yield first, np.stack(pending)
