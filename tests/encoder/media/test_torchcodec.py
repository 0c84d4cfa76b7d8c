"""Videos through torchcodec: the very frames that PyAV gives, and PyAV where torchcodec has none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.encoder.media.test_video import HARD, Decoded, Make, Number, all_frames
from transom.encoder.media.frames import FrameReader
from transom.encoder.media.torchcodec_frames import is_sure
from transom.encoder.media.wire import VideoJob
from transom.errors import MediaError

Job = Callable[..., VideoJob]


@cache
def is_there() -> bool:
    """Whether torchcodec loads here. In a process of its own: it loads torch and FFmpeg's libraries."""
    code = "import torchcodec.decoders"
    return not subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode


@pytest.fixture
def torchcodec() -> None:
    if not is_there():
        pytest.skip("torchcodec is not installed, or FFmpeg's shared libraries are not")


@pytest.fixture
def alone(torchcodec: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left to PyAV but the plan."""

    def refuse(*_: object) -> None:
        raise AssertionError("torchcodec did not give a frame")

    monkeypatch.setattr(FrameReader, "find", refuse)


def same_as_serially(decoded: Decoded, data: memoryview) -> None:
    frames, _ = all_frames(data, decoded.indices)
    assert len(decoded.frames) == len(decoded.indices) > 2
    for index, frame in zip(decoded.indices, decoded.frames, strict=True):
        np.testing.assert_array_equal(frame, frames[index], err_msg=str(index))


@pytest.mark.parametrize(
    ("container", "codec"),
    [
        ("mp4", "libx264"),
        ("mov", "libx264"),
        ("matroska", "libx264"),
        ("webm", "libvpx-vp9"),
        ("mp4", "libx265"),
    ],
)
@pytest.mark.parametrize("slice_units", [2, 8])
@pytest.mark.usefixtures("alone")
def test_frames_equal_an_independent_decode_bit_for_bit(
    container: str, codec: str, slice_units: int, video_job: Job, make_video: Make
) -> None:
    data = make_video(130, container=container, codec=codec, gop=10)
    assert is_sure(data)
    decoded = Decoded(data, video_job(fps=3), decoder="torchcodec", slice_units=slice_units)
    same_as_serially(decoded, data)


@pytest.mark.usefixtures("torchcodec")
def test_variable_rates_and_reordered_frames(video_job: Job, make_video: Make, frame_number: Number) -> None:
    times = [n * 40 + (n // 7) * 333 for n in range(90)]
    options = {"x264-params": "open-gop=1:bframes=4:b-adapt=0"}
    data = make_video(90, container="matroska", times_ms=times, gop=9, codec_options=options)
    decoded = Decoded(data, video_job(fps=5), decoder="torchcodec")
    assert [frame_number(frame) for frame in decoded.frames] == list(decoded.indices)
    same_as_serially(decoded, data)


@pytest.mark.parametrize("kind", HARD)
@pytest.mark.usefixtures("torchcodec")
def test_hard_streams_equal_a_serial_decode(kind: str, video_job: Job, make_video: Make) -> None:
    data = make_video(150, gop=15, codec_options=HARD[kind])
    same_as_serially(Decoded(data, video_job(fps=5, min_frames=2), decoder="torchcodec", slice_units=2), data)


@pytest.mark.usefixtures("torchcodec")
def test_what_torchcodec_does_not_give_comes_from_pyav(
    video_job: Job, make_video: Make, frame_number: Number
) -> None:
    """Transport streams, huge frames, what is cut off or damaged: as without torchcodec."""
    damaged = bytearray(make_video(200, gop=10))
    middle = len(damaged) // 2
    damaged[middle : middle + 400] = bytes(400)
    whole = make_video(200, gop=10, options={"movflags": "faststart"})
    huge = video_job(full_decode_pixels=4000, max_pixels=64 * 32, total_max_pixels=10**6)
    for data, job in (
        (make_video(95, container="mpegts", gop=12), video_job()),
        (whole[: len(whole) * 6 // 10], video_job()),
        (memoryview(bytes(damaged)), video_job(fps=5)),
        (make_video(95, gop=12), huge),
    ):
        wanted = Decoded(data, job)
        got = Decoded(data, job, decoder="torchcodec")
        assert got.head == wanted.head
        assert [unit.position for unit in got.units] == [unit.position for unit in wanted.units]
        for mine, theirs in zip(got.frames, wanted.frames, strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.usefixtures("torchcodec")
def test_shared_videos_equal_pyavs_frames(shared_media: Path, video_job: Job) -> None:
    kinds = (".mp4", ".mov", ".webm", ".mkv")
    paths = [path for path in sorted(shared_media.rglob("*")) if path.suffix in kinds]
    tried = 0
    for path in paths:
        data = memoryview(path.read_bytes())
        job = video_job(fps=1, min_frames=2, max_frames=16)
        try:
            wanted = Decoded(data, job)
        except MediaError:
            continue
        got = Decoded(data, job, decoder="torchcodec")
        for mine, theirs in zip(got.frames, wanted.frames, strict=True):
            assert np.abs(mine.astype(int) - theirs).mean() < 1.0, path.name
        tried += 1
    assert tried


@pytest.mark.parametrize(
    "data",
    [
        b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"    ftypisom<MPD profiles='urn:mpeg:dash:profile'>",  # its first byte is no zero
        b"\x1aE\xdf\xa3<MPD profiles='urn:mpeg:dash:profile'>",
        b"G" * 188,
        b"",
    ],
)
def test_what_might_be_a_list_of_files_is_not_given_to_torchcodec(data: bytes) -> None:
    assert not is_sure(memoryview(data))
