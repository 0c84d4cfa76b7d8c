"""Media items for encoder load: ServeGen or built-in sizes, seeded bytes, a host to fetch them from.

Runs in the benchmark's process. A few files of each kind are made once; what sets two items apart is a
comment in the file, so that making an item costs nothing beside encoding it.
"""

from __future__ import annotations

import ast
import asyncio
import csv
import io
import json
import random
import struct
import tarfile
import wave
import zlib
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import av
import numpy as np
from aiohttp import web
from PIL import Image

from transom.errors import ConfigError
from transom.messages import Modality

# Pixels behind one token of the models whose traffic ServeGen recorded.
_TOKEN_PIXELS = 28 * 28
# Share of traffic by picture area without ServeGen data: thumbnails, photos for the web, screenshots.
_BUILT_IN_TOKENS = {64: 0.15, 256: 0.25, 690: 0.25, 1196: 0.25, 2500: 0.10}
_ASPECTS = ((1, 1), (4, 3), (3, 4), (16, 9), (9, 16))
_FORMATS = ("JPEG",) * 8 + ("PNG", "WEBP")
_SOUND_S = (2.0, 4.0, 8.0, 16.0)
_CLIP_S = (4.0, 8.0, 16.0)
_MAX_TOKENS = 16384

Size = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Item:
    """One file; `name` is the item's identity, and its place on the media host."""

    name: str
    kind: Modality
    data: bytes
    mime: str
    label: str


class TokenSizes:
    """A distribution of image tokens."""

    def __init__(self, weights: Mapping[int, float]) -> None:
        self._tokens = sorted(tokens for tokens, weight in weights.items() if tokens > 0 and weight > 0)
        if not self._tokens:
            raise ConfigError("no image has a token in the size data")
        total = 0.0
        self._ends = [total := total + weights[tokens] for tokens in self._tokens]

    def draw(self, rng: random.Random) -> int:
        """Return the tokens of one picture."""
        place = bisect_right(self._ends, rng.random() * self._ends[-1])
        return self._tokens[min(place, len(self._tokens) - 1)]


def read_servegen(path: Path) -> TokenSizes:
    """Read the image tokens of all clients of a ServeGen archive, weighted by their request rates.

    A client has one table of sizes per window of the day and one rate per ten minutes.
    """
    weights: dict[int, float] = {}
    tables: dict[str, dict[str, Any]] = {}
    rates: dict[str, list[tuple[float, float]]] = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                file = archive.extractfile(member) if "/mm-image/" in member.name else None
                if file is None:
                    continue
                client = member.name.rsplit("/", 1)[1].rsplit("-", 1)[0]
                text = file.read().decode()
                if member.name.endswith("-dataset.json"):
                    tables[client] = json.loads(text)
                elif member.name.endswith("-trace.csv"):
                    rates[client] = [(float(row[0]), float(row[1])) for row in csv.reader(text.splitlines())]
        for client, table in tables.items():
            starts = sorted(float(start) for start in table)
            for moment, rate in rates.get(client, ()):
                start = starts[max(0, bisect_right(starts, moment) - 1)]
                window = table.get(str(int(start))) or table[str(start)]
                for tokens, share in ast.literal_eval(window["image_tokens"]).items():
                    weights[int(tokens)] = weights.get(int(tokens), 0.0) + rate * float(share)
    except (OSError, tarfile.TarError, ValueError, KeyError, IndexError, SyntaxError) as error:
        raise ConfigError(f"{path}: not a readable ServeGen archive ({error})") from None
    return TokenSizes(weights)


def picture_size(tokens: int, aspect: tuple[int, int], scale: float) -> Size:
    """Return (width, height) of a picture of so many tokens; `scale` shrinks its sides."""
    area = min(tokens, _MAX_TOKENS) * _TOKEN_PIXELS * scale * scale
    width = round((area * aspect[0] / aspect[1]) ** 0.5)
    return max(16, width), max(16, round(area / max(width, 1)))


class PictureBank:
    """Some pictures drawn from a size distribution, each encoded when it is first wanted.

    With `fresh` no two picks have pixels in common: some engines know a picture by them, whatever the file.
    """

    def __init__(
        self,
        *,
        sizes: TokenSizes | None = None,
        fixed: Size | None = None,
        scale: float = 1.0,
        count: int = 48,
        fresh: bool = False,
        seed: int = 0,
    ) -> None:
        self._fresh = fresh
        self._picks = 0
        rng = random.Random(f"pictures {seed}")
        sizes = sizes or TokenSizes(_BUILT_IN_TOKENS)
        self._plans: list[tuple[Size, str]] = []
        for _ in range(count):
            size = fixed or picture_size(sizes.draw(rng), rng.choice(_ASPECTS), scale)
            self._plans.append((size, rng.choice(_FORMATS)))
        self._files: dict[int, bytes] = {}

    def pick(self, rng: random.Random) -> tuple[Size, str, bytes]:
        """Return size, format and bytes of one of them."""
        place = rng.randrange(len(self._plans))
        size, form = self._plans[place]
        if self._fresh:
            self._picks += 1
            return size, form, draw_picture(size, form, self._picks)
        if place not in self._files:
            self._files[place] = draw_picture(size, form, place)
        return size, form, self._files[place]


class ItemMaker:
    """Makes items of a mix, each with other bytes; makers of other seeds make other items."""

    def __init__(self, mix: Mapping[str, float], bank: PictureBank, *, seed: int = 0) -> None:
        self._mix = dict(mix)
        self._bank = bank
        self._rng = random.Random(f"items {seed}")
        self._seed = seed
        self._count = 0

    def make(self) -> Item:
        """Return the next item."""
        kind = self._rng.choices(list(self._mix), list(self._mix.values()))[0]
        self._count += 1
        name = f"{self._seed}.{self._count}"
        if kind == "audio":
            seconds = self._rng.choice(_SOUND_S)
            return Item(name, "audio", _mark_wav(_wav(seconds), name.encode()), "audio/wav", f"{seconds:g} s")
        if kind == "video":
            seconds = self._rng.choice(_CLIP_S)
            return Item(name, "video", _mark_mp4(_mp4(seconds), name.encode()), "video/mp4", f"{seconds:g} s")
        (width, height), form, data = self._bank.pick(self._rng)
        marked = _MARKS[form](data, name.encode())
        return Item(name, "image", marked, f"image/{form.lower()}", f"{width}x{height}")


def draw_picture(size: Size, form: str, seed: int) -> bytes:
    """Return a picture with about as many bytes per pixel as a photograph."""
    width, height = size
    rng = np.random.default_rng((seed, width, height))
    coarse = Image.fromarray(rng.integers(0, 256, (max(2, height // 24), max(2, width // 24), 3), np.uint8))
    smooth = np.asarray(coarse.resize(size, Image.Resampling.BICUBIC), np.int16)
    grain = rng.integers(-6, 7, (height, width, 1), np.int16)
    buffer = io.BytesIO()
    pixels = (smooth + grain).clip(0, 255).astype(np.uint8)
    options: dict[str, Any] = {"PNG": {"compress_level": 1}, "WEBP": {"method": 0}}.get(form, {"quality": 85})
    Image.fromarray(pixels).save(buffer, form, **options)
    return buffer.getvalue()


def _mark_jpeg(data: bytes, text: bytes) -> bytes:
    return data[:2] + b"\xff\xfe" + struct.pack(">H", len(text) + 2) + text + data[2:]


def _mark_png(data: bytes, text: bytes) -> bytes:
    body = b"tEXt" + b"Comment\0" + text
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    return data[:33] + chunk + data[33:]  # behind the header


def _mark_riff(data: bytes, tag: bytes, text: bytes) -> bytes:
    body = data[8:] + tag + struct.pack("<I", len(text)) + text + b"\0" * (len(text) % 2)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _mark_webp(data: bytes, text: bytes) -> bytes:
    return _mark_riff(data, b"note", text)


def _mark_wav(data: bytes, text: bytes) -> bytes:
    return _mark_riff(data, b"note", text)


def _mark_mp4(data: bytes, text: bytes) -> bytes:
    return data + struct.pack(">I", len(text) + 8) + b"free" + text


_MARKS = {"JPEG": _mark_jpeg, "PNG": _mark_png, "WEBP": _mark_webp}


@cache
def _wav(seconds: float) -> bytes:
    rate = 16_000
    moments = np.arange(int(rate * seconds)) / rate
    tone = 0.3 * np.sin(2 * np.pi * (300 + 40 * np.sin(5 * moments)) * moments)
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((tone * 32767).astype("<i2").tobytes())
    return buffer.getvalue()


@cache
def _mp4(seconds: float) -> bytes:
    width, height, rate = 320, 240, 12
    base = np.asarray(Image.open(io.BytesIO(draw_picture((width, height), "PNG", 0))))
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("h264", rate=rate, options={"preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(int(seconds * rate)):
            frame = av.VideoFrame.from_ndarray(np.roll(base, 4 * number, axis=1), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return buffer.getvalue()


class MediaHost:
    """Serves items over HTTP on loopback; `delay_s` stands for the way to a real host and back."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self._delay_s = delay_s
        self._items: dict[str, Item] = {}

    async def __aenter__(self) -> MediaHost:
        app = web.Application()
        app.add_routes([web.get("/{name}", self._get)])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    def offer(self, item: Item) -> str:
        """Return the URL of an item."""
        self._items[item.name] = item
        return f"http://127.0.0.1:{self._port}/{item.name}"

    async def _get(self, request: web.Request) -> web.Response:
        item = self._items.get(request.match_info["name"])
        if item is None:
            raise web.HTTPNotFound
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        return web.Response(body=item.data, content_type=item.mime)
