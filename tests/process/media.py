"""Media files for the end-to-end tests: drawn pictures, encoded clips, tones, and real samples.

Everything is a file as a user would send it (PNG, JPEG, MP4, WAV bytes), never a tensor.
"""

from __future__ import annotations

import base64
import io
import wave
from fractions import Fraction
from functools import cache
from pathlib import Path

import av
import numpy as np
from PIL import Image, ImageDraw

DATA = Path(__file__).resolve().parent.parent / "data"
COLOURS = {"red": (230, 20, 20), "green": (20, 160, 40), "blue": (30, 60, 230), "yellow": (250, 230, 20)}


def data_url(data: bytes, media_type: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def picture(colour: str, shape: str, *, size: tuple[int, int] = (160, 120), kind: str = "PNG") -> bytes:
    """One shape in the middle of a white picture."""
    image = Image.new("RGB", size, "white")
    x, y, r = size[0] / 2, size[1] / 2, min(size) * 0.32
    draw = ImageDraw.Draw(image)
    if shape == "circle":
        draw.ellipse((x - r, y - r, x + r, y + r), fill=COLOURS[colour])
    elif shape == "square":
        draw.rectangle((x - r, y - r, x + r, y + r), fill=COLOURS[colour])
    else:
        draw.polygon([(x, y - r), (x + r, y + 0.75 * r), (x - r, y + 0.75 * r)], fill=COLOURS[colour])
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


@cache
def photograph(colour: str, shape: str) -> bytes:
    """The same as a JPEG of 1920x1080 and some 2 MB, as cameras give: with a grain."""
    flat = np.asarray(Image.open(io.BytesIO(picture(colour, shape, size=(1920, 1080)))), np.int16)
    grain = np.random.default_rng(1).integers(-40, 41, (1080, 1920, 3), np.int16)
    buffer = io.BytesIO()
    Image.fromarray((flat + grain).clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=99)
    return buffer.getvalue()


def marked_jpeg(data: bytes, mark: int) -> bytes:
    """The same picture in other bytes: with a comment."""
    text = str(mark).encode()
    return data[:2] + b"\xff\xfe" + (len(text) + 2).to_bytes(2, "big") + text + data[2:]


def encode_clip(
    frames: list[np.ndarray], fps: int, sound: np.ndarray | None = None, rate: int = 24_000
) -> bytes:
    """Encode RGB frames (and mono float sound) to MP4 with H.264 and AAC."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=fps)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        audio = container.add_stream("aac", rate=rate, layout="mono") if sound is not None else None
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
        if audio is not None and sound is not None:
            frame = av.AudioFrame.from_ndarray(
                (sound[None] * 32767).astype(np.int16), format="s16", layout="mono"
            )
            frame.sample_rate = rate
            frame.time_base = Fraction(1, rate)
            frame.pts = 0
            container.mux(audio.encode(frame))
            container.mux(audio.encode())
    return buffer.getvalue()


@cache
def moving_circle(direction: str, *, seconds: int = 6, fps: int = 10) -> bytes:
    """A red circle that crosses a white picture: "right", "left", "up" or "down"."""
    width, height, r = 160, 120, 18
    frames = []
    count = seconds * fps
    for number in range(count):
        share = number / (count - 1)
        if direction in ("left", "up"):
            share = 1 - share
        x, y = (
            (30 + share * (width - 60), height / 2)
            if direction in ("left", "right")
            else (width / 2, 25 + share * (height - 50))
        )
        image = Image.new("RGB", (width, height), "white")
        ImageDraw.Draw(image).ellipse((x - r, y - r, x + r, y + r), fill=COLOURS["red"])
        frames.append(np.asarray(image))
    return encode_clip(frames, fps)


def colour_scenes(colours: list[str], *, seconds_each: int = 2, fps: int = 10) -> bytes:
    """Plain colours one after the other."""
    frames = []
    for colour in colours:
        frames += [np.full((96, 128, 3), COLOURS[colour], np.uint8)] * (seconds_each * fps)
    return encode_clip(frames, fps)


def wav(samples: np.ndarray, rate: int = 16_000) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
    return buffer.getvalue()


def tones(frequency: float, count: int, rate: int = 16_000) -> bytes:
    """`count` beeps of 0.3 s with pauses of 0.3 s."""
    t = np.arange(int(0.3 * rate)) / rate
    beep = 0.4 * np.sin(2 * np.pi * frequency * t) * np.minimum(1, np.minimum(t, t[::-1]) / 0.02)
    return wav(
        np.concatenate([np.concatenate([beep, np.zeros(int(0.3 * rate))]) for _ in range(count)]), rate
    )


def sample(name: str) -> bytes:
    """A real file of tests/data."""
    return (DATA / name).read_bytes()
