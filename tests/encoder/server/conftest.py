"""A real encoder process with the demo checkpoint, and a client that stands for gateway and prefill."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
import time
import uuid
import wave
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import aiohttp
import av
import numpy as np
import pytest
from PIL import Image, ImageDraw

from tests.patience import PATIENCE_S
from transom.errors import ErrorInfo
from transom.messages import (
    Abort,
    EmbeddingChunk,
    EncodeDone,
    EncodeJob,
    ItemSize,
    MediaOptions,
    MediaSize,
    Modality,
    RequestFailed,
)
from transom.transport import Transport


@dataclass
class Result:
    """What came for one item."""

    tokens: list[int] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)
    chunks: int = 0
    complete: bool = False
    done: EncodeDone | None = None
    error: ErrorInfo | None = None
    failures: int = 0
    sizes: list[tuple[int, MediaSize]] = field(default_factory=list)  # chunks that had come, size
    pads: tuple[int, ...] = ()
    first: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def embedding(self) -> np.ndarray:
        return np.concatenate(self.rows)


class Client:
    """Sends jobs to one encoder and sorts what comes back; use as an async context manager."""

    def __init__(self, line: dict[str, Any]) -> None:
        self.line = line
        self.transport = Transport()
        self.results: dict[tuple[str, int], Result] = {}

    async def __aenter__(self) -> Client:
        await self.transport.start()
        self._receiver = asyncio.create_task(self._receive())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._receiver.cancel()
        await asyncio.gather(self._receiver, return_exceptions=True)
        await self.transport.close()

    async def _receive(self) -> None:
        while True:
            received = await self.transport.recv()
            message = received.message
            if isinstance(message, EmbeddingChunk):
                result = self.results[message.request_id, message.item_index]
                assert message.chunk_index == result.chunks
                assert not result.complete
                result.chunks += 1
                result.complete = message.last
                result.tokens += message.token_ids
                result.pads = message.pad_ids
                assert message.rows.dtype == "float32"
                rows = np.frombuffer(bytes(received.frames[0]), np.float32).reshape(message.rows.shape)
                assert sum(token in message.pad_ids for token in message.token_ids) == len(rows)
                result.rows.append(rows)
                result.first.set()
            elif isinstance(message, ItemSize):
                result = self.results[message.request_id, message.item_index]
                result.sizes.append((result.chunks, message.size))
            elif isinstance(message, EncodeDone):
                result = self.results[message.request_id, message.item_index]
                result.done = message
                result.ended.set()
            elif isinstance(message, RequestFailed):
                for (request_id, _), result in self.results.items():
                    if request_id == message.request_id:
                        result.error = message.error
                        result.failures += 1
                        result.ended.set()

    def send(
        self,
        request_id: str,
        modality: Modality,
        data: bytes | None = None,
        *,
        url: str | None = None,
        item: int = 0,
        deadline_s: float = 600.0,
        reply_to: str = "",
        **options: Any,
    ) -> Result:
        """Send one job; the result fills up as messages come."""
        job = EncodeJob(
            request_id=request_id,
            item_index=item,
            param=f"messages[0].content[{item}]",
            modality=modality,
            routing_key="key",
            url=url,
            options=MediaOptions(**options),
            deadline_s=time.time() + deadline_s,
            gateway=self.transport.address,
            reply_to=reply_to or self.transport.address,
        )
        result = self.results[request_id, item] = Result()
        self.transport.send(self.line["inbox"], job, [] if data is None else [data])
        return result

    def abort(self, request_id: str) -> None:
        self.transport.send(self.line["inbox"], Abort(request_id=request_id, reason="test"))

    async def wait(self, *results: Result) -> None:
        """Return when all results have ended."""
        async with asyncio.timeout(PATIENCE_S):
            for result in results:
                await result.ended.wait()

    async def load(self) -> dict[str, float]:
        """Ask the encoder's health listener."""
        async with aiohttp.ClientSession() as http, http.get(f"{self.line['http']}/health") as response:
            body: dict[str, Any] = await response.json()
            return dict(body["load"])

    async def settled(self) -> dict[str, float]:
        """Return the load once no item and no piece of one is left."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                load = await self.load()
                if not load["items"] and not load["queued_patches"] and not load["queued_mel_frames"]:
                    return load


def start_encoder(*flags: str, scope: str = "") -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """Start an encoder that shares its embeddings with those of the same scope only."""
    scope = scope or uuid.uuid4().hex
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TRANSOM_ENCODER_EMBEDDING_CACHE_SCOPE": scope,
        "TRANSOM_ENCODER_DECODE_WORKERS": "2",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "transom", "encoder", "--threads", "1", *flags],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        process.kill()
        process.wait()
        raise AssertionError("the encoder ended before it was ready")
    return process, json.loads(line)


def stop_encoder(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdout is not None
    process.stdout.close()


@pytest.fixture(scope="module")
def encoder() -> Iterator[dict[str, Any]]:
    """The readiness line of an encoder that lives as long as the module's tests."""
    process, line = start_encoder()
    yield line
    stop_encoder(process)


@pytest.fixture(scope="module")
def pair() -> Iterator[dict[str, Any]]:
    """The readiness line of an encoder with two ranks and no cache: equal pictures are embedded again."""
    process, line = start_encoder("--ranks", "2", "--embedding-cache-mb", "0")
    yield line
    stop_encoder(process)


@pytest.fixture
def encoder_process() -> Iterator[Callable[..., tuple[subprocess.Popen[str], dict[str, Any]]]]:
    """Starts further encoders with flags; they end with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*flags: str, scope: str = "") -> tuple[subprocess.Popen[str], dict[str, Any]]:
        process, line = start_encoder(*flags, scope=scope)
        started.append(process)
        return process, line

    yield start
    for process in started:
        stop_encoder(process)


@pytest.fixture
async def client(encoder: dict[str, Any]) -> AsyncIterator[Client]:
    async with Client(encoder) as own:
        yield own


@pytest.fixture(scope="session")
def new_client() -> type[Client]:
    return Client


def picture(seed: int, width: int = 120, height: int = 90, kind: str = "PNG") -> bytes:
    rng = np.random.default_rng(seed)
    image = Image.new("RGB", (width, height), tuple(int(v) for v in rng.integers(0, 256, 3)))
    draw = ImageDraw.Draw(image)
    for _ in range(4):
        x, y = int(rng.integers(0, width)), int(rng.integers(0, height))
        draw.ellipse((x - 20, y - 20, x + 20, y + 20), fill=tuple(int(v) for v in rng.integers(0, 256, 3)))
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def sound(seconds: float = 2.0, hertz: float = 440.0, rate: int = 16_000) -> bytes:
    samples = 0.4 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes((samples * 32767).astype("<i2").tobytes())
    return buffer.getvalue()


@cache  # for the same clip twice an encoder may give other bytes
def clip(frames: int = 40, fps: int = 10, hertz: float | None = None) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as output:
        stream = output.add_stream("mpeg4", rate=fps)
        stream.width, stream.height, stream.pix_fmt = 160, 96, "yuv420p"
        track = output.add_stream("aac", rate=24_000, layout="mono") if hertz else None
        for number in range(frames):
            pixels = np.full((96, 160, 3), (number * 5) % 250, np.uint8)
            output.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        output.mux(stream.encode(None))
        if track is not None and hertz is not None:
            wave_form = 0.4 * np.sin(2 * np.pi * hertz * np.arange(int(24_000 * frames / fps)) / 24_000)
            for start in range(0, len(wave_form) - 1023, 1024):
                part = np.ascontiguousarray(wave_form[None, start : start + 1024], np.float32)
                frame = av.AudioFrame.from_ndarray(part, format="fltp", layout="mono")
                frame.sample_rate, frame.pts = 24_000, start
                output.mux(track.encode(frame))
            output.mux(track.encode(None))
    return buffer.getvalue()


@pytest.fixture(scope="session")
def make_picture() -> Callable[..., bytes]:
    return picture


@pytest.fixture(scope="session")
def make_sound() -> Callable[..., bytes]:
    return sound


@pytest.fixture(scope="session")
def make_clip() -> Callable[..., bytes]:
    return clip
