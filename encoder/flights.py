"""The encodings that are being made or sent: one for all items of equal content (single flight).

Encoder process, event loop. Knows encodings and the cache of finished ones; nothing of sockets or requests.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from transom.encoder.encoding import Encoding
from transom.encoder.kept import KeptEncodings
from transom.encoder.media import wire
from transom.encoder.pipeline import Pipeline
from transom.encoder.spans import ItemSpans, Timeline
from transom.errors import CancelledRequestError, TransomError
from transom.messages import Dtype, EncodeJob

logger = logging.getLogger(__name__)

_AHEAD_BYTES = 64 * 1024 * 1024
Fill = Callable[[], Awaitable[None]]


class Flights:
    """Finds or begins encodings by their content key. `spawn` runs a task that the stage waits for."""

    def __init__(
        self,
        kept: KeptEncodings,
        pipeline: Pipeline,
        dtype: Dtype,
        timeline: Timeline,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._kept = kept
        self._pipeline = pipeline
        self._dtype = dtype
        self._timeline = timeline
        self._spawn = spawn
        self._running: dict[str, tuple[Encoding, asyncio.Task[None]]] = {}

    def joinable(self, key: str) -> Encoding | None:
        """Return the encoding of a key if one is under way that a new reader would get all of."""
        running = self._running.get(key)
        return running[0] if running is not None and running[0].joinable else None

    async def look_up(self, key: str, job: EncodeJob) -> Encoding | None:
        """Return the encoding of a key if it is under way or kept; its content is not needed."""
        lease = None if self.joinable(key) else await self._kept.look_up(key)
        running = self.joinable(key)
        if running is not None or lease is None:
            return running
        encoding = self._new(key, job)
        self._begin(encoding, job, lambda: self._kept.replay(encoding, lease))
        return encoding

    def encode(self, key: str, job: EncodeJob, file: wire.MemoryFile) -> Encoding:
        """Return the encoding of a key, under way or begun now. The caller keeps its own `file`."""
        running = self.joinable(key)
        if running is not None:
            return running
        encoding = self._new(key, job)
        own = file.duplicate()
        run = functools.partial(self._pipeline.run, encoding, own, job.options)
        self._begin(encoding, job, lambda: self._kept.fill(encoding, self._dtype, run), own)
        return encoding

    def stop_if_abandoned(self, encoding: Encoding) -> None:
        """End the making of an encoding that nobody follows."""
        current = self._running.get(encoding.key)
        if current is not None and current[0] is encoding and encoding.abandoned and not encoding.done:
            current[1].cancel()
            del self._running[encoding.key]

    def _new(self, key: str, job: EncodeJob) -> Encoding:
        keep_bytes = self._kept.capacity_bytes // 2
        return Encoding(
            key,
            job.modality,
            keep_bytes=keep_bytes,
            window_bytes=_AHEAD_BYTES,
            spans=ItemSpans(self._timeline),
        )

    def _begin(
        self, encoding: Encoding, job: EncodeJob, fill: Fill, file: wire.MemoryFile | None = None
    ) -> None:
        self._running[encoding.key] = encoding, self._spawn(self._produce(encoding, job, fill, file))

    async def _produce(
        self, encoding: Encoding, job: EncodeJob, fill: Fill, file: wire.MemoryFile | None
    ) -> None:
        try:
            await fill()
        except asyncio.CancelledError:
            encoding.fail(CancelledRequestError("nobody waits for this item any more"))
            raise
        except TransomError as error:
            encoding.fail(error)
            _let_go(error)
        except Exception as error:
            logger.exception("encoding %s failed", job.param)
            encoding.fail(TransomError(f"the encoder failed on this item ({type(error).__name__})"))
            _let_go(error)
        finally:
            if file is not None:
                file.close()
            self._forget(encoding)

    def _forget(self, encoding: Encoding) -> None:
        current = self._running.get(encoding.key)
        if current is not None and current[0] is encoding:
            del self._running[encoding.key]


def _let_go(error: Exception) -> None:
    """Drop what the frames of a failed encoding hold.

    A future that failed holds the error, its traceback the frames, and one of those the future: with that
    cycle, the rows and samples of the item would stay until gc finds it.
    """
    traceback.clear_frames(error.__traceback__)
