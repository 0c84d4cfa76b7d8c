"""Sounds of every container: length, level, channels; refusals that say why."""

from __future__ import annotations

import re
import struct
import wave
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import soxr

from transom.encoder.media.audio import decode_audio
from transom.encoder.media.wire import AudioJob
from transom.errors import MediaError

Job = Callable[..., AudioJob]
Make = Callable[..., memoryview]
RATE = 24_000


def tone(hertz: float, seconds: float, rate: int, level: float = 0.5) -> np.ndarray:
    return (level * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


def whole(data: memoryview, job: AudioJob, notes: list[str] | None = None) -> np.ndarray:
    """All pieces joined; checks their sizes and marks."""
    said: list[str] = [] if notes is None else notes
    pieces = list(decode_audio(data, job, said))
    assert notes is not None or not said
    assert [last for _, last in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(len(samples) == job.piece_samples for samples, _ in pieces[:-1])
    assert len(pieces[-1][0]) > 0
    assert all(samples.dtype == np.float32 for samples, _ in pieces)
    return np.concatenate([samples for samples, _ in pieces])


def pcm(samples: np.ndarray, rate: int) -> memoryview:
    """A 16-bit WAV by the standard library, (channels, samples)."""
    buffer = BytesIO()
    with wave.open(buffer, "wb") as out:
        out.setnchannels(len(samples))
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes((samples.T * 32767).round().astype("<i2").tobytes())
    return memoryview(buffer.getvalue())


@pytest.mark.parametrize("rate", [8000, 11025, 16000, 24000, 44100, 48000, 96000])
@pytest.mark.parametrize("channels", [1, 2, 8, 12])
def test_any_rate_equals_resampling_each_channel_then_mean(rate: int, channels: int, sound_job: Job) -> None:
    tracks = np.stack([tone(300 * (k + 1), 1.3, rate, 0.4) for k in range(channels)])
    got = whole(pcm(tracks, rate), sound_job())
    stored = (tracks * 32767).round() / 32768
    wanted = np.mean([soxr.resample(track, rate, RATE, quality="HQ") for track in stored], axis=0)
    assert abs(len(got) - 1.3 * RATE) <= 1
    count = min(len(got), len(wanted))
    assert np.abs(got[:count] - wanted[:count]).max() < 1e-3


@pytest.mark.parametrize(
    ("container", "codec"),
    [("mp4", "aac"), ("ogg", "libopus"), ("mp3", "libmp3lame"), ("flac", "flac"), ("matroska", "libopus"),
     ("wav", "pcm_s16le"), ("adts", "aac"), ("mpegts", "aac")],
)  # fmt: skip
def test_containers_keep_length_and_energy(
    container: str, codec: str, sound_job: Job, make_sound: Make
) -> None:
    samples = np.stack([tone(440, 2.0, 48_000, 0.5)] * 2)
    got = whole(make_sound(samples, 48_000, container, codec), sound_job())
    assert abs(len(got) / RATE - 2.0) < 0.08
    middle = got[RATE // 2 : RATE * 3 // 2]
    assert np.sqrt(np.mean(middle**2)) == pytest.approx(0.5 / np.sqrt(2), rel=0.05)
    spectrum = np.abs(np.fft.rfft(middle))
    assert np.argmax(spectrum) * RATE / len(middle) == pytest.approx(440, abs=2)


def test_six_channels_are_averaged(sound_job: Job, make_sound: Make) -> None:
    tracks = np.stack([tone(440, 1.0, RATE, 0.6)] + [np.zeros(RATE, np.float32)] * 5)
    got = whole(make_sound(tracks, RATE, "wav", "pcm_s16le"), sound_job())
    np.testing.assert_allclose(got, tracks[0] / 6, atol=1e-3)


def test_silence_is_a_sound(sound_job: Job) -> None:
    got = whole(pcm(np.zeros((1, 8000)), 8000), sound_job())
    assert len(got) == RATE
    assert not got.any()


@pytest.mark.parametrize("rate", [16000, 24000])
def test_pieces_join_to_the_same_samples(rate: int, sound_job: Job) -> None:
    data = pcm(tone(500, 3.7, rate)[None], rate)
    together = whole(data, sound_job())
    for size in (24_000, 7_777, len(together) // 2, len(together)):
        np.testing.assert_array_equal(whole(data, sound_job(piece_samples=size)), together)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "empty"),
        (b"<html>", "an HTML page"),
        (b"\x89PNG\r\n\x1a\n" + bytes(600), "this is no audio: the bytes look like a PNG picture"),
        (b"\0" * 5000, "can't be opened"),
        (b"#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\nfile:///etc/passwd\n", "a playlist"),
        (b"ffconcat version 1.0\nfile '/etc/passwd'\n", "text"),
    ],
)
def test_what_is_no_sound_is_named(data: bytes, said: str, sound_job: Job) -> None:
    with pytest.raises(MediaError, match=said):
        list(decode_audio(memoryview(data), sound_job(), []))


def test_no_samples_is_an_error(sound_job: Job) -> None:
    with pytest.raises(MediaError, match=r"no samples|can't be opened"):
        list(decode_audio(pcm(np.zeros((1, 0)), 8000), sound_job(), []))


def test_length_limit_is_told(sound_job: Job, make_sound: Make) -> None:
    with pytest.raises(MediaError, match=r"audio of 3\.0 s, limit 2 s"):
        list(decode_audio(pcm(tone(440, 3, 8000)[None], 8000), sound_job(max_audio_s=2), []))
    # A stream that claims no length is stopped where the limit passes.
    adts = make_sound(tone(440, 3, 48_000)[None], 48_000, "adts", "aac")
    with pytest.raises(MediaError, match="limit"):
        list(decode_audio(adts, sound_job(max_audio_s=1), []))


def with_rate(hertz: int) -> memoryview:
    """A WAV of 40 samples whose header names a rate."""
    data = bytearray(pcm(np.full((1, 40), 0.1, np.float32), 8000))
    struct.pack_into("<II", data, 24, hertz, 2 * hertz)
    return memoryview(bytes(data))


@pytest.mark.parametrize("hertz", [1, 7, 999])
def test_rates_of_no_sound_are_refused(hertz: int, sound_job: Job) -> None:
    """Else a header of 1 Hz makes 40 s of 160 bytes."""
    with pytest.raises(MediaError, match=f"audio of {hertz} Hz, at least 1000 Hz are needed") as caught:
        list(decode_audio(with_rate(hertz), sound_job(), []))
    assert caught.value.status == 400


@pytest.mark.parametrize("hertz", [1000, 4000, 768_000])
def test_rates_from_the_lowest_on_are_resampled(hertz: int, sound_job: Job) -> None:
    assert abs(len(whole(with_rate(hertz), sound_job())) - 40 * RATE / hertz) <= 1


TRUNCATED = [
    ("wav", "pcm_s16le", r"truncated: \d\.\d of 4\.0 s exist"),
    ("mp3", "libmp3lame", r"truncated: \d\.\d of 4\.0 s exist"),
    ("flac", "flac", r"truncated: \d\.\d of 4\.0 s exist"),
    ("matroska", "libopus", r"truncated: \d\.\d of 4\.0 s exist"),
    ("aiff", "pcm_s16be", r"truncated: \d\.\d of 4\.0 s exist"),
    ("adts", "aac", "damaged: 1 packets could not be decoded"),
]


@pytest.mark.parametrize(("container", "codec", "said"), TRUNCATED)
def test_truncated_sound_gives_what_is_there_and_says_so(
    container: str, codec: str, said: str, sound_job: Job, make_sound: Make
) -> None:
    data = make_sound(tone(440, 4, 48_000)[None], 48_000, container, codec)
    got = whole(data[: len(data) // 2], sound_job(), notes := [])
    assert 0.5 * RATE < len(got) < 3.5 * RATE
    assert len(notes) == 1
    assert re.search(said, notes[0])
    assert whole(data, sound_job(), notes := []) is not None
    assert notes == []


@pytest.mark.parametrize("cut", [44 + 4096 * 8, 44 + 4096 * 8 + 1])
def test_a_wav_that_ends_at_any_place_is_known_to_be_cut(cut: int, sound_job: Job) -> None:
    data = pcm(tone(440, 4, 16_000)[None], 16_000)
    whole(data[:cut], sound_job(), notes := [])
    assert notes == ["audio is truncated: 1.0 of 4.0 s exist"]


def test_a_wav_of_unknown_length_is_not_called_truncated(sound_job: Job) -> None:
    data = bytearray(pcm(tone(440, 1, 16_000)[None], 16_000))
    data[40:44] = b"\xff" * 4
    assert len(whole(memoryview(data), sound_job())) == RATE


def float_wav(samples: np.ndarray) -> memoryview:
    body = samples.astype("<f4").tobytes()
    head = struct.pack(
        "<4sI4s4sIHHIIHH", b"RIFF", 36 + len(body), b"WAVE", b"fmt ", 16, 3, 1, RATE, RATE * 4, 4, 32
    )
    return memoryview(head + struct.pack("<4sI", b"data", len(body)) + body)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_samples_that_are_no_numbers_are_refused(value: float, sound_job: Job) -> None:
    samples = tone(440, 2, RATE)
    assert len(whole(float_wav(samples), sound_job())) == 2 * RATE
    samples[RATE] = value
    with pytest.raises(MediaError, match=r"no finite numbers \(at (0\.9|1\.0)"):
        list(decode_audio(float_wav(samples), sound_job(), []))


def test_absurdly_loud_samples_stay_finite(sound_job: Job) -> None:
    got = whole(float_wav(tone(440, 1, RATE) * np.float32(1e38)), sound_job())
    assert np.isfinite(np.square(got)).all()


def test_errors_speak_of_the_media_and_not_of_the_library(sound_job: Job) -> None:
    for data in (b"\0" * 5000, b"RIFF\x24\0\0\0WAVEfmt ", b"OggS" + b"\0" * 100, b"fLaC" + b"\0" * 60):
        with pytest.raises(MediaError) as caught:
            list(decode_audio(memoryview(data), sound_job(), []))
        assert not re.search(r"Errno|<none>|processing input|av\.", caught.value.message)


def test_shared_sounds_have_their_length(shared_media: Path, sound_job: Job) -> None:
    index = (shared_media / "INDEX.tsv").read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in index if line.startswith("audio/")]
    assert len(rows) > 20
    for row in rows:
        claimed = float(row[6].split("dur=")[1].split()[0])
        samples = whole(memoryview((shared_media / row[0]).read_bytes()), sound_job())
        # Compressed formats claim the padding of their codec too.
        assert len(samples) / RATE == pytest.approx(claimed, abs=0.1), row[0]
        assert np.isfinite(samples).all()
        assert 1e-4 < np.abs(samples).max() < 1.6, row[0]
