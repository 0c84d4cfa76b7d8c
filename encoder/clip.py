"""A video on its way through an encoder: units and their sound, out as chunks while later ones decode.

Encoder process, event loop. Knows nothing of sockets or requests.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from transom.encoder.encoding import Chunk, Encoding, Rows
from transom.encoder.expand import VideoUnit, video_units
from transom.encoder.gate import StageClock
from transom.encoder.media import wire
from transom.errors import MediaError
from transom.messages import MediaOptions

if TYPE_CHECKING:
    from transom.encoder.pipeline import Pipeline


@dataclass(slots=True)
class _Track:
    """The rows of a clip's sound that no unit has taken yet."""

    parts: list[Rows] = field(default_factory=list)
    taken: int = 0
    held: int = 0
    ended: bool = False

    def add(self, rows: Rows) -> None:
        self.parts.append(rows)
        self.held += len(rows)

    def covers(self, end: int | None) -> bool:
        return self.ended or (end is not None and self.taken + self.held >= end)

    def take(self, end: int | None) -> Rows | None:
        """Return the rows up to token `end` of the track (None: all), or None when that is none."""
        count = self.held if end is None else min(max(end - self.taken, 0), self.held)
        if not count:
            return None
        joined = np.concatenate(self.parts)
        self.parts = [joined[count:]] if count < self.held else []
        self.taken += count
        self.held -= count
        return joined[:count]


class Clip:
    """One video on its way: units and sound come from the decoder, leave as chunks in order."""

    def __init__(
        self, pipeline: Pipeline, encoding: Encoding, file: wire.MemoryFile, options: MediaOptions
    ) -> None:
        self._pipeline = pipeline
        self._encoding = encoding
        self._file = file
        self._job = pipeline.video_job(options)
        self._expander = pipeline.expander
        self._track = _Track()
        self._planned: list[VideoUnit] = []
        self._units: list[tuple[float, asyncio.Future[Rows]]] = []
        self._sent = 0
        self._empty_rows: Rows | None = None
        self._events: asyncio.Queue[Any] = asyncio.Queue(pipeline.config.unit_window)

    async def run(self) -> None:
        """Publish all chunks of the clip."""
        reader = asyncio.create_task(self._read())
        try:
            while (event := await self._event(reader)) is not None:
                kind, value = event
                if kind == "unit":
                    self._units.append(value)
                elif kind == "sound":
                    self._track.add(await value)
                else:
                    self._track.ended = True
                await self._flush()
            await reader
            self._track.ended = True
            await self._flush(final=True)
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _event(self, reader: asyncio.Task[None]) -> Any:
        """Return the next event of the reader, or None when it has ended."""
        getter = asyncio.ensure_future(self._events.get())
        try:
            await asyncio.wait({getter, reader}, return_when=asyncio.FIRST_COMPLETED)
            if getter.done():
                return getter.result()
        finally:
            getter.cancel()  # also when this task is: nobody else would end it
        await asyncio.gather(getter, return_exceptions=True)
        return None if self._events.empty() else self._events.get_nowait()

    async def _read(self) -> None:
        pipeline, clock = self._pipeline, StageClock(self._encoding.spans)
        cutter = pipeline.new_sound_cutter()
        target = (0, 0)
        started = time.monotonic()
        async with pipeline.pool.decode(self._job, self._file) as parts:
            async for reply, fd in parts:
                started = clock.add("decode", started)
                if isinstance(reply, wire.ClipHead):
                    target = reply.target
                    self._plan(reply)
                elif isinstance(reply, wire.FrameUnit):
                    size = (reply.frames, reply.height, reply.width)
                    future = await pipeline.submit_frames(self._encoding, fd, size, target)
                    await self._events.put(("unit", (reply.start_s, future)))
                elif isinstance(reply, wire.Sound):
                    for future in await pipeline.submit_sound(self._encoding, cutter, fd, reply):
                        await self._events.put(("sound", future))
                    if reply.last:
                        await self._events.put(("silence", None))
                started = time.monotonic()
            self._encoding.notes = parts.notes

    def _plan(self, head: wire.ClipHead) -> None:
        audio = self._pipeline.audio
        per_s = audio.mel.sampling_rate / audio.mel.hop_length / audio.frames_per_token
        self._planned = video_units(
            head.timestamps, self._job.temporal_patch, per_s if head.has_sound else None
        )
        self._track.ended = not head.has_sound

    async def _flush(self, *, final: bool = False) -> None:
        """Publish the units whose pictures and sound are complete, as one chunk."""
        ids = self._expander.ids
        tokens: list[int] = [ids.video_start] if self._sent == 0 else []
        rows: list[Rows] = []
        audio_rows = 0
        ready = 0
        for start_s, future in self._units:
            number = self._sent + ready
            # A damaged clip may give fewer units than planned; the last one it has takes the rest.
            is_last = number == len(self._planned) - 1 or (final and ready == len(self._units) - 1)
            end = None if is_last else self._planned[number].audio_end
            if not self._track.covers(end):
                break
            picture = await future
            sound = self._track.take(end)
            count = 0 if sound is None else len(sound)
            tokens += self._expander.video_unit(start_s, len(picture), count)
            rows.append(picture)
            if sound is not None:
                rows.append(sound)
            audio_rows += count
            ready += 1
        if self._encoding.done or not (ready or final):
            return
        del self._units[:ready]
        self._sent += ready
        last = final or self._sent == len(self._planned)
        if last:
            tokens.append(ids.video_end)
        if rows:
            joined = np.concatenate(rows)
        elif self._empty_rows is not None:
            joined = self._empty_rows
        else:
            raise MediaError("video has no frame that can be decoded")
        self._empty_rows = joined[:0]
        await self._encoding.publish(Chunk(tokens, joined, audio_rows, last))
