"""The literal prompt tokens of a media item: markers, timestamps and pads, in the model's order.

Used by encoders for serving and by the trainer, so that both see the same ids. Pure; loads no torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transom.errors import CheckpointError
from transom.messages import Modality
from transom.tokenizer import Tokenizer

# Container time bases round to milliseconds: a frame at 1.9997 s is the one at 0:02.
_TIME_ROUNDING_S = 0.001

_ID_FIELDS = {
    "vision_start": "vision_start_token_id",
    "vision_end": "vision_end_token_id",
    "image_pad": "image_token_id",
    "video_pad": "video_token_id",
    "audio_pad": "audio_token_id",
    "video_start": "video_start_token_id",
    "video_end": "video_end_token_id",
    "audio_start": "audio_start_token_id",
    "audio_end": "audio_end_token_id",
}
_SPELLINGS = {
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
    "image_pad": "<|image_pad|>",
    "video_pad": "<|video_pad|>",
    "audio_pad": "<|audio_pad|>",
    "video_start": "<|mimo_video_start|>",
    "video_end": "<|mimo_video_end|>",
    "audio_start": "<|mimo_audio_start|>",
    "audio_end": "<|mimo_audio_end|>",
}


@dataclass(frozen=True, slots=True)
class MarkerIds:
    """Ids of the media markers of a checkpoint."""

    vision_start: int
    vision_end: int
    image_pad: int
    video_pad: int
    audio_pad: int
    video_start: int
    video_end: int
    audio_start: int
    audio_end: int

    @classmethod
    def from_folder(cls, folder: str | Path, tokenizer: Tokenizer) -> MarkerIds:
        """Take each id from config.json (top level, then `processor_config`), else from the tokenizer."""
        path = Path(folder) / "config.json"
        try:
            config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        processor = config.get("processor_config") or {}
        ids: dict[str, int] = {}
        for name, field in _ID_FIELDS.items():
            found = config.get(field)
            if found is None:
                found = processor.get(field)
            if found is None:
                found = tokenizer.token_id(_SPELLINGS[name])
            if not isinstance(found, int):
                raise CheckpointError(f"{path}: no id for {_SPELLINGS[name]} (field {field})", param=field)
            ids[name] = found
        return cls(**ids)

    def pads(self, modality: Modality) -> tuple[int, ...]:
        """Return the ids that take an embedding row in an item of this modality."""
        if modality == "video":
            return (self.video_pad, self.audio_pad)
        return (self.image_pad,) if modality == "image" else (self.audio_pad,)


def timestamp_text(seconds: float) -> str:
    """Return "MM:SS" of a time, rounded down to whole seconds; minutes may pass 99."""
    whole = int(max(seconds, 0.0) + _TIME_ROUNDING_S)
    return f"{whole // 60:02d}:{whole % 60:02d}"


@dataclass(frozen=True, slots=True)
class VideoUnit:
    """One temporal patch of a clip, and the run of the clip's sound tokens that belongs to it."""

    start_s: float
    audio_start: int
    audio_end: int | None  # None: all that is left


def video_units(
    timestamps: Sequence[float], temporal_patch: int, audio_tokens_per_s: float | None
) -> list[VideoUnit]:
    """Cut sampled frames into units of `temporal_patch` frames, headed by the time of their first one.

    A unit's sound goes from its start to the next unit's; the last takes the rest. None: no sound.
    """
    starts = list(timestamps[::temporal_patch])
    if audio_tokens_per_s is None:
        return [VideoUnit(start, 0, 0) for start in starts]
    cuts = [int(max(start, 0.0) * audio_tokens_per_s) for start in starts]
    # The first unit starts the sound track, whatever its first frame's time says.
    cuts[0] = 0
    ends: list[int | None] = [*cuts[1:], None]
    return [VideoUnit(start, cut, end) for start, cut, end in zip(starts, cuts, ends, strict=True)]


class Expander:
    """Writes the token ids of media items for one checkpoint. Safe to share between threads."""

    def __init__(self, ids: MarkerIds, tokenizer: Tokenizer) -> None:
        self.ids = ids
        self._tokenizer = tokenizer

    @classmethod
    def from_folder(cls, folder: str | Path) -> Expander:
        """Read markers and tokenizer of a checkpoint folder."""
        tokenizer = Tokenizer.from_folder(folder)
        return cls(MarkerIds.from_folder(folder, tokenizer), tokenizer)

    def image(self, rows: int) -> list[int]:
        """Return the expansion of a picture of `rows` embedding rows."""
        return [self.ids.vision_start, *[self.ids.image_pad] * rows, self.ids.vision_end]

    def audio(self, rows: int) -> list[int]:
        """Return the expansion of a sound of `rows` embedding rows."""
        return [self.ids.audio_start, *[self.ids.audio_pad] * rows, self.ids.audio_end]

    def video_unit(self, start_s: float, rows: int, audio_rows: int) -> list[int]:
        """Return the expansion of one unit: its time, its picture and, if it has any, its sound."""
        ids = self._tokenizer.encode(timestamp_text(start_s))
        ids += [self.ids.vision_start, *[self.ids.video_pad] * rows, self.ids.vision_end]
        return ids + self.audio(audio_rows) if audio_rows else ids

    def video(self, units: Sequence[tuple[float, int, int]]) -> list[int]:
        """Return the expansion of a clip; a unit is (start_s, picture rows, sound rows)."""
        ids = [self.ids.video_start]
        for start_s, rows, audio_rows in units:
            ids += self.video_unit(start_s, rows, audio_rows)
        return [*ids, self.ids.video_end]
