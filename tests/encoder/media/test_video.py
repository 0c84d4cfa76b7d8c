"""Sampled frames against an independent decode of all frames, sound beside them, and damage."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import av
import numpy as np
import pytest

from transom.encoder.media.container import open_container, video_stream
from transom.encoder.media.cutting import slices
from transom.encoder.media.frame_index import index_frames
from transom.encoder.media.sampling import sample_frames
from transom.encoder.media.session import ClipSession
from transom.encoder.media.video import plan_clip
from transom.encoder.media.wire import AudioJob, ClipHead, SliceJob, TrackJob, VideoJob
from transom.errors import MediaError

Job = Callable[..., VideoJob]
Make = Callable[..., memoryview]
Number = Callable[[np.ndarray], int]


class Unit:
    """Frames of one temporal patch."""

    def __init__(self, position: int, frames: np.ndarray) -> None:
        self.position = position
        self.frames = frames


class Decoded:
    """All that a clip gives. Runs are decoded last one first, each by a session of its own, if not told
    otherwise: any order and any worker must give the same."""

    def __init__(
        self,
        data: memoryview,
        job: VideoJob,
        *,
        order: Callable[[int], Iterable[int]] = lambda count: reversed(range(count)),
        one_session: bool = False,
        slice_units: int = 8,
        decoder: str = "pyav",
    ) -> None:
        self.head = head = plan_clip(data, job)
        with open_container(data, "video") as container:
            times = index_frames(container, video_stream(container)).times_s
        self.indices = sample_frames(
            times, fps=job.fps, min_frames=job.min_frames, max_frames=job.max_frames
        ).indices
        common = ClipSession(data)
        found: dict[int, np.ndarray] = {}
        for number in order(len(head.runs)):
            run = head.runs[number]
            session = common if one_session else ClipSession(data)
            for begin, stop in slices(len(run.goals), slice_units, job.temporal_patch):
                sliced = slice_job(head, number, begin, stop, job, decoder)
                for position, frames in session.units(sliced):
                    assert position not in found
                    found[position] = frames
            if session is not common:
                session.close()
        self.units = [Unit(position, found[position]) for position in sorted(found)]
        self.frames = [frame for unit in self.units for frame in unit.frames]
        for unit in self.units:
            assert unit.frames.dtype == np.uint8
            assert unit.frames.shape[1:] == (head.height, head.width, 3)
        listed = [goal for run in head.runs for goal in run.goals]
        assert listed == sorted(set(listed))
        assert len(listed) == len(head.timestamps)


def slice_job(
    head: ClipHead, number: int, begin: int, stop: int, job: VideoJob, decoder: str = "pyav"
) -> SliceJob:
    run = head.runs[number]
    return SliceJob(
        clip=1, first=run.first, goals=run.goals, keys=run.keys, begin=begin, stop=stop, end=run.end,
        height=head.height, width=head.width, temporal_patch=job.temporal_patch, timed=head.timed,
        can_jump=head.can_jump, frame_ticks=head.frame_ticks, threads=job.threads, decoder=decoder,
    )  # fmt: skip


def all_frames(data: memoryview, wanted: Collection[int] = ()) -> tuple[dict[int, np.ndarray], list[float]]:
    """Decode every frame one after another: the upright pixels of the wanted ones, the times of all."""
    frames, times = {}, []
    with av.open(io.BytesIO(data)) as container:
        for number, frame in enumerate(container.decode(video=0)):
            times.append(float(frame.time or 0))
            if number in wanted:
                pixels = frame.to_ndarray(format="rgb24")
                frames[number] = np.rot90(pixels, round(frame.rotation / 90) % 4)
    return frames, times


@pytest.mark.parametrize(
    ("container", "codec", "count", "gop"),
    [
        ("mp4", "libx264", 95, 12),
        ("mp4", "libx264", 300, 250),
        ("webm", "libvpx-vp9", 60, 20),
        ("matroska", "libx264", 120, 10),
        ("mpegts", "libx264", 95, 12),
        ("avi", "mpeg4", 70, 12),
        ("mp4", "libx265", 40, 10),
    ],
)
def test_sampled_frames_are_the_ones_named(
    container: str, codec: str, count: int, gop: int, video_job: Job, make_video: Make, frame_number: Number
) -> None:
    decoded = Decoded(make_video(count, container=container, codec=codec, gop=gop), video_job())
    plan = sample_frames([n / 10 for n in range(count)], fps=1, min_frames=8, max_frames=128)
    assert [frame_number(frame) for frame in decoded.frames] == list(plan.indices)
    assert decoded.indices == plan.indices
    assert decoded.head.timestamps == pytest.approx(plan.timestamps, abs=0.002)
    assert [unit.position for unit in decoded.units] == list(range(0, len(plan.indices), 2))
    assert decoded.head.notes == ()


@pytest.mark.parametrize("pix_fmt", ["yuv420p", "yuv420p10le", "yuv444p"])
def test_frames_equal_an_independent_decode_bit_for_bit(
    pix_fmt: str, video_job: Job, make_video: Make
) -> None:
    data = make_video(130, gop=10, pix_fmt=pix_fmt, size=(162, 98) if pix_fmt != "yuv444p" else (161, 99))
    decoded = Decoded(data, video_job())
    frames, _ = all_frames(data, decoded.indices)
    for index, frame in zip(decoded.indices, decoded.frames, strict=True):
        np.testing.assert_array_equal(frame, frames[index])


@pytest.mark.parametrize("gop", [5, 300])
def test_jumping_between_keyframes_changes_nothing(
    gop: int, video_job: Job, make_video: Make, frame_number: Number
) -> None:
    data = make_video(900, gop=gop, fps=30)
    job = video_job(fps=1, min_frames=2, max_frames=16)
    decoded = Decoded(data, job)
    assert [frame_number(frame) for frame in decoded.frames] == list(decoded.indices)
    assert len(decoded.frames) == 16


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
def test_short_clips_give_what_they_have(
    count: int, video_job: Job, make_video: Make, frame_number: Number
) -> None:
    decoded = Decoded(make_video(count), video_job(min_frames=16, max_frames=16))
    got = [frame_number(frame) for frame in decoded.frames]
    assert got == sorted(set(got))
    assert got[0] == 0
    assert len(got) == (count if count < 3 else count // 2 * 2)


def test_variable_rate_uses_the_true_times(video_job: Job, make_video: Make, frame_number: Number) -> None:
    times = [0, 40, 80, 1000, 1040, 3000, 3500, 3540, 7000, 7040, 7080, 9000]
    decoded = Decoded(make_video(12, container="matroska", times_ms=times), video_job())
    indices = decoded.indices
    assert [frame_number(frame) for frame in decoded.frames] == list(indices)
    assert decoded.head.timestamps == pytest.approx([times[i] / 1000 for i in indices], abs=0.002)


def test_truncated_file_uses_the_frames_that_exist(
    video_job: Job, make_video: Make, frame_number: Number
) -> None:
    data = make_video(200, gop=10, options={"movflags": "faststart"})
    decoded = Decoded(data[: len(data) * 6 // 10], video_job())
    got = [frame_number(frame) for frame in decoded.frames]
    assert got[0] == 0
    assert 60 < got[-1] < 180
    assert len(got) == len(decoded.indices)
    assert got == list(decoded.indices)
    assert len(decoded.head.notes) == 1
    assert "of 200 frames exist" in decoded.head.notes[0]


def test_transport_stream_that_starts_between_keyframes(
    video_job: Job, make_video: Make, frame_number: Number
) -> None:
    whole = make_video(100, gop=25, container="mpegts")
    cut = len(whole) // 10 // 188 * 188  # whole packets go, the first keyframe with them
    decoded = Decoded(whole[cut:], video_job())
    numbers = [frame_number(frame) for frame in decoded.frames]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == 99
    assert len(numbers) >= 2


def test_a_track_that_appears_on_the_way_costs_what_comes_after_it(
    video_job: Job, make_video: Make, frame_number: Number
) -> None:
    tone = (0.3 * np.sin(np.arange(24_000 * 3) / 10)).astype(np.float32)
    data = bytearray(make_video(30, container="mpegts", sound=tone))
    for at in range(len(data) * 2 // 3 // 188 * 188, len(data), 188):
        if data[at + 1] & 0x1F == 1 and data[at + 2] == 0:  # the pictures' packets, number 0x100
            data[at + 2] = 0xFF
    decoded = Decoded(memoryview(bytes(data)), video_job(fps=10))
    numbers = [frame_number(frame) for frame in decoded.frames]
    assert 8 <= len(numbers) < 30
    assert numbers == list(decoded.indices)


def test_damage_in_the_middle_costs_few_frames(
    video_job: Job, make_video: Make, frame_number: Number
) -> None:
    data = bytearray(make_video(200, gop=10, container="mpegts"))
    middle = len(data) // 2
    data[middle : middle + 188 * 6] = bytes(188 * 6)
    decoded = Decoded(memoryview(data), video_job(min_frames=40, max_frames=40))
    numbers = [frame_number(frame) for frame in decoded.frames]
    assert len(numbers) >= 34
    assert sum(a == b for a, b in zip(numbers, decoded.indices, strict=False)) >= 10
    assert numbers == sorted(numbers)


def test_runs_and_slices_give_the_same_in_any_order(video_job: Job, make_video: Make) -> None:
    data = make_video(400, gop=12, fps=20)
    job = video_job(fps=10, min_frames=2)
    wanted = Decoded(data, job, order=range, one_session=True, slice_units=1000)
    assert len(wanted.head.runs) >= 8
    numbers = list(range(len(wanted.head.runs)))
    random.Random(3).shuffle(numbers)
    others = [
        Decoded(data, job, order=lambda _: numbers, one_session=True),
        Decoded(data, job, order=lambda _: numbers, slice_units=1),
        Decoded(data, job, order=range, slice_units=3),
    ]
    for other in others:
        assert [unit.position for unit in other.units] == [unit.position for unit in wanted.units]
        for mine, theirs in zip(other.frames, wanted.frames, strict=True):
            np.testing.assert_array_equal(mine, theirs)


# What a decoder can't do from a keyframe alone, or does out of order.
HARD = {
    "many b-frames": {"x264-params": "bframes=8:b-adapt=0:b-pyramid=normal"},
    "open gop": {"x264-params": "open-gop=1:bframes=4:b-adapt=0"},
    "intra refresh": {"x264-params": "intra-refresh=1:keyint=20:bframes=0"},
    "one keyframe": {"x264-params": "keyint=infinite:scenecut=0"},
    "only keyframes": {"x264-params": "keyint=1"},
}


@pytest.mark.parametrize("container", ["mp4", "matroska", "mpegts"])
@pytest.mark.parametrize("kind", HARD)
def test_reordered_and_linked_frames_equal_a_serial_decode(
    kind: str, container: str, video_job: Job, make_video: Make
) -> None:
    data = make_video(150, gop=15, container=container, codec_options=HARD[kind])
    decoded = Decoded(data, video_job(fps=5, min_frames=2), slice_units=2)
    frames, times = all_frames(data, decoded.indices)
    assert len(times) == 150
    assert len(decoded.frames) == len(decoded.indices) == 74
    for index, frame in zip(decoded.indices, decoded.frames, strict=True):
        np.testing.assert_array_equal(frame, frames[index], err_msg=str(index))


def test_hevc_with_leading_pictures_equals_a_serial_decode(video_job: Job, make_video: Make) -> None:
    options = {"x265-params": "open-gop=1:keyint=12:bframes=4:log-level=none"}
    data = make_video(90, codec="libx265", codec_options=options)
    decoded = Decoded(data, video_job(fps=5, min_frames=2))
    frames, _ = all_frames(data, decoded.indices)
    for index, frame in zip(decoded.indices, decoded.frames, strict=True):
        np.testing.assert_array_equal(frame, frames[index], err_msg=str(index))


def test_a_stream_without_times_is_counted(video_job: Job, make_video: Make, frame_number: Number) -> None:
    data = make_video(120, gop=12, container="h264", codec_options={"x264-params": "bframes=0"})
    decoded = Decoded(data, video_job(), slice_units=1)
    assert len(decoded.head.runs) == 1
    assert [frame_number(frame) for frame in decoded.frames] == list(decoded.indices)


def test_a_container_that_lost_its_index_still_gives_the_frames_named(
    video_job: Job, make_video: Make, frame_number: Number
) -> None:
    whole = make_video(200, gop=10, container="matroska")
    decoded = Decoded(whole[: len(whole) * 7 // 10], video_job())
    got = [frame_number(frame) for frame in decoded.frames]
    assert got == list(decoded.indices)
    assert 100 < got[-1] < 180
    assert "of 20.0 s exist" in decoded.head.notes[0]


def track_job(sound: AudioJob, first: int, pieces: int) -> TrackJob:
    return TrackJob(clip=1, sound=sound, first=first, pieces=pieces)


def test_sound_comes_in_pieces_that_any_session_can_go_on_with(
    video_job: Job, sound_job: Callable[..., AudioJob], make_video: Make
) -> None:
    tone = (0.4 * np.sin(np.arange(24_000 * 12) * 440 * 2 * np.pi / 24_000)).astype(np.float32)
    data = make_video(120, sound=tone)
    assert plan_clip(data, video_job()).has_sound
    sound = sound_job(piece_samples=24_000)
    whole = list(ClipSession(data).pieces(track_job(sound, 0, 100)))
    assert [last for _, last in whole] == [False] * (len(whole) - 1) + [True]
    total = np.concatenate([samples for samples, _ in whole])
    assert len(total) / 24_000 == pytest.approx(12, abs=0.1)
    one = ClipSession(data)
    for first in range(0, len(whole), 3):
        for session in (one, ClipSession(data)):
            part = list(session.pieces(track_job(sound, first, 3)))
            assert len(part) == min(3, len(whole) - first)
            for (mine, last), (theirs, is_last) in zip(part, whole[first:], strict=False):
                np.testing.assert_array_equal(mine, theirs)
                assert last == is_last


def test_sound_can_be_left_out(video_job: Job, make_video: Make) -> None:
    tone = np.zeros(24_000 * 2, np.float32)
    assert not plan_clip(make_video(20, sound=tone), video_job(sound=None)).has_sound
    assert not plan_clip(make_video(20), video_job()).has_sound


def test_huge_frames_come_reduced(video_job: Job, make_video: Make, frame_number: Number) -> None:
    data = make_video(20, size=(640, 480))
    decoded = Decoded(data, video_job(full_decode_pixels=100_000))
    assert (decoded.head.height, decoded.head.width) == (96, 128)
    assert [frame_number(frame) for frame in decoded.frames] == list(decoded.indices)
    assert Decoded(data, video_job()).head.height == 480


def test_limits_are_told(video_job: Job, make_video: Make) -> None:
    data = make_video(100)
    with pytest.raises(MediaError, match=r"video of 10\.0 s, limit 5 s"):
        plan_clip(data, video_job(max_video_s=5))
    with pytest.raises(MediaError, match="video of 160x96 pixels a frame, limit 100"):
        plan_clip(data, video_job(max_image_pixels=100))
    with pytest.raises(MediaError, match=r"video costs \d+ tokens, limit 3"):
        plan_clip(data, video_job(max_tokens=3))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "empty"),
        (b"#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\nfile:///etc/passwd\n", "a playlist"),
        (b"ffconcat version 1.0\nfile '/etc/passwd'\n", "text"),
        (b"v=0\no=- 0 0 IN IP4 127.0.0.1\nm=video 5004 RTP/AVP 96\n", "text"),
        (b"\0" * 9000, "can't be opened"),
    ],
)
def test_what_is_no_video_is_named(data: bytes, said: str, video_job: Job) -> None:
    with pytest.raises(MediaError, match=said):
        plan_clip(memoryview(data), video_job())


def test_sound_without_pictures_is_no_video(video_job: Job, make_sound: Make) -> None:
    data = make_sound(np.zeros((1, 8000), np.float32), 8000, "wav", "pcm_s16le")
    with pytest.raises(MediaError, match="no picture track"):
        plan_clip(data, video_job())


COMPARED_BYTES = 400_000  # decoding all frames of the larger ones takes minutes on busy cores
REFUSED = {"filetype_fixture-isom.mp4": "can't be opened", "mb_oversized-id3.wav": "no picture track"}


def test_shared_videos_equal_an_independent_decode(shared_media: Path, video_job: Job) -> None:
    files = [f for folder in ("video", "video_edge") for f in sorted((shared_media / folder).iterdir())]
    files = [file for file in files if file.suffix != ".json"]
    assert len(files) > 25
    for file in files:
        data = memoryview(file.read_bytes())
        if file.name in REFUSED:
            with pytest.raises(MediaError, match=REFUSED[file.name]):
                plan_clip(data, video_job())
            continue
        decoded = Decoded(data, video_job())
        assert len(decoded.frames) == len(decoded.indices) >= 8, file.name
        if len(data) > COMPARED_BYTES:
            continue
        frames, times = all_frames(data, decoded.indices)
        wanted = sample_frames(times, fps=1, min_frames=8, max_frames=128)
        assert decoded.indices == wanted.indices, file.name
        assert decoded.head.timestamps == pytest.approx(wanted.timestamps, abs=0.002), file.name
        for index, frame in zip(decoded.indices, decoded.frames, strict=True):
            np.testing.assert_array_equal(frame, frames[index], err_msg=f"{file.name} {index}")
