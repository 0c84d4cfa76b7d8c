"""The media of one request, all items together, against the gateway's limits.

Pure; gateway process. Encoders tell sizes as they learn them, most of them before anything is decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from transom.errors import MediaError
from transom.gateway.config import GatewayConfig
from transom.messages import EncodeDone, MediaSize

_DIGITS = 3  # of seconds


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """What all media items of one request may have together."""

    pixels: int
    video_s: float
    audio_s: float
    visual_tokens: int

    @classmethod
    def of(cls, config: GatewayConfig) -> MediaLimits:
        """Take them from the settings."""
        return cls(
            pixels=config.max_request_pixels,
            video_s=config.max_request_video_s,
            audio_s=config.max_request_audio_s,
            visual_tokens=config.max_request_visual_tokens,
        )


class MediaTotals:
    """Counts the items of one choice. `params` says where the client wrote each of them."""

    def __init__(self, limits: MediaLimits, params: Sequence[str]) -> None:
        self._limits = limits
        self._params = params
        self._sizes: dict[int, MediaSize] = {}

    def note(self, item_index: int, size: MediaSize) -> None:
        """Take an item's size, as far as it is known; raise MediaError where it is too much."""
        if item_index >= len(self._params):
            return
        self._sizes[item_index] = size
        param, sizes = self._params[item_index], self._sizes.values()
        if size.pixels:
            _check(param, sum(one.pixels for one in sizes), self._limits.pixels, "pixels")
        if size.video_s:
            _check(param, sum(one.video_s for one in sizes), self._limits.video_s, "s of video")
        if size.audio_s:
            _check(param, sum(one.audio_s for one in sizes), self._limits.audio_s, "s of sound")
        if size.visual_tokens:
            tokens = sum(one.visual_tokens for one in sizes)
            _check(param, tokens, self._limits.visual_tokens, "visual tokens")

    def note_done(self, done: EncodeDone) -> None:
        """Take what came of an item: the tokens that it really has."""
        tokens = 0 if done.modality == "audio" else done.media_tokens - done.audio_tokens
        self.note(done.item_index, msgspec.structs.replace(done.size, visual_tokens=tokens))

    def note_prompt(self, visual_tokens: int) -> None:
        """Take the count of a prefill worker, which may come before an encoder's last word."""
        _check("messages", visual_tokens, self._limits.visual_tokens, "visual tokens")


def _check(param: str, total: float, limit: float, unit: str) -> None:
    total = round(total, _DIGITS)  # three tenths are 0.30000000000000004 in all
    if total > limit:
        text = f"{param}: with this {_show(total)} {unit}, at most {_show(limit)} are allowed in all"
        raise MediaError(text, param=param)


def _show(value: float) -> str:
    return f"{value:.{_DIGITS}f}".rstrip("0").rstrip(".")
