"""Requests in work: what each expects from which worker, and its end, on the gateway's event loop.

A `LiveRequest` is one choice; it takes chunks in any order and gives them out in order. The table maps
ids to live requests for the stage that owns it. Nothing here touches HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from transom.errors import CancelledRequestError, MediaError, StageLostError, TransomError, from_info
from transom.gateway.fleet import StageName
from transom.gateway.media_totals import MediaTotals
from transom.messages import Abort, EncodeDone, ItemSize, PromptStats, RequestFailed, TokenChunk

logger = logging.getLogger(__name__)

_MAX_PARKED_CHUNKS = 4096


@dataclass(slots=True)
class Work:
    """A part of a request at one worker."""

    address: str
    stage: StageName
    tokens: int
    held: bool = True  # the worker may still hold something: its loss ends the request
    counted: bool = True  # still part of the worker's load


@dataclass(slots=True)
class LiveRequest:
    """One choice. `wake` is called whenever there is something new to take."""

    request_id: str
    prefill: Work
    decode: Work | None  # None: the prefill worker decodes too
    encoders: dict[int, Work]
    wake: Callable[[], None]
    release: Callable[[str, int], None]
    stats: PromptStats | None = None
    error: TransomError | None = None
    done: bool = False  # the engine has said its last word
    encode_done: dict[int, EncodeDone] = field(default_factory=dict)
    timings_ms: dict[str, float] = field(default_factory=dict)
    # Called when more output waits than the limit; says whether a client that doesn't read was the reason.
    unread_limit_bytes: int = 0
    totals: MediaTotals | None = None
    hang_up: Callable[[], bool] | None = None
    _unread_bytes: int = 0
    _next_index: int = 0
    _parked: dict[int, TokenChunk] = field(default_factory=dict)
    _ordered: list[TokenChunk] = field(default_factory=list)

    def works(self) -> list[Work]:
        """Return all parts, in the order of the pipeline."""
        return [*self.encoders.values(), self.prefill, *([self.decode] if self.decode else [])]

    @property
    def decoder(self) -> Work:
        """The part that puts out all tokens but the first."""
        return self.decode or self.prefill

    def on_chunk(self, chunk: TokenChunk) -> None:
        """Take output tokens; chunks may overtake each other, since two workers send them."""
        if self.done or self.error is not None:
            return
        if chunk.index < self._next_index or chunk.index in self._parked:
            logger.warning("output %d came twice", chunk.index)
            return
        if len(self._parked) >= _MAX_PARKED_CHUNKS:
            self.fail(StageLostError("output tokens are missing"))
            return
        self._parked[chunk.index] = chunk
        if chunk.prompt is not None:
            self.stats = chunk.prompt
            visual_tokens = chunk.prompt.image_tokens + chunk.prompt.video_tokens
            self._count(lambda totals: totals.note_prompt(visual_tokens))
        self.timings_ms.update(chunk.timings_ms)
        self._put_in_order()

    def _put_in_order(self) -> None:
        """Give out what is complete so far, unless an item is still to come in: with it, it may be too much.

        Encoders tell what came of an item right after its last chunk: before prefill can have an answer, but
        over another connection.
        """
        if self.done or self.error is not None or len(self.encode_done) < len(self.encoders):
            return
        while (ready := self._parked.pop(self._next_index, None)) is not None:
            self._ordered.append(ready)
            self._unread_bytes += _held_bytes(ready)
            self._next_index += len(ready.token_ids)
            if ready.finish_reason is not None:
                self._finish()
                break
            if not ready.token_ids:
                break  # an empty chunk must not be waited for again
        if self.hang_up is not None and self._unread_bytes > self.unread_limit_bytes and self.hang_up():
            self._ordered.clear()
            self._unread_bytes = 0
            self.fail(CancelledRequestError("the client does not read its answer"))
        if self._next_index > 0:  # prefill has had all embeddings
            for work in self.encoders.values():
                self._let_go(work)
        if self._next_index > 1 and self.decode is not None:  # decode has had the KV
            self._let_go(self.prefill)
        self.wake()

    def _finish(self) -> None:
        self.done = True
        self._parked.clear()
        for work in self.works():
            self._let_go(work)

    def on_encode_done(self, message: EncodeDone) -> None:
        """Take note that an item is encoded; its last chunk may still be on the way to prefill."""
        work = self.encoders.get(message.item_index)
        if work is not None:
            self._uncount(work)
            self.encode_done[message.item_index] = message
            self._count(lambda totals: totals.note_done(message))
            if self._parked:
                self._put_in_order()

    def on_item_size(self, message: ItemSize) -> None:
        """Take note of how large an item is; most come before anything is decoded."""
        if message.item_index in self.encoders and message.item_index not in self.encode_done:
            self._count(lambda totals: totals.note(message.item_index, message.size))

    def _count(self, note: Callable[[MediaTotals], None]) -> None:
        """Fail when all items together are too much."""
        if self.totals is not None:
            try:
                note(self.totals)
            except MediaError as error:
                self.fail(error)

    def on_failed(self, message: RequestFailed) -> None:
        """End the request with a worker's error."""
        # They may take for lost what they have sent. When it has been answered, it has come.
        answers = {"encoder": 1, "prefill": 2 if self.decode else math.inf}
        if self._next_index >= answers.get(message.stage, math.inf):
            return
        self.fail(from_info(message.error))

    def on_lost(self, address: str, stage: StageName, why: str, gone: bool) -> None:
        """End the request when a worker has lost a part of it. It is never sent elsewhere.

        A worker that is not gone is told all the same.
        """
        touched = [work for work in self.works() if work.address == address and work.held]
        for work in touched if gone else ():
            self._let_go(work)
        if touched:
            self.fail(StageLostError(f"the {stage} worker of this request was lost: {why}"))

    def fail(self, error: TransomError) -> None:
        """End the request; the first error counts."""
        if self.error is None and not self.done:
            self.error = error
            self._parked.clear()
            self.wake()

    def take(self) -> list[TokenChunk]:
        """Return the new chunks in order; once they are all taken, raise the request's error."""
        if self._ordered:
            chunks, self._ordered = self._ordered, []
            self._unread_bytes = 0
            return chunks
        if self.error is not None:
            raise self.error
        return []

    def has_news(self) -> bool:
        """Say whether `take` would return something or raise."""
        return bool(self._ordered) or self.error is not None

    def _uncount(self, work: Work) -> None:
        if work.counted:
            work.counted = False
            self.release(work.address, work.tokens)

    def _let_go(self, work: Work) -> None:
        work.held = False
        self._uncount(work)

    def close(self, send_abort: Callable[[str, Abort], None], reason: str) -> None:
        """Give everything back; tell each worker that may still hold a part. Idempotent.

        What workers still say, such as that they were told to stop, is not heard any more.
        """
        self.done = True
        abort = Abort(request_id=self.request_id, reason=reason)
        for address in dict.fromkeys(work.address for work in self.works() if work.held):
            send_abort(address, abort)
        for work in self.works():
            self._let_go(work)


def _held_bytes(chunk: TokenChunk) -> int:
    """Return about what a chunk takes of memory (CPython 3.11)."""
    logprobs = sum(200 + 112 * len(one.top) for one in chunk.logprobs or ())
    return 400 + 8 * len(chunk.token_ids) + logprobs


class Routed(Protocol):
    """What workers' messages can be about."""

    request_id: str

    def works(self) -> list[Work]:
        """Return the parts at workers."""

    def on_encode_done(self, message: EncodeDone) -> None:
        """Take note that an item is encoded."""

    def on_item_size(self, message: ItemSize) -> None:
        """Take note of how large an item is."""

    def on_failed(self, message: RequestFailed) -> None:
        """End with a worker's error."""

    def on_lost(self, address: str, stage: StageName, why: str, gone: bool) -> None:
        """End when a worker has lost a part; `gone`: it needs no telling."""


class RequestTable:
    """The live requests of one gateway, by id."""

    def __init__(self) -> None:
        self._live: dict[str, Routed] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._live)

    def add(self, request: Routed) -> None:
        """Start to route messages to a request."""
        assert request.request_id not in self._live
        self._live[request.request_id] = request
        self._idle.clear()

    def remove(self, request: Routed) -> None:
        """Stop to route messages to a request."""
        self._live.pop(request.request_id, None)
        if not self._live:
            self._idle.set()

    def find(self, request_id: str) -> Routed | None:
        """Return a live request."""
        return self._live.get(request_id)

    def lost(self, address: str, stage: StageName, why: str, gone: bool) -> None:
        """Fail every request of which a worker has lost a part."""
        for request in list(self._live.values()):
            request.on_lost(address, stage, why, gone)

    async def wait_idle(self) -> None:
        """Return when no request is live."""
        await self._idle.wait()
