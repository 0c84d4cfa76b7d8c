"""From a media file to chunks of embeddings: decode, preprocess, forward, expand, overlapping.

Encoder process, event loop; the heavy parts run in decode processes, preprocessing threads and the
forward thread. Knows nothing of sockets or requests: it fills an Encoding.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypedDict, TypeVar

import numpy as np

from transom.encoder.clip import Clip
from transom.encoder.config import EncoderConfig
from transom.encoder.decode_pool import DecodePool
from transom.encoder.encoding import Chunk, Encoding
from transom.encoder.engine import Engine, Patches, Rows
from transom.encoder.expand import Expander
from transom.encoder.gate import CostGate, StageClock
from transom.encoder.media import wire
from transom.encoder.models.config import AudioConfig, ProcessorConfig
from transom.encoder.preprocess import FramePreprocessor, MelStream
from transom.errors import MediaError
from transom.messages import MediaOptions

T = TypeVar("T")


class _PixelBounds(TypedDict):
    min_pixels: int
    max_pixels: int


def _pixel_bounds(options: MediaOptions, low: int, high: int) -> _PixelBounds:
    """Return the pixel budget of one picture or frame; `low` and `high` are the checkpoint's.

    A client may ask for less than the checkpoint's largest, never for more: what a forward pass costs
    grows faster than the pixels, and nobody else's item runs meanwhile.
    """
    if options.min_pixels is not None and options.min_pixels > high:
        raise MediaError(f"min_pixels {options.min_pixels} is above the model's largest, {high}")
    most = min(options.max_pixels or high, high)
    return _PixelBounds(min_pixels=min(options.min_pixels or low, most), max_pixels=most)


class Pipeline:
    """Encodes one item at a time per call; calls run side by side."""

    def __init__(
        self,
        config: EncoderConfig,
        pool: DecodePool,
        engine: Engine,
        expander: Expander,
        processor: ProcessorConfig,
        audio: AudioConfig,
        frames: FramePreprocessor,
        new_mel_stream: Callable[[], MelStream],
    ) -> None:
        self.config = config
        self.pool = pool
        self._engine = engine
        self.expander = expander
        self._processor = processor
        self.audio = audio
        self._frames = frames
        self.new_mel_stream = new_mel_stream
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="preprocess")
        # Bounds the decoded pixels that wait for preprocessing.
        self._decoded = asyncio.Semaphore(2 * config.decode_workers + 2)
        # Bounds the patches that wait for a forward, over all items.
        self._pending = CostGate(4 * config.batch_patches)

    async def close(self) -> None:
        """Stop the threads."""
        await asyncio.to_thread(self._threads.shutdown)

    async def run(self, encoding: Encoding, file: wire.MemoryFile, options: MediaOptions) -> None:
        """Publish all chunks of an item; raise MediaError when it is at fault."""
        self._engine.upstream += 1
        try:
            if encoding.modality == "image":
                await self._image(encoding, file, options)
            elif encoding.modality == "audio":
                await self._sound(encoding, file)
            else:
                await Clip(self, encoding, file, options).run()
        finally:
            self._engine.upstream -= 1
            self._engine.cancel(encoding)

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function in a preprocessing thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    def _image_job(self, options: MediaOptions) -> wire.ImageJob:
        cfg = self._processor
        return wire.ImageJob(
            factor=cfg.factor,
            **_pixel_bounds(options, cfg.image_min_pixels, cfg.image_max_pixels),
            max_aspect_ratio=cfg.max_aspect_ratio,
            max_image_pixels=self.config.max_image_pixels,
            full_decode_pixels=self.config.full_decode_pixels,
            max_tokens=self.config.max_visual_tokens,
            background=options.background,
            frame_index=options.frame_index,
        )

    def audio_job(self) -> wire.AudioJob:
        """Return the decode job of a sound."""
        return wire.AudioJob(
            sampling_rate=self.audio.mel.sampling_rate,
            piece_samples=self.audio.audio_segment_size * self.audio.mel.hop_length,
            max_audio_s=self.config.max_audio_s,
        )

    def video_job(self, options: MediaOptions) -> wire.VideoJob:
        """Return the decode job of a clip."""
        cfg = self._processor
        max_frames = min(options.max_frames or cfg.max_frames, cfg.max_frames)
        use_audio = options.use_audio is not False
        return wire.VideoJob(
            factor=cfg.factor,
            **_pixel_bounds(options, cfg.video_min_pixels, cfg.video_max_pixels),
            total_max_pixels=cfg.video_total_max_pixels,
            max_aspect_ratio=cfg.max_aspect_ratio,
            max_image_pixels=self.config.max_image_pixels,
            full_decode_pixels=self.config.full_decode_pixels,
            max_tokens=self.config.max_visual_tokens,
            fps=options.fps or cfg.fps,
            min_frames=min(options.min_frames or cfg.min_frames, max_frames),
            max_frames=max_frames,
            temporal_patch=cfg.temporal_patch_size,
            max_video_s=self.config.max_video_s,
            threads=self.config.decode_threads,
            sound=self.audio_job() if use_audio else None,
        )

    async def _image(self, encoding: Encoding, file: wire.MemoryFile, options: MediaOptions) -> None:
        clock = StageClock(encoding.timings_ms)
        async with self._decoded:
            started = time.monotonic()
            patches: Patches | None = None
            async with self.pool.decode(self._image_job(options), file) as parts:
                async for reply, fd in parts:
                    assert isinstance(reply, wire.Picture)
                    pixels = wire.map_array(fd, np.uint8, (1, reply.height, reply.width, 3))
                    started = clock.add("decode", started)
                    patches = await self.in_thread(self.patches, pixels, reply.target)
                    started = clock.add("preprocess", started)
            assert patches is not None
        rows = await self._embed(encoding, patches)
        clock.add("encode", started)
        await encoding.publish(Chunk(self.expander.image(len(rows)), rows, 0, last=True))

    def patches(self, frames: Any, target: tuple[int, int]) -> Patches:
        """Cut the frames of one temporal patch (preprocessing thread)."""
        return Patches(*self._frames(frames, target))

    async def _embed(self, encoding: Encoding, patches: Patches) -> Rows:
        cost = patches.pixels.shape[0]
        async with self._pending.hold(cost):
            return await self._engine.submit(encoding, patches)

    async def submit_patches(self, encoding: Encoding, patches: Patches) -> asyncio.Future[Rows]:
        """Hand in one unit, waiting while too much is pending."""
        hold = self._pending.hold(patches.pixels.shape[0])
        await hold.__aenter__()
        future = self._engine.submit(encoding, patches)
        future.add_done_callback(lambda _: hold.release())
        return future

    async def submit_mels(
        self, encoding: Encoding, stream: MelStream, fd: int | None, sound: wire.Sound
    ) -> list[asyncio.Future[Rows]]:
        """Hand in the segments that a piece of sound completes."""
        samples = wire.map_array(fd, np.float32, (sound.samples,))
        mels = await self.in_thread(stream.push, samples, sound.last)
        return [self._engine.submit(encoding, mel) for mel in mels]

    async def _sound(self, encoding: Encoding, file: wire.MemoryFile) -> None:
        clock = StageClock(encoding.timings_ms)
        stream = self.new_mel_stream()
        ids = self.expander.ids
        head = [ids.audio_start]
        waiting: list[asyncio.Future[Rows]] = []
        started = time.monotonic()
        async with self.pool.decode(self.audio_job(), file) as parts:
            async for reply, fd in parts:
                assert isinstance(reply, wire.Sound)
                started = clock.add("decode", started)
                waiting += await self.submit_mels(encoding, stream, fd, reply)
                started = clock.add("preprocess", started)
                # One segment stays in flight, so that the next is decoded meanwhile.
                while waiting if reply.last else len(waiting) > 1:
                    rows = await waiting.pop(0)
                    last = reply.last and not waiting
                    tokens = head + [ids.audio_pad] * len(rows) + ([ids.audio_end] if last else [])
                    head = []
                    started = clock.add("encode", started)
                    await encoding.publish(Chunk(tokens, rows, len(rows), last))
            encoding.notes = parts.notes
