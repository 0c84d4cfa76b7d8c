"""A media item's embeddings on their way back to the gateway, for POST /v1/media/embeddings.

Gateway's event loop. The encoder is told that this gateway takes the chunks which a prefill worker takes
otherwise; nothing else differs. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from transom.errors import (
    DeadlineError,
    MediaError,
    PayloadTooLargeError,
    StageLostError,
    TransomError,
    from_info,
)
from transom.gateway.fleet import StageName
from transom.gateway.media_totals import MediaTotals
from transom.gateway.requests import Work
from transom.messages import Abort, EmbeddingChunk, EncodeDone, ItemSize, RequestFailed


@dataclass(slots=True, kw_only=True)
class LiveEmbedding:
    """One item in work at one encoder. `grow` is told the size of each piece and may refuse it."""

    request_id: str
    work: Work
    max_bytes: int
    totals: MediaTotals
    grow: Callable[[int], None]
    release: Callable[[str, int], None]
    chunks: list[tuple[EmbeddingChunk, bytes]] = field(default_factory=list)
    size_bytes: int = 0
    done: EncodeDone | None = None
    error: TransomError | None = None
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    def works(self) -> list[Work]:
        """Return the one part."""
        return [self.work]

    def on_embedding(self, chunk: EmbeddingChunk, rows: memoryview) -> None:
        """Take the next chunk; the rows are copied."""
        if self._ended.is_set():
            return
        if chunk.chunk_index != len(self.chunks):
            self.fail(StageLostError("embeddings are missing"))
            return
        self.size_bytes += len(rows)
        if self.size_bytes > self.max_bytes:
            problem = f"the embeddings of this item are over {self.max_bytes} bytes, the limit"
            self.fail(PayloadTooLargeError(problem, param="input"))
            return
        try:
            self.grow(len(rows))
        except TransomError as error:
            self.fail(error)
            return
        self.chunks.append((chunk, bytes(rows)))

    def on_encode_done(self, message: EncodeDone) -> None:
        """End well: all chunks were sent before."""
        if self._ended.is_set():
            return
        if not self.chunks or not self.chunks[-1][0].last:
            self.fail(StageLostError("embeddings are missing"))
            return
        try:
            self.totals.note_done(message)
        except MediaError as error:
            self.fail(error)
            return
        self.done = message
        self._end()

    def on_item_size(self, message: ItemSize) -> None:
        """End where the item is too large; mostly before it is decoded."""
        try:
            self.totals.note(message.item_index, message.size)
        except MediaError as error:
            self.fail(error)

    def on_failed(self, message: RequestFailed) -> None:
        """End with the encoder's error."""
        self.fail(from_info(message.error))
        self.work.held = False

    def on_lost(self, address: str, stage: StageName, why: str, gone: bool) -> None:
        """End when the encoder has lost the item."""
        if address == self.work.address and self.work.held:
            self.work.held = not gone
            self.fail(StageLostError(f"the {stage} of this request was lost: {why}"))

    def fail(self, error: TransomError) -> None:
        """End with an error; the first one counts."""
        if not self._ended.is_set():
            self.error = error
            self._ended.set()

    def _end(self) -> None:
        self.work.held = False
        self._ended.set()

    async def wait(self, deadline_s: float, timeout_s: float) -> EncodeDone:
        """Return when all is there; raise what ended it, or DeadlineError at a monotonic moment."""
        try:
            async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
                await self._ended.wait()
        except TimeoutError:
            raise DeadlineError(f"the embeddings were not complete after {timeout_s:g} s") from None
        if self.error is not None:
            raise self.error
        assert self.done is not None
        return self.done

    def close(self, send_abort: Callable[[str, Abort], None]) -> None:
        """Give the encoder's load back; tell the encoder to stop unless it has ended. Idempotent."""
        if self.work.held:
            self.work.held = False
            send_abort(self.work.address, Abort(request_id=self.request_id, reason="nobody waits for it"))
        if self.work.counted:
            self.work.counted = False
            self.release(self.work.address, self.work.tokens)
