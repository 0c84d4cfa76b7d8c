"""Pools of embedded media that the joint stage draws from, so that the frozen towers run only once.

Used by training only. A pool holds facts and rows of the vision tower or codes of the audio tokenizer;
it is a MediaSource for the dialogue generators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from transom.encoder.expand import Expander, video_units
from transom.encoder.models.audio import AudioEncoder
from transom.encoder.models.config import ProcessorConfig
from transom.encoder.models.vision import VisionTower
from transom.nano.data import images, videos
from transom.nano.data.dialogues import Media
from transom.nano.data.facts import AudioFacts, ImageFacts, VideoFacts
from transom.nano.data.images import Pixels, Rng
from transom.nano.data.sounds import RATE, Samples, Sound, SpokenDigits, any_sound, silence_sound
from transom.nano.media import Grid, image_patches, sound_mel, video_patches
from transom.nano.stages.vision import PictureSource

PICTURES = {
    "shapes": 10000,
    "fashion": 30000,
    "handwritten": 3000,
    "printed": 3000,
    "word": 8000,
    "plain": 800,
    "unknown": 2500,
}
PICTURE_SHARES = {
    "shapes": 0.33,
    "fashion": 0.27,
    "digit": 0.11,
    "word": 0.17,
    "plain": 0.04,
    "unknown": 0.08,
}
# Order of digits is the hardest to learn.
VIDEO_SHARES = {"colours": 0.25, "digits": 0.43, "motion": 0.22, "still": 0.05, "unknown": 0.05}
SOUNDS = 14000
VIDEOS, MORE_DIGITS = 6000, 4000
SOUND_TRACK_SHARE = 0.45


class ImageEntry(msgspec.Struct):
    """A picture: rows [start, end) of the vision matrix."""

    facts: ImageFacts
    start: int
    end: int


class SoundEntry(msgspec.Struct):
    """A sound: rows [start, end) of the code matrix."""

    facts: AudioFacts
    start: int
    end: int


class VideoEntry(msgspec.Struct):
    """A video: `units` are (second, vision rows, sound tokens); codes are empty without sound."""

    facts: VideoFacts
    start: int
    end: int
    units: list[tuple[float, int, int]]
    codes_start: int
    codes_end: int


class Entries(msgspec.Struct):
    """Everything of a pool but its tensors."""

    images: list[ImageEntry]
    sounds: list[SoundEntry]
    videos: list[VideoEntry]


@dataclass
class Pools:
    """A MediaSource over cached embeddings; `content` of its media is the entry.

    `single_share`: of the pictures of shapes, how many more are drawn from those that show one.
    """

    entries: Entries
    rows: Tensor
    codes: Tensor
    single_share: float = 0.0

    def __post_init__(self) -> None:
        self._by_kind: dict[str, list[ImageEntry]] = {}
        for entry in self.entries.images:
            self._by_kind.setdefault(entry.facts.kind, []).append(entry)
        self._single = [one for one in self._by_kind.get("shapes", []) if len(one.facts.shapes) == 1]
        self._videos_by_kind: dict[str, list[VideoEntry]] = {}
        for clip in self.entries.videos:
            self._videos_by_kind.setdefault(clip.facts.kind, []).append(clip)

    def image(self, rng: Rng, kind: str | None = None) -> Media:
        """Draw a picture, by the shares of the training set or of one kind."""
        kinds = list(PICTURE_SHARES)
        chosen = kind or kinds[int(rng.choice(len(kinds), p=list(PICTURE_SHARES.values())))]
        pool = self._by_kind[chosen]
        if chosen == "shapes" and self.single_share and rng.random() < self.single_share:
            pool = self._single
        entry = pool[int(rng.integers(len(pool)))]
        return Media("image", entry.facts, entry)

    def audio(self, rng: Rng) -> Media:
        """Draw a sound."""
        entry = self.entries.sounds[int(rng.integers(len(self.entries.sounds)))]
        return Media("audio", entry.facts, entry)

    def video(self, rng: Rng) -> Media:
        """Draw a video, by the shares of the training set."""
        kinds = [kind for kind in VIDEO_SHARES if kind in self._videos_by_kind]
        shares = np.array([VIDEO_SHARES[kind] for kind in kinds])
        pool = self._videos_by_kind[kinds[int(rng.choice(len(kinds), p=shares / shares.sum()))]]
        entry = pool[int(rng.integers(len(pool)))]
        return Media("video", entry.facts, entry)

    def vision_rows(self, media: Sequence[Media]) -> Tensor:
        """Return the rows of all pictures and videos, in order."""
        parts = [self.rows[m.content.start : m.content.end] for m in media if m.modality != "audio"]
        return torch.cat(parts).float() if parts else self.rows[:0].float()

    def sound_codes(self, media: Sequence[Media]) -> list[Tensor]:
        """Return the codes of all sounds and sound tracks, in order."""
        spans = [
            (m.content.start, m.content.end)
            if m.modality == "audio"
            else (m.content.codes_start, m.content.codes_end)
            for m in media
            if m.modality != "image"
        ]
        return [self.codes[start:end].long() for start, end in spans if end > start]

    def save(self, folder: Path) -> None:
        """Write the pool."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file({"rows": self.rows, "codes": self.codes}, folder / "pools.safetensors")
        (folder / "pools.json").write_bytes(msgspec.json.encode(self.entries))

    @classmethod
    def load(cls, folder: Path) -> Pools:
        """Read a pool."""
        tensors = load_file(folder / "pools.safetensors")
        entries = msgspec.json.decode((folder / "pools.json").read_bytes(), type=Entries)
        return cls(entries, tensors["rows"], tensors["codes"])


def expand_entry(expander: Expander, media: Media) -> list[int]:
    """Return the ids of a pooled item."""
    entry = media.content
    if isinstance(entry, ImageEntry):
        return expander.image(entry.end - entry.start)
    if isinstance(entry, SoundEntry):
        return expander.audio(-(-(entry.end - entry.start) // 4))
    return expander.video(entry.units)


class PoolBuilder:
    """Embeds media with frozen towers and collects rows and codes; `pools` ends the collection."""

    def __init__(
        self, tower: VisionTower, audio: AudioEncoder, processor: ProcessorConfig, spoken: SpokenDigits
    ) -> None:
        self.tower, self.audio, self.processor, self.spoken = tower, audio, processor, spoken
        self.rows: list[Tensor] = []
        self.codes: list[Tensor] = []
        self.row_count = self.code_count = 0

    def embed(self, patches: Sequence[Tensor], grids: Sequence[Grid]) -> list[tuple[int, int]]:
        """Run the tower over a batch; return each item's rows."""
        out = self.tower(torch.cat(list(patches)), list(grids))
        self.rows.append(out.to(torch.bfloat16))
        spans = []
        for grid in grids:
            count = grid[0] * grid[1] * grid[2] // self.tower.cfg.merge_unit
            spans.append((self.row_count, self.row_count + count))
            self.row_count += count
        return spans

    def tokenize(self, samples: Sequence[Samples]) -> list[tuple[int, int]]:
        """Run the audio tokenizer over a batch; return each item's codes."""
        spans = []
        for codes in self.audio.tokenize([sound_mel(part) for part in samples]):
            self.codes.append(codes.to(torch.uint8))
            spans.append((self.code_count, self.code_count + len(codes)))
            self.code_count += len(codes)
        return spans

    def images(
        self, draw: Callable[[Rng], tuple[Pixels, ImageFacts]], count: int, rng: Rng
    ) -> list[ImageEntry]:
        """Draw and embed pictures."""
        entries = []
        for start in range(0, count, 64):
            drawn = [draw(rng) for _ in range(min(64, count - start))]
            cut = [image_patches(pixels, self.processor) for pixels, _ in drawn]
            spans = self.embed([patches for patches, _ in cut], [grid for _, grid in cut])
            entries += [ImageEntry(facts, *span) for (_, facts), span in zip(drawn, spans)]
        return entries

    def sounds(self, draw: Callable[[Rng], Sound], count: int, rng: Rng) -> list[SoundEntry]:
        """Draw and tokenize sounds."""
        entries = []
        for start in range(0, count, 50):
            drawn = [draw(rng) for _ in range(min(50, count - start))]
            spans = self.tokenize([sound.samples for sound in drawn])
            entries += [SoundEntry(sound.facts, *span) for sound, span in zip(drawn, spans)]
        return entries

    def video(self, video: videos.Video, rng: Rng, sound_share: float = SOUND_TRACK_SHARE) -> VideoEntry:
        """Embed one video, with a sound track in `sound_share` of the cases."""
        patches, grid, seconds = video_patches(video, self.processor)
        ((start, end),) = self.embed([patches], [grid])
        per_unit = (end - start) // grid[0]
        pair = self.processor.temporal_patch_size
        facts, span, tokens = videos.as_sampled(video.facts, seconds, pair), (0, 0), 0
        if rng.random() < sound_share:
            sound = sound_track(self.spoken, video.duration_s, rng)
            ((first, last),) = self.tokenize([sound.samples])
            facts, span = videos.with_sound(facts, sound.facts), (first, last)
            tokens = -(-(last - first) // self.audio.cfg.group_size)
        units = unit_rows(seconds[::pair], per_unit, tokens)
        return VideoEntry(facts, start, end, units, *span)

    def pools(self, pictures: list[ImageEntry], sounds: list[SoundEntry], clips: list[VideoEntry]) -> Pools:
        """Return the pool of everything embedded so far."""
        rows = torch.cat(self.rows) if self.rows else torch.zeros(0, self.tower.cfg.out_hidden_size)
        codes = (
            torch.cat(self.codes)
            if self.codes
            else torch.zeros(0, self.audio.cfg.audio_channels, dtype=torch.uint8)
        )
        return Pools(Entries(pictures, sounds, clips), rows, codes)


def unit_rows(starts: Sequence[float], per_unit: int, sound_tokens: int) -> list[tuple[float, int, int]]:
    """Return (second, picture rows, sound rows) of each frame pair."""
    rate = 6.25 if sound_tokens else None
    units = []
    for unit in video_units(starts, 1, rate):
        end = sound_tokens if unit.audio_end is None else min(unit.audio_end, sound_tokens)
        units.append((unit.start_s, per_unit, max(end - min(unit.audio_start, sound_tokens), 0)))
    return units


def worn_video(video: videos.Video, rng: Rng) -> videos.Video:
    """Age the frames of a video, as a lossy codec does."""
    if rng.random() < 0.3:
        return video
    return videos.Video(lambda t: images.wear(video.frame(t), rng), video.duration_s, video.fps, video.facts)


def sound_track(spoken: SpokenDigits, duration_s: float, rng: Rng) -> Sound:
    """Draw a sound that fits a video and pad it to the video's length."""
    length = int(duration_s * RATE)
    for _ in range(6):
        sound = silence_sound(rng) if rng.random() < 0.15 else any_sound(spoken, rng)
        spare = length - len(sound.samples)
        if spare >= 0:
            before = int(rng.integers(0, spare + 1))
            return Sound(np.pad(sound.samples, (before, spare - before)), sound.facts, ())
    return Sound(np.zeros(length, np.float32), AudioFacts("silence"), ())


@torch.no_grad()
def build_pools(
    tower: VisionTower,
    audio: AudioEncoder,
    processor: ProcessorConfig,
    spoken: SpokenDigits,
    seed: int,
    share: float = 1.0,
) -> Pools:
    """Draw and embed all pools; `share` makes them smaller."""
    rng = np.random.default_rng([seed, 5])
    builder = PoolBuilder(tower, audio, processor, spoken)
    source = PictureSource("train")
    draws: dict[str, Callable[[Rng], tuple[Pixels, ImageFacts]]] = {
        "shapes": images.shapes_picture,
        "fashion": source.fashion_picture,
        "handwritten": source.handwritten_picture,
        "printed": images.printed_digit_picture,
        "word": images.word_picture,
        "plain": images.plain_picture,
        "unknown": images.unknown_picture,
    }
    drawn: list[ImageEntry] = []
    for kind, count in PICTURES.items():
        draw = draws[kind] if kind in ("fashion", "handwritten") else partial(_worn, draws[kind])
        drawn += builder.images(draw, int(count * share), rng)
    sounds = builder.sounds(lambda r: any_sound(spoken, r), int(SOUNDS * share), rng)
    clips = [
        builder.video(worn_video(draw_video(rng), rng), rng)
        for draw_video, count in ((videos.any_video, VIDEOS), (videos.digits_video, MORE_DIGITS))
        for _ in range(int(count * share))
    ]
    return builder.pools(drawn, sounds, clips)


def _worn(draw: Callable[[Rng], tuple[Pixels, ImageFacts]], rng: Rng) -> tuple[Pixels, ImageFacts]:
    pixels, facts = draw(rng)
    return images.wear(pixels, rng), facts
