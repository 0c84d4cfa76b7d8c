"""Seeded pictures, clips and sounds for benchmarks: small, valid, each seed other bytes."""

from __future__ import annotations

import io
import random
import wave
from typing import Any, cast

import av
import numpy as np
from PIL import Image, ImageDraw

from transom.client import inline_part
from transom.messages import Modality

Seed = tuple[int, int]
_SIDE = 128
_COLOURS = ("red", "green", "blue", "yellow", "purple", "orange")


def make_part(kind: str, seed: Seed) -> dict[str, Any]:
    """Return a content part of the kind (image, video or audio) that is a function of the seed."""
    make, mime = {
        "image": (_png, "image/png"),
        "video": (_mp4, "video/mp4"),
        "audio": (_wav, "audio/wav"),
    }[kind]
    return inline_part(make(random.Random(f"{kind}-{seed}")), mime, cast(Modality, kind))


def _scene(rng: random.Random, colour: str, offset: int) -> Image.Image:
    image = Image.new("RGB", (_SIDE, _SIDE), "white")
    left, top = 8 + offset, rng.randrange(8, 56)
    ImageDraw.Draw(image).ellipse((left, top, left + 56, top + 56), fill=colour)
    return image


def _png(rng: random.Random) -> bytes:
    image = _scene(rng, rng.choice(_COLOURS), rng.randrange(48))
    # One pixel that no other seed is likely to share keeps the items' keys apart.
    image.putpixel((0, 0), tuple(rng.randrange(256) for _ in range(3)))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def _mp4(rng: random.Random) -> bytes:
    buffer = io.BytesIO()
    colour, row = rng.choice(_COLOURS), rng.getrandbits(32)
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("h264", rate=8)
        stream.width = stream.height = _SIDE
        stream.pix_fmt = "yuv420p"
        for number in range(16):
            image = _scene(random.Random(row), colour, 3 * number)
            for packet in stream.encode(av.VideoFrame.from_ndarray(np.asarray(image), format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return buffer.getvalue()


def _wav(rng: random.Random) -> bytes:
    rate, seconds = 16_000, 1.5
    time = np.arange(int(rate * seconds)) / rate
    tone = 0.3 * np.sin(2 * np.pi * rng.uniform(200, 1200) * time)
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((tone * 32767).astype("<i2").tobytes())
    return buffer.getvalue()
