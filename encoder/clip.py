"""A video on its way through an encoder: runs decode side by side, chunks leave in order.

Encoder process, event loop. Units go to the forward pass as they are decoded; only their rows wait for
those before them. Knows nothing of sockets or requests.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from transom.encoder.decode_pool import Worker, WorkerEndedError
from transom.encoder.encoding import Chunk, Encoding, Rows
from transom.encoder.expand import VideoUnit, video_units
from transom.encoder.gate import Signal, StageClock, all_or_none
from transom.encoder.media import cutting, wire
from transom.errors import MediaError
from transom.messages import MediaOptions

if TYPE_CHECKING:
    from transom.encoder.pipeline import Pipeline

# A clip of this many units sends its first embeddings before anything but its beginning is decoded.
_LONG_UNITS = 40
_BEGINNING = 1 / 20
_AT_ONCE_S = 5.0
# Pieces of sound in one job: a piece is a segment of the audio path, a minute as a rule.
_PIECES = 2
_numbers = itertools.count()


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


@dataclass(frozen=True, slots=True)
class _Slice:
    """What one decode job takes of a run."""

    number: int
    begin: int
    stop: int
    units: range  # numbers of its units


class Clip:
    """One video on its way. Runs are decoded by several workers; a bound keeps them close together."""

    def __init__(
        self, pipeline: Pipeline, encoding: Encoding, file: wire.MemoryFile, options: MediaOptions
    ) -> None:
        self._pipeline = pipeline
        self._encoding = encoding
        self._file = file
        self._job = pipeline.video_job(options)
        self._number = next(_numbers)
        self._track = _Track()
        self._planned: list[VideoUnit] = []
        self._runs: Iterator[tuple[wire.RunPlan, list[_Slice]]] = iter(())
        self._slice_of: list[int] = []  # by unit
        self._open_slices: set[int] = set()  # not decoded yet
        self._units: dict[int, tuple[float, asyncio.Future[Rows]]] = {}
        self._frames = 0
        self._units_seen = 0
        self._next_unit = 0
        self._furthest = 0  # the last unit that a decoder was sent for
        self._longest = 0  # slices of a run
        self._ahead = 0
        self._begins_alone = False
        self._published = False
        self._lost_s: float | None = None  # when a worker was lost
        self._sound_notes: tuple[str, ...] = ()
        self._changed = Signal()

    async def run(self) -> None:
        """Publish all chunks of the clip."""
        pool = self._pipeline.pool
        try:
            head = await self._plan()
            decoders = min(pool.long_jobs, len(head.runs))
            # Enough for every decoder to have a run of its own, unless runs are as long as the clip.
            self._ahead = decoders * min(self._longest, 8) + 1
            work = [self._decode_runs(head) for _ in range(decoders)]
            if head.has_sound:
                work.append(self._follow_sound())
            await all_or_none(*work, self._publish_all(head))
        finally:
            pool.forget(self._number)

    async def _plan(self) -> wire.ClipHead:
        clock, started = StageClock(self._encoding.spans), time.monotonic()
        head: wire.ClipHead | None = None
        async with self._pipeline.pool.decode(self._job, self._file) as parts:
            async for reply, _ in parts:
                assert isinstance(reply, wire.ClipHead)
                head = reply
        assert head is not None
        clock.add("decode", started)
        self._encoding.measure(head.size)
        audio = self._pipeline.audio
        per_s = audio.mel.sampling_rate / audio.mel.hop_length / audio.frames_per_token
        patch = self._job.temporal_patch
        self._planned = video_units(head.timestamps, patch, per_s if head.has_sound else None)
        self._track.ended = not head.has_sound
        window = self._pipeline.config.unit_window
        self._begins_alone = len(self._planned) >= _LONG_UNITS
        beginning = min(window, int(len(self._planned) * _BEGINNING)) if self._begins_alone else window
        numbers = itertools.count()
        runs: list[tuple[wire.RunPlan, list[_Slice]]] = []
        for run in head.runs:
            slices = []
            first = window if runs else beginning
            for begin, stop in cutting.slices(len(run.goals), window, patch, first_units=first):
                units = range((run.first + begin) // patch, -(-(run.first + stop) // patch))
                slices.append(_Slice(next(numbers), begin, stop, units))
                self._slice_of += [slices[-1].number] * len(units)
            runs.append((run, slices))
        assert len(self._slice_of) == len(self._planned)
        self._open_slices.update(self._slice_of)
        self._runs = iter(runs)
        self._longest = max(len(slices) for _, slices in runs)
        return head

    async def _decode_runs(self, head: wire.ClipHead) -> None:
        """Decode runs until none is left."""
        worker: Worker | None = None
        for run, slices in self._runs:
            for which in slices:
                await self._changed.until(partial(self._may_decode, which))
                self._furthest = max(self._furthest, which.units[-1])
                self._changed.set()
                job = self._slice_job(head, run, which)
                try:
                    worker = await self._decode(head, job, worker, insist=which is not slices[0])
                except WorkerEndedError:
                    if not self._may_retry():
                        raise
                    worker = await self._decode(head, job, None, insist=False)
                self._open_slices.discard(which.number)
                self._changed.set()

    def _may_retry(self) -> bool:
        """Whether a lost worker's job is tried again: what ends workers a second time stays away from them.

        All workers may be lost at once, through no fault of the clip's.
        """
        now = time.monotonic()
        if self._lost_s is None:
            self._lost_s = now
        return now - self._lost_s < _AT_ONCE_S

    def _may_decode(self, which: _Slice) -> bool:
        """Whether a slice is near enough to what leaves next: the bound on rows that wait."""
        if self._begins_alone and which.number and not self._published:
            return False
        return which.number < self._slice_of[min(self._next_unit, len(self._slice_of) - 1)] + self._ahead

    def _slice_job(self, head: wire.ClipHead, run: wire.RunPlan, which: _Slice) -> wire.SliceJob:
        return wire.SliceJob(
            clip=self._number,
            first=run.first,
            goals=run.goals,
            keys=run.keys,
            begin=which.begin,
            stop=which.stop,
            end=run.end,
            height=head.height,
            width=head.width,
            temporal_patch=self._job.temporal_patch,
            timed=head.timed,
            can_jump=head.can_jump,
            frame_ticks=head.frame_ticks,
            threads=self._job.threads,
            decoder=self._pipeline.config.video_decoder,
        )

    async def _decode(
        self, head: wire.ClipHead, job: wire.SliceJob, near: Worker | None, *, insist: bool
    ) -> Worker | None:
        """Hand the units of a slice to the forward pass; return the worker that decoded it."""
        pipeline, clock = self._pipeline, StageClock(self._encoding.spans)
        async with pipeline.pool.decode(job, self._file, near=near, insist=insist) as parts:
            started = time.monotonic()
            async for reply, fd in parts:
                assert isinstance(reply, wire.FrameUnit)
                clock.add("decode", started)
                number = reply.position // job.temporal_patch
                if number in self._units or number < self._next_unit:  # by a worker that was lost
                    if fd is not None:
                        os.close(fd)
                    continue
                size = (reply.frames, reply.height, reply.width)
                future = await pipeline.submit_frames(self._encoding, fd, size, head.target)
                self._units[number] = head.timestamps[reply.position], future
                self._frames += reply.frames
                self._units_seen += 1
                pipeline.metrics.video_units.inc()
                self._changed.set()
                started = time.monotonic()
        return parts.worker

    async def _follow_sound(self) -> None:
        """Keep the sound ahead of the units that are being decoded."""
        pipeline, cutter = self._pipeline, self._pipeline.new_sound_cutter()
        worker: Worker | None = None
        assert self._job.sound is not None
        first = heard = 0
        while not self._track.ended:
            await self._changed.until(lambda: not self._track.covers(self._planned[self._furthest].audio_end))
            job = wire.TrackJob(clip=self._number, sound=self._job.sound, first=first, pieces=_PIECES)
            futures: list[asyncio.Future[Rows]] = []
            is_last = False
            try:
                # Where the last job ran the decoder stands ready; anywhere else it would begin anew.
                async with pipeline.pool.decode(job, self._file, near=worker, insist=True) as parts:
                    async for reply, fd in parts:
                        assert isinstance(reply, wire.Sound)
                        heard += reply.samples
                        self._encoding.measure_sound(heard / pipeline.audio.mel.sampling_rate)
                        futures += await pipeline.submit_sound(self._encoding, cutter, fd, reply)
                        is_last = reply.last
                        first += 1
                worker, self._sound_notes = parts.worker, parts.notes
            except WorkerEndedError:  # the next job goes on with the first piece that did not come
                if not self._may_retry():
                    raise
            for future in futures:
                self._track.add(await future)
            self._track.ended = is_last
            self._changed.set()

    async def _publish_all(self, head: wire.ClipHead) -> None:
        """Publish the units in order, as many at a time as are complete."""
        ids = self._pipeline.expander.ids
        tokens: list[int] = [ids.video_start]
        empty: Rows | None = None
        last = False
        while not last:
            rows: list[Rows] = []
            audio_rows = 0
            while await self._next_is_there(wait=not rows):
                unit_tokens, unit_rows, count = await self._take_unit()
                tokens += unit_tokens
                rows += unit_rows
                audio_rows += count
            last = self._next_unit == len(self._planned)
            if last:
                rest = await self._rest_of_sound()
                if rest is not None and (rows or empty is not None):
                    tokens += self._pipeline.expander.audio(len(rest))
                    rows.append(rest)
                    audio_rows += len(rest)
                tokens.append(ids.video_end)
                self._settle(head)
            if rows:
                empty = rows[0][:0]
            elif empty is None:
                raise MediaError("video has no frame that can be decoded")
            if not self._published:
                self._pipeline.metrics.first_chunk(self._units_seen / len(self._planned))
                self._published = True
                self._changed.set()
            joined = np.concatenate(rows or [empty])
            await self._encoding.publish(Chunk(tokens, joined, audio_rows, last))
            tokens = []

    async def _next_is_there(self, *, wait: bool) -> bool:
        """Whether a unit can be taken, leaving out those that don't exist; False after the last.

        Without `wait` it must be complete now.
        """
        while self._next_unit < len(self._planned):
            number = self._next_unit
            if number in self._units:
                is_complete = self._units[number][1].done() and self._track.covers(self._sound_end())
                return wait or is_complete
            if self._slice_of[number] not in self._open_slices:
                self._next_unit += 1
                self._changed.set()
            elif wait:
                await self._changed.wait()
            else:
                return False
        return False

    async def _take_unit(self) -> tuple[list[int], list[Rows], int]:
        """Return the tokens and rows of the next unit once it is complete, and how many rows are sound."""
        number = self._next_unit
        start_s, future = self._units[number]
        await self._changed.until(lambda: self._track.covers(self._sound_end()))
        picture = await future
        sound = self._track.take(self._sound_end())
        count = 0 if sound is None else len(sound)
        del self._units[number]
        self._next_unit += 1
        self._changed.set()
        tokens = self._pipeline.expander.video_unit(start_s, len(picture), count)
        return tokens, [picture] if sound is None else [picture, sound], count

    def _sound_end(self) -> int | None:
        """Return where the sound of the next unit ends in the track; None: it takes the rest.

        A damaged clip may give fewer units than planned; the last one it has takes the rest.
        """
        is_last = not self._open_slices and len(self._units) == 1
        return None if is_last else self._planned[self._next_unit].audio_end

    async def _rest_of_sound(self) -> Rows | None:
        """Return what no unit took: it is more than none only where the last ones don't exist."""
        await self._changed.until(lambda: self._track.ended)
        return self._track.take(None)

    def _settle(self, head: wire.ClipHead) -> None:
        """Write down what came of the clip, before its last chunk can be read."""
        planned = len(head.timestamps)
        if self._frames < planned:
            damage = f"video is damaged: {self._frames} of {planned} sampled frames could be decoded"
            self._encoding.notes = (damage, *self._sound_notes)
        else:
            self._encoding.notes = (*head.notes, *self._sound_notes)
