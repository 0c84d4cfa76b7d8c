"""Sampled frames against an independent decode of all frames, sound beside them, and damage."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection
from pathlib import Path

import av
import numpy as np
import pytest

from transom.encoder.media.sampling import sample_frames
from transom.encoder.media.video import Clip, Note, SoundPiece, Unit, decode_video
from transom.encoder.media.wire import VideoJob
from transom.errors import MediaError

Job = Callable[..., VideoJob]
Make = Callable[..., memoryview]
Number = Callable[[np.ndarray], int]


class Decoded:
    """All that a clip gives, sorted."""

    def __init__(self, data: memoryview, job: VideoJob) -> None:
        parts = list(decode_video(data, job))
        clips = [part for part in parts if isinstance(part, Clip)]
        assert len(clips) == 1
        self.clip = clips[0]
        self.units = [part for part in parts if isinstance(part, Unit)]
        self.notes = [part.text for part in parts if isinstance(part, Note)]
        self.sound = [part for part in parts if isinstance(part, SoundPiece)]
        self.order = [type(part) for part in parts]
        self.frames = [frame for unit in self.units for frame in unit.frames]
        for unit in self.units:
            assert unit.frames.dtype == np.uint8
            assert unit.frames.shape[1:] == (self.clip.height, self.clip.width, 3)


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
    assert decoded.clip.plan.indices == plan.indices
    assert decoded.clip.plan.timestamps == pytest.approx(plan.timestamps, abs=0.002)
    assert [unit.start_s for unit in decoded.units] == list(decoded.clip.plan.timestamps[::2])
    assert decoded.notes == []


@pytest.mark.parametrize("pix_fmt", ["yuv420p", "yuv420p10le", "yuv444p"])
def test_frames_equal_an_independent_decode_bit_for_bit(
    pix_fmt: str, video_job: Job, make_video: Make
) -> None:
    data = make_video(130, gop=10, pix_fmt=pix_fmt, size=(162, 98) if pix_fmt != "yuv444p" else (161, 99))
    decoded = Decoded(data, video_job())
    frames, _ = all_frames(data, decoded.clip.plan.indices)
    for index, frame in zip(decoded.clip.plan.indices, decoded.frames, strict=True):
        np.testing.assert_array_equal(frame, frames[index])


@pytest.mark.parametrize("gop", [5, 300])
def test_jumping_between_keyframes_changes_nothing(
    gop: int, video_job: Job, make_video: Make, frame_number: Number
) -> None:
    data = make_video(900, gop=gop, fps=30)
    job = video_job(fps=1, min_frames=2, max_frames=16)
    decoded = Decoded(data, job)
    assert [frame_number(frame) for frame in decoded.frames] == list(decoded.clip.plan.indices)
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
    indices = decoded.clip.plan.indices
    assert [frame_number(frame) for frame in decoded.frames] == list(indices)
    assert decoded.clip.plan.timestamps == pytest.approx([times[i] / 1000 for i in indices], abs=0.002)


def test_truncated_file_uses_the_frames_that_exist(
    video_job: Job, make_video: Make, frame_number: Number
) -> None:
    data = make_video(200, gop=10, options={"movflags": "faststart"})
    decoded = Decoded(data[: len(data) * 6 // 10], video_job())
    got = [frame_number(frame) for frame in decoded.frames]
    assert got[0] == 0
    assert 60 < got[-1] < 180
    assert len(got) == len(decoded.clip.plan.indices)
    assert got == list(decoded.clip.plan.indices)
    assert len(decoded.notes) == 1
    assert "of 200 frames exist" in decoded.notes[0]


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


def test_damage_in_the_middle_costs_few_frames(
    video_job: Job, make_video: Make, frame_number: Number
) -> None:
    data = bytearray(make_video(200, gop=10, container="mpegts"))
    middle = len(data) // 2
    data[middle : middle + 188 * 6] = bytes(188 * 6)
    decoded = Decoded(memoryview(data), video_job(min_frames=40, max_frames=40))
    numbers = [frame_number(frame) for frame in decoded.frames]
    assert len(numbers) >= 34
    assert sum(a == b for a, b in zip(numbers, decoded.clip.plan.indices, strict=False)) >= 10
    assert numbers == sorted(numbers)


def test_sound_comes_before_the_pictures_that_need_it(video_job: Job, make_video: Make) -> None:
    tone = (0.4 * np.sin(np.arange(24_000 * 12) * 440 * 2 * np.pi / 24_000)).astype(np.float32)
    data = make_video(120, sound=tone)
    job = video_job()
    small_pieces = video_job(
        sound=job.sound.__class__(sampling_rate=24_000, piece_samples=24_000, max_audio_s=60)
    )
    decoded = Decoded(data, small_pieces)
    assert decoded.clip.has_sound
    total = np.concatenate([piece.samples for piece in decoded.sound])
    assert len(total) / 24_000 == pytest.approx(12, abs=0.1)
    assert [piece.last for piece in decoded.sound] == [False] * (len(decoded.sound) - 1) + [True]
    parts = list(decode_video(data, small_pieces))
    heard = 0.0
    starts = [*decoded.clip.plan.timestamps[::2][1:], 12.0]
    for part in parts:
        if isinstance(part, SoundPiece):
            heard += len(part.samples) / 24_000
        elif isinstance(part, Unit):
            assert heard >= starts.pop(0) - 0.1
    assert not starts


def test_sound_can_be_left_out(video_job: Job, make_video: Make) -> None:
    tone = np.zeros(24_000 * 2, np.float32)
    decoded = Decoded(make_video(20, sound=tone), video_job(sound=None))
    assert not decoded.clip.has_sound
    assert decoded.sound == []


def test_huge_frames_come_reduced(video_job: Job, make_video: Make, frame_number: Number) -> None:
    data = make_video(20, size=(640, 480))
    decoded = Decoded(data, video_job(full_decode_pixels=100_000))
    assert (decoded.clip.height, decoded.clip.width) == (96, 128)
    assert [frame_number(frame) for frame in decoded.frames] == list(decoded.clip.plan.indices)
    assert Decoded(data, video_job()).clip.height == 480


def test_limits_are_told(video_job: Job, make_video: Make) -> None:
    data = make_video(100)
    with pytest.raises(MediaError, match=r"video of 10\.0 s, limit 5 s"):
        list(decode_video(data, video_job(max_video_s=5)))
    with pytest.raises(MediaError, match="video of 160x96 pixels a frame, limit 100"):
        list(decode_video(data, video_job(max_image_pixels=100)))
    with pytest.raises(MediaError, match=r"video costs \d+ tokens, limit 3"):
        list(decode_video(data, video_job(max_tokens=3)))


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
        list(decode_video(memoryview(data), video_job()))


def test_sound_without_pictures_is_no_video(video_job: Job, make_sound: Make) -> None:
    data = make_sound(np.zeros((1, 8000), np.float32), 8000, "wav", "pcm_s16le")
    with pytest.raises(MediaError, match="no picture track"):
        list(decode_video(data, video_job()))


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
                list(decode_video(data, video_job()))
            continue
        decoded = Decoded(data, video_job())
        plan = decoded.clip.plan
        assert len(decoded.frames) == len(plan.indices) >= 8, file.name
        if len(data) > COMPARED_BYTES:
            continue
        frames, times = all_frames(data, plan.indices)
        wanted = sample_frames(times, fps=1, min_frames=8, max_frames=128)
        assert plan.indices == wanted.indices, file.name
        assert plan.timestamps == pytest.approx(wanted.timestamps, abs=0.002), file.name
        for index, frame in zip(plan.indices, decoded.frames, strict=True):
            np.testing.assert_array_equal(frame, frames[index], err_msg=f"{file.name} {index}")
