"""From a media file to chunks of embeddings: decode, preprocess, forward, expand, overlapping.

Encoder process (front), event loop; the heavy parts run in decode processes and in ranks, and pixels go
from one to the other in the same memory. Knows nothing of sockets or requests: it fills an Encoding.
"""

from __future__ import annotations

import asyncio
import time
from typing import TypedDict

import numpy as np

from transom.encoder.clip import Clip
from transom.encoder.config import EncoderConfig
from transom.encoder.decode_pool import DecodePool
from transom.encoder.encoding import Chunk, Encoding, Rows
from transom.encoder.expand import Expander
from transom.encoder.gate import CostGate, StageClock
from transom.encoder.media import wire
from transom.encoder.metrics import EncoderMetrics
from transom.encoder.models.config import AudioConfig, ProcessorConfig
from transom.encoder.ranks import wire as wire_to_ranks
from transom.encoder.ranks.pool import Ranks
from transom.encoder.sound import SoundCutter
from transom.errors import MediaError
from transom.messages import MediaOptions

_FORWARDS_PENDING = 4  # full forwards' worth of pieces that a rank may have in work
_MAX_PENDING = 256  # pieces in work for each of these forwards: each holds a descriptor


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
        ranks: Ranks,
        expander: Expander,
        processor: ProcessorConfig,
        audio: AudioConfig,
        metrics: EncoderMetrics,
    ) -> None:
        self.config = config
        self.pool = pool
        self._ranks = ranks
        self.expander = expander
        self._processor = processor
        self.audio = audio
        self.metrics = metrics
        # Clips share the decode workers slice by slice; more of them at once would only all be late.
        self._clips = asyncio.Semaphore(max(2, config.decode_processes))
        # Bounds the pictures between a decoder and their place in a rank's queue.
        self._decoded = asyncio.Semaphore(2 * config.decode_processes + 2)
        self._patch_bytes = 4 * 3 * processor.temporal_patch_size * processor.patch_size**2
        # Bounds what waits for a forward, over all items, in patches.
        pending_cost = _FORWARDS_PENDING * config.batch_patches * config.ranks
        self._pending = CostGate(pending_cost)
        self._least_cost = max(1, config.batch_patches // _MAX_PENDING)

    def new_sound_cutter(self) -> SoundCutter:
        """Return a cutter for one sound."""
        return SoundCutter(self.audio)

    async def run(self, encoding: Encoding, file: wire.MemoryFile, options: MediaOptions) -> None:
        """Publish all chunks of an item; raise MediaError when it is at fault."""
        self._ranks.refuse_quarantined(encoding.key)
        self._ranks.upstream += 1
        try:
            if encoding.modality == "image":
                await self._image(encoding, file, options)
            elif encoding.modality == "audio":
                await self._sound(encoding, file)
            else:
                async with self._clips:
                    await Clip(self, encoding, file, options).run()
        finally:
            self._ranks.upstream -= 1
            self._ranks.cancel(encoding)

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
            reduced_jpeg=self.config.reduced_jpeg,
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
        clock = StageClock(encoding.spans)
        future: asyncio.Future[Rows] | None = None
        async with self._decoded, self.pool.decode(self._image_job(options), file) as parts:
            started = time.monotonic()
            async for reply, fd in parts:
                if isinstance(reply, wire.Measured):
                    encoding.measure(reply.size)
                    continue
                assert isinstance(reply, wire.Picture)
                clock.add("decode", started)
                size = (1, reply.height, reply.width)
                future = await self.submit_frames(encoding, fd, size, reply.target)
        assert future is not None
        rows = await future
        await encoding.publish(Chunk(self.expander.image(len(rows)), rows, 0, last=True))

    def _patches(self, frames: int, target: tuple[int, int]) -> int:
        """Return how many patches some frames of one item make."""
        cfg = self._processor
        height, width = target
        return -(-frames // cfg.temporal_patch_size) * (height // cfg.patch_size) * (width // cfg.patch_size)

    async def submit_frames(
        self, encoding: Encoding, fd: int | None, size: tuple[int, int, int], target: tuple[int, int]
    ) -> asyncio.Future[Rows]:
        """Hand in decoded frames (count, height, width), waiting while too much is pending. Takes `fd`."""
        if fd is None:
            raise MediaError("a decoder answered without data")
        frames, height, width = size
        order = wire_to_ranks.Frames(number=0, frames=frames, height=height, width=width, target=target)
        return await self._submit(encoding, order, self._patches(frames, target), wire.MemoryFile.adopt(fd))

    async def submit_sound(
        self, encoding: Encoding, cutter: SoundCutter, fd: int | None, sound: wire.Sound
    ) -> list[asyncio.Future[Rows]]:
        """Hand in the segments that a piece of sound completes. Takes `fd`."""
        samples = wire.map_array(fd, np.float32, (sound.samples,))
        futures = []
        for window in cutter.push(samples, sound.last):
            order = wire_to_ranks.Sound(
                number=0, samples=len(window.samples), skip=window.skip, frames=window.frames
            )
            file = wire.MemoryFile.of(np.ascontiguousarray(window.samples).view(np.uint8).data)
            futures.append(await self._submit(encoding, order, window.frames, file))
        return futures

    async def _submit(
        self,
        encoding: Encoding,
        order: wire_to_ranks.Frames | wire_to_ranks.Sound,
        cost: int,
        file: wire.MemoryFile,
    ) -> asyncio.Future[Rows]:
        # In patches: what the piece takes in a rank and, as raw bytes, here; and a share for its descriptor.
        held = max(cost + file.size_bytes // self._patch_bytes, self._least_cost)
        hold = self._pending.hold(held)
        try:
            await hold.__aenter__()
        except BaseException:
            file.close()
            raise
        future = self._ranks.submit(encoding, order, cost, file)
        future.add_done_callback(lambda _: hold.release())
        return future

    async def _sound(self, encoding: Encoding, file: wire.MemoryFile) -> None:
        clock = StageClock(encoding.spans)
        cutter = self.new_sound_cutter()
        ids = self.expander.ids
        head = [ids.audio_start]
        heard = 0
        waiting: list[asyncio.Future[Rows]] = []

        async def publish(*, last: bool) -> None:
            nonlocal head
            rows = await waiting.pop(0)
            tokens = head + [ids.audio_pad] * len(rows) + ([ids.audio_end] if last else [])
            head = []
            await encoding.publish(Chunk(tokens, rows, len(rows), last))

        async with self.pool.decode(self.audio_job(), file) as parts:
            started = time.monotonic()
            async for reply, fd in parts:
                if isinstance(reply, wire.Measured):
                    encoding.measure(reply.size)
                    continue
                assert isinstance(reply, wire.Sound)
                clock.add("decode", started)
                heard += reply.samples
                encoding.measure_sound(heard / self.audio.mel.sampling_rate)
                waiting += await self.submit_sound(encoding, cutter, fd, reply)
                # One segment stays in flight, so that the next is decoded meanwhile.
                while len(waiting) > 1:
                    await publish(last=False)
                started = time.monotonic()
        # Notes come with the end of decoding, and must be there when the last chunk is read.
        encoding.notes = parts.notes
        await publish(last=True)
