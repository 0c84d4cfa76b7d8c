"""An item's embeddings while they are made and after: chunks that any number of requests can follow.

Encoder process, event loop. One encoding serves all requests for equal content that meet in the process
(single flight). Knows nothing of sockets, models or caches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from transom.encoder.spans import ItemSpans
from transom.errors import ErrorInfo, TransomError, from_info
from transom.messages import MediaSize, Modality

Rows = NDArray[Any]  # (rows, hidden), float32 or raw bfloat16


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of prompt tokens with the rows of its pads."""

    token_ids: list[int]
    rows: Rows
    audio_rows: int
    last: bool

    @property
    def size_bytes(self) -> int:
        return int(self.rows.nbytes) + 8 * len(self.token_ids)

    @property
    def raw(self) -> memoryview:
        """The bytes of the rows."""
        return self.rows.reshape(-1).view(np.uint8).data


@dataclass(slots=True, eq=False)
class Reader:
    """How far one request has followed an encoding. Two are never the same, wherever they are."""

    on_size: Callable[[MediaSize], None]
    position: int = 0


@dataclass(eq=False)
class Encoding:
    """Chunks in order, appended by one producer.

    An encoding above `keep_bytes` forgets chunks that all its readers have had: memory stays bounded
    for media of any length, and nobody new can join. `window_bytes` is how far the producer may be
    ahead of the slowest reader.
    """

    key: str
    modality: Modality
    keep_bytes: int
    window_bytes: int
    chunks: list[Chunk | None] = field(default_factory=list)
    size_bytes: int = 0
    done: bool = False
    error: ErrorInfo | None = None
    notes: tuple[str, ...] = ()
    size: MediaSize = field(default_factory=MediaSize)
    cache_hit: bool = False
    spans: ItemSpans = field(default_factory=ItemSpans)
    media_tokens: int = 0
    audio_tokens: int = 0
    _open: list[Reader] = field(default_factory=list)
    _forgotten: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _room: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def complete(self) -> bool:
        """Whether all chunks are here."""
        return self.done and self.error is None and self._forgotten == 0

    @property
    def joinable(self) -> bool:
        """Whether a new reader would get everything."""
        return self.error is None and self._forgotten == 0

    @property
    def abandoned(self) -> bool:
        """Whether nobody follows."""
        return not self._open

    def join(self, on_size: Callable[[MediaSize], None] = lambda _: None) -> Reader:
        """Start reading from the first chunk. `on_size` is told the item's size now and as it grows.

        It must not raise.
        """
        assert self.joinable
        reader = Reader(on_size)
        self._open.append(reader)
        if self.size != MediaSize():
            on_size(self.size)
        return reader

    def measure(self, size: MediaSize) -> None:
        """Tell all readers a size that is new."""
        if size == self.size:
            return
        self.size = size
        for reader in self._open:
            reader.on_size(size)

    def measure_sound(self, heard_s: float) -> None:
        """Tell all readers when more sound has been decoded than was known of."""
        if heard_s > self.size.audio_s:
            self.measure(msgspec.structs.replace(self.size, audio_s=heard_s))

    def leave(self, reader: Reader) -> None:
        """Stop reading."""
        self._open.remove(reader)
        self._forget()

    async def publish(self, chunk: Chunk) -> None:
        """Append a chunk; wait while the readers are too far behind."""
        self.chunks.append(chunk)
        self.size_bytes += chunk.size_bytes
        self.media_tokens += chunk.rows.shape[0]
        self.audio_tokens += chunk.audio_rows
        self._signal()
        if chunk.last:
            self.done = True
            return
        while self._open and self._behind_bytes() > self.window_bytes:
            self._room.clear()
            await self._room.wait()

    def fail(self, error: TransomError) -> None:
        """End with an error, which every reader gets."""
        # Not the exception itself: its traceback leads back here, and such a cycle would keep the chunks.
        self.error = error.info()
        self.done = True
        self._signal()

    async def next(self, reader: Reader) -> Chunk | None:
        """Return the reader's next chunk, or None after the last; raise the error that ended the encoding.

        The chunk before counts as delivered from now on.
        """
        self._forget()
        while reader.position >= len(self.chunks):
            if self.error is not None:
                raise from_info(self.error)
            if self.done:
                return None
            changed = self._changed
            await changed.wait()
        chunk = self.chunks[reader.position]
        assert chunk is not None
        reader.position += 1
        return chunk

    def _signal(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _behind_bytes(self) -> int:
        slowest = min(reader.position for reader in self._open)
        return sum(chunk.size_bytes for chunk in self.chunks[slowest:] if chunk is not None)

    def _forget(self) -> None:
        self._room.set()
        if self.size_bytes <= self.keep_bytes or not self._open:
            return
        delivered = min(reader.position for reader in self._open)
        while self._forgotten < delivered:
            self.chunks[self._forgotten] = None
            self._forgotten += 1
