"""Finished encodings in the embedding cache of the machine: found, sent again, kept, without copies.

Encoder process, event loop; what takes long runs in threads. Knows entries and encodings; nothing of
sockets, models or how the cache keeps its bytes.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
from numpy.typing import NDArray

from transom.encoder.encoding import Chunk, Encoding
from transom.messages import Dtype, MediaSize, TensorMeta
from transom.shared_cache.contract import ArenaError, Busy, Claim, EmbeddingCache, EntryMeta, Lease
from transom.shared_cache.opening import open_embedding_cache
from transom.shared_cache.single_flight import lease_or_claim

logger = logging.getLogger(__name__)

_FORMAT = 2  # of what is kept beside the rows


class _KeptChunk(msgspec.Struct, frozen=True, array_like=True):
    token_ids: list[int]
    rows_len: int
    audio_rows: int


class _Kept(msgspec.Struct, frozen=True, array_like=True):
    chunks: list[_KeptChunk]
    notes: tuple[str, ...]
    size: MediaSize


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Kept)


class KeptEncodings:
    """The embedding cache as the encoder uses it. Keeps nothing before `open` and after `close`."""

    def __init__(self) -> None:
        self._opening: asyncio.Task[EmbeddingCache] | None = None
        self._cache: EmbeddingCache | None = None

    async def open(self, identity: str, size_bytes: int, *, keep: bool) -> None:
        """Open the cache that all encoders of this identity share."""
        work = asyncio.to_thread(open_embedding_cache, f"{identity}/{_FORMAT}", size_bytes, keep=keep)
        # A start that is broken off leaves the thread running: `close` must have what it opens.
        self._opening = asyncio.create_task(work)
        self._cache = await asyncio.shield(self._opening)

    async def close(self) -> None:
        """Let go of the cache. Call it when nothing is found or kept any more."""
        opening, self._opening, self._cache = self._opening, None, None
        if opening is not None:
            cache = await opening
            # Chunks in the cycles of dead tasks and errors would hold leases until the process ends.
            gc.collect()
            await asyncio.to_thread(cache.close)

    @property
    def capacity_bytes(self) -> int:
        """The bytes that all entries together may have."""
        return self._cache.capacity_bytes if self._cache else 0

    def load(self) -> dict[str, float]:
        """Return the figures of the cache; all encoders that share it give the same."""
        if self._cache is None:
            return {}
        stats = self._cache.stats()
        return {
            "cache_bytes": stats.used_bytes,
            "cache_entries": stats.entries,
            "cache_evictions": stats.evictions,
            "cache_leases": stats.leases,
        }

    async def fill(self, encoding: Encoding, dtype: Dtype, make: Callable[[], Awaitable[None]]) -> None:
        """Give an encoding its chunks: from the cache, or by `make`, and then keep them."""
        found = await self.find(encoding)
        if isinstance(found, Lease):
            await self.replay(encoding, found)
        elif found is None:
            await make()
        else:
            with found:
                await make()
                if encoding.complete:
                    await self.keep(encoding, found, dtype)

    async def find(self, encoding: Encoding) -> Lease | Claim | None:
        """Return the entry of an encoding or the claim to make it; None to encode without keeping it.

        Waits for another encoder that is making the entry of a picture. Clips and sounds come in chunks,
        at the pace of the other's readers: to wait for their end could take longer than to encode them.
        """
        if self._cache is None:
            return None
        if encoding.modality == "image":
            return await lease_or_claim(self._cache, encoding.key)
        found = await asyncio.to_thread(self._cache.begin, encoding.key)
        return None if isinstance(found, Busy) else found

    async def look_up(self, key: str) -> Lease | None:
        """Return the entry of a key if there is one; nothing is claimed."""
        return await asyncio.to_thread(self._cache.get, key) if self._cache is not None else None

    async def replay(self, encoding: Encoding, lease: Lease) -> None:
        """Publish all chunks of an entry as the encoding's. Ends the lease; the chunks hold its bytes."""
        encoding.cache_hit = True
        with lease:
            chunks, encoding.notes, size = unpack(lease)
        encoding.measure(size)  # before the first chunk: a clip takes its time to send
        for chunk in chunks:
            await encoding.publish(chunk)

    async def keep(self, encoding: Encoding, claim: Claim, dtype: Dtype) -> None:
        """Make the entry of a complete encoding. Ends the claim."""
        # Taken here: while a thread works, the last reader may leave and the encoding forget its chunks.
        work = asyncio.create_task(asyncio.to_thread(_publish, claim, *pack(encoding, dtype)))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            # The thread goes on; nobody may end its claim or the cache meanwhile.
            await asyncio.wait([work])
            raise
        except ArenaError as error:
            logger.warning("%s is not kept: %s", encoding.key, error.message)


def _publish(claim: Claim, meta: EntryMeta, parts: list[NDArray[Any]]) -> None:
    if lease := claim.publish(meta, parts):
        lease.release()


def pack(encoding: Encoding, dtype: Dtype) -> tuple[EntryMeta, list[NDArray[Any]]]:
    """Return what `Claim.publish` takes for a complete encoding."""
    assert encoding.complete
    chunks = [chunk for chunk in encoding.chunks if chunk is not None]
    each = [_KeptChunk(chunk.token_ids, len(chunk.rows), chunk.audio_rows) for chunk in chunks]
    kept = _Kept(each, encoding.notes, encoding.size)
    shape = (sum(len(c.rows) for c in chunks), chunks[0].rows.shape[1])
    return EntryMeta(TensorMeta(dtype, shape), _ENCODER.encode(kept)), [c.rows for c in chunks]


def unpack(lease: Lease) -> tuple[Iterator[Chunk], tuple[str, ...], MediaSize]:
    """Return chunks whose rows are views of the leased bytes, the notes and the size.

    The views keep the bytes.
    """
    kept = _DECODER.decode(lease.meta.user)
    rows = lease.array()

    def chunks() -> Iterator[Chunk]:
        start = 0
        for number, chunk in enumerate(kept.chunks, 1):
            end = start + chunk.rows_len
            last = number == len(kept.chunks)
            yield Chunk(chunk.token_ids, rows[start:end], chunk.audio_rows, last)
            start = end

    return chunks(), kept.notes, kept.size
