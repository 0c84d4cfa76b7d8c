"""The encoder stage: takes EncodeJobs, sends EmbeddingChunks to prefill and the outcome to the gateway.

Encoder process (front), event loop; loads no torch. Fetching, decoding and embedding are others' work; here
stand admission, deadlines, aborts, single flight and who is told what.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import orjson
from aiohttp import web

from transom.encoder.announce import Announcer
from transom.encoder.config import EncoderConfig
from transom.encoder.decode_pool import DecodePool
from transom.encoder.encoding import Encoding
from transom.encoder.expand import Expander
from transom.encoder.fetch import Fetched, Fetcher, FetchLimits
from transom.encoder.flights import Flights
from transom.encoder.kept import KeptEncodings
from transom.encoder.known_urls import KnownContent, KnownUrls
from transom.encoder.media import wire
from transom.encoder.metrics import EncoderMetrics, RankCollector
from transom.encoder.models.config import AudioConfig, ProcessorConfig
from transom.encoder.pipeline import Pipeline
from transom.encoder.ranks.pool import Ranks
from transom.encoder.revision import model_revision
from transom.encoder.spans import ItemSpans, Timeline
from transom.errors import (
    DeadlineError,
    MediaError,
    OverloadedError,
    TransomError,
    UnavailableError,
)
from transom.hub import resolve_model
from transom.log import request_id_var
from transom.media_key import bytes_digest, content_key_of
from transom.messages import Abort, EmbeddingChunk, EncodeDone, EncodeJob, RequestFailed, TensorMeta
from transom.metrics import Collector
from transom.stage import Stage
from transom.transport import Received, Transport

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MB = 1024 * 1024
_ABORTS_KEPT = 10_000
_ABORT_MEMORY_S = 60.0
_DESCRIPTORS = 65_536
_SHUTDOWN = "the encoder is shutting down"


def _allow_descriptors() -> None:
    """Let the process have as many descriptors as it may: each waiting item and piece holds one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))


@dataclass(eq=False)
class _Item:
    """One EncodeJob in the process."""

    job: EncodeJob
    data: memoryview | None
    received_s: float
    charged_bytes: int
    task: asyncio.Task[None] | None = None
    spans: ItemSpans = field(default_factory=ItemSpans)
    queue_ms: float = 0.0


class EncoderStage(Stage):
    """One encoder: one address, its decode workers, and ranks with a device and the towers each."""

    name = "encoder"
    totals = frozenset(
        {
            "served",
            "failed",
            "cache_hits",
            "cache_misses",
            "cache_evictions",
            "batches",
            "decode_jobs",
            "decoder_crashes",
            "rank_restarts",
            "moved_pieces",
            "trials",
        }
    )

    def __init__(self, config: EncoderConfig) -> None:
        self._config = config
        self._items: dict[str, set[_Item]] = defaultdict(set)
        self._count = 0
        self._bytes = 0
        self._aborted: OrderedDict[str, float] = OrderedDict()
        self._background: set[asyncio.Task[None]] = set()
        self._kept = KeptEncodings()
        self._known = KnownUrls()
        self._metrics = EncoderMetrics()
        self._timeline = Timeline()
        self._draining = False
        self._served = self._failed = self._hits = self._misses = 0

    async def start(self, transport: Transport) -> None:
        """Start the decode workers and the ranks, side by side."""
        config = self._config
        self._transport = transport
        _allow_descriptors()
        self._pool = DecodePool(
            workers=config.decode_processes,
            timeout_s=config.decode_timeout_s,
            memory_mb=config.decode_memory_mb,
        )
        self._fetcher = Fetcher(FetchLimits.of(config))
        await self._fetcher.start()
        folder = Path(await asyncio.to_thread(resolve_model, config.model))
        self._ranks = Ranks(config, folder, self._metrics, self._timeline)
        expander, *_ = await asyncio.gather(
            asyncio.to_thread(Expander.from_folder, folder), self._ranks.start(), self._pool.start()
        )
        self._dtype = self._ranks.dtype
        self._revision = await asyncio.to_thread(
            model_revision, folder, config.full_decode_pixels, config.reduced_jpeg
        )
        await self._kept.open(
            f"{config.embedding_cache_scope}/{folder.name}/{self._revision}/{self._dtype}",
            config.embedding_cache_mb * _MB,
            keep=config.embedding_cache_keep,
        )
        self._pads = expander.ids.pads
        self._pipeline = Pipeline(
            config,
            self._pool,
            self._ranks,
            expander,
            ProcessorConfig.from_folder(folder),
            AudioConfig.from_folder(folder),
            self._metrics,
        )
        self._flights = Flights(self._kept, self._pipeline, self._dtype, self._timeline, self._spawn)
        self._announcer = Announcer(transport, config.announce_to)
        self._announcer.start()
        logger.info(
            "encoder of %s, %d ranks, %d decode workers", folder.name, config.ranks, config.decode_processes
        )

    async def handle(self, received: Received) -> None:
        """Take a job or an abort."""
        message = received.message
        if isinstance(message, EncodeJob):
            self._admit(message, received.frames)
        elif isinstance(message, Abort):
            self._abort(message.request_id)
        else:
            logger.warning("%s is nothing for an encoder", type(message).__name__)

    def _admit(self, job: EncodeJob, frames: list[memoryview]) -> None:
        data = frames[0] if frames else None
        size = len(data) if data is not None else 0
        config = self._config
        if job.request_id in self._aborted:
            return
        try:
            if self._draining:
                raise UnavailableError(_SHUTDOWN, retry_after_s=1)
            if self._count >= config.max_queued_items:
                raise OverloadedError(
                    f"encoder queue is full ({config.max_queued_items} items)", retry_after_s=1
                )
            if self._bytes + size > config.max_queued_mb * _MB and self._count:
                raise OverloadedError(
                    f"encoder queue is full ({config.max_queued_mb} MB of media)", retry_after_s=1
                )
            if size > config.max_media_mb * _MB:
                raise MediaError(f"{job.modality} of {size} bytes, limit {int(config.max_media_mb * _MB)}")
        except TransomError as error:
            self._tell_failure(job, error)
            return
        item = _Item(job, data, time.monotonic(), size, spans=ItemSpans(self._timeline))
        self._items[job.request_id].add(item)
        self._count += 1
        self._bytes += size
        item.task = self._spawn(self._serve(item))
        # An abort may come before the task's first step; then nothing of it runs, not even its `finally`.
        item.task.add_done_callback(lambda _: self._drop(item))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _serve(self, item: _Item) -> None:
        """See one item through; every outcome but a cancellation is told to gateway and prefill."""
        job = item.job
        request_id_var.set(job.request_id)
        try:
            async with asyncio.timeout(max(0.0, job.deadline_s - time.time())):
                await self._encode(item)
            self._served += 1
        except asyncio.CancelledError:
            raise
        except TimeoutError:
            self._fail(item, DeadlineError("the deadline passed while the media was being encoded"))
        except TransomError as error:
            self._fail(item, error)
        except Exception as error:
            logger.exception("encoding %s failed", job.param)
            self._fail(item, TransomError(f"the encoder failed on this item ({type(error).__name__})"))
        finally:
            self._drop(item)

    def _drop(self, item: _Item) -> None:
        items = self._items.get(item.job.request_id)
        if items is not None and item in items:
            items.discard(item)
            self._count -= 1
            self._bytes -= item.charged_bytes
            if not items:
                del self._items[item.job.request_id]

    async def _encode(self, item: _Item) -> None:
        job = item.job
        encoding, was_complete = await self._find(item)
        reader = encoding.join()
        try:
            index = 0
            while (chunk := await encoding.next(reader)) is not None:
                message = EmbeddingChunk(
                    request_id=job.request_id,
                    item_index=job.item_index,
                    chunk_index=index,
                    last=chunk.last,
                    content_key=encoding.key,
                    token_ids=chunk.token_ids,
                    pad_ids=self._pads(job.modality),
                    rows=TensorMeta(self._dtype, chunk.rows.shape),
                )
                started = time.monotonic()
                await self._transport.send_wait(job.reply_to, message, [chunk.raw])
                item.spans.add("send", started, time.monotonic())
                index += 1
        finally:
            encoding.leave(reader)
            self._flights.stop_if_abandoned(encoding)
        self._tell_done(item, encoding, is_hit=was_complete or encoding.cache_hit)

    async def _find(self, item: _Item) -> tuple[Encoding, bool]:
        """Return the encoding of the item's content, and whether it was complete already."""
        job = item.job
        item.queue_ms = round((time.monotonic() - item.received_s) * 1000, 3)
        data: bytearray | memoryview | None = item.data
        item.data = None
        fetched: Fetched | None = None
        if data is None:
            assert job.url is not None
            known = self._known.get(job.url)
            fetched = await self._fetch(item, job.url, known)
            if fetched is None and known is not None:
                found = await self._flights.look_up(self._key(job, known.digest), job)
                if found is not None:
                    return found, found.complete
                # What it gave is no longer kept: only now the content is needed.
                fetched = await self._fetch(item, job.url, None)
            assert fetched is not None
            data = fetched.data
        file = await self._off_loop(len(data), wire.MemoryFile.of, data)
        try:
            if not file.size_bytes:
                raise MediaError(f"{job.modality} is empty (0 bytes)")
            digest = await self._off_loop(file.size_bytes, bytes_digest, file.view)
            if job.url is not None and fetched is not None:
                self._known.remember(job.url, digest, fetched.validator)
            encoding = self._flights.encode(self._key(job, digest), job, file)
            return encoding, encoding.complete
        finally:
            # A running encoding holds a descriptor of its own.
            file.close()

    async def _fetch(self, item: _Item, url: str, known: KnownContent | None) -> Fetched | None:
        """Download the item; None when it is still what is known of its URL."""
        started = time.monotonic()
        outcome = "failed"
        try:
            fetched = await self._fetcher.fetch(url, known.validator if known else None)
            outcome = "unchanged" if fetched is None else "downloaded"
        finally:
            self._metrics.fetches.labels(outcome).inc()
            item.spans.add("fetch", started, time.monotonic())
        if fetched is not None:
            item.charged_bytes += len(fetched.data)
            self._bytes += len(fetched.data)
        return fetched

    @staticmethod
    async def _off_loop(size_bytes: int, function: Callable[..., T], *args: Any) -> T:
        """Call a function whose work grows with a size: small ones here, large ones in a thread."""
        if size_bytes < _MB:
            return function(*args)
        return await asyncio.to_thread(function, *args)

    def _key(self, job: EncodeJob, digest: str) -> str:
        return content_key_of(digest, job.modality, job.options, self._revision, self._dtype)

    def _tell_done(self, item: _Item, encoding: Encoding, *, is_hit: bool) -> None:
        job = item.job
        self._hits += is_hit
        self._misses += not is_hit
        timings = {"queue": item.queue_ms} | item.spans.timings_ms()
        spans = item.spans.show(item.received_s)
        if not is_hit:
            timings |= encoding.spans.timings_ms()
            spans += encoding.spans.show(item.received_s)
        timings["total"] = round((time.monotonic() - item.received_s) * 1000, 3)
        done = EncodeDone(
            request_id=job.request_id,
            item_index=job.item_index,
            modality=job.modality,
            content_key=encoding.key,
            media_tokens=encoding.media_tokens,
            audio_tokens=encoding.audio_tokens if job.modality == "video" else 0,
            cache_hit=is_hit,
            notes=encoding.notes,
            timings_ms=timings,
            spans=spans,
        )
        self._metrics.served(job.modality, timings, is_hit=is_hit)
        self._transport.send(job.gateway, done)

    def _fail(self, item: _Item, error: TransomError) -> None:
        """Tell the failure; the request's other items have no use any more."""
        self._failed += 1
        logger.info("item %d (%s) failed: %s", item.job.item_index, item.job.param, error.message)
        self._tell_failure(item.job, error)
        self._cancel(item.job.request_id, lambda other: other is not item)

    def _tell_failure(self, job: EncodeJob, error: TransomError) -> None:
        self._metrics.failed(job.modality, error.status)
        info = msgspec.structs.replace(error.info(), param=job.param)
        message = RequestFailed(request_id=job.request_id, error=info, stage=self.name)
        for address in dict.fromkeys((job.gateway, job.reply_to)):
            with contextlib.suppress(TransomError):
                self._transport.send(address, message)

    def _abort(self, request_id: str) -> None:
        now = time.monotonic()
        self._aborted[request_id] = now
        self._aborted.move_to_end(request_id)
        while self._aborted:
            oldest, moment = next(iter(self._aborted.items()))
            if len(self._aborted) <= _ABORTS_KEPT and now - moment < _ABORT_MEMORY_S:
                break
            del self._aborted[oldest]
        self._cancel(request_id, lambda item: True)

    def _cancel(self, request_id: str, which: Callable[[_Item], bool]) -> None:
        for item in list(self._items.get(request_id, ())):
            if which(item) and item.task is not None:
                item.task.cancel()

    def peer_lost(self, address: str) -> None:
        """Drop the items that nobody would be told of, or whose embeddings nobody would take."""
        for items in list(self._items.values()):
            for item in list(items):
                if address in (item.job.gateway, item.job.reply_to) and item.task is not None:
                    item.task.cancel()

    def collectors(self) -> tuple[Collector, ...]:
        """Return what is counted beside the load."""
        return (
            *self._metrics.collectors(),
            RankCollector(lambda: self._ranks.seats if self._has_ranks else ()),
        )

    @property
    def _has_ranks(self) -> bool:
        return hasattr(self, "_ranks")

    def unready_reason(self) -> str | None:
        """Say so while no rank can take anything."""
        return None if self._ranks.ready else "no rank is ready"

    def routes(self) -> list[web.RouteDef]:
        """Return the route of the timeline."""
        return [web.get("/timeline", self._show_timeline)]

    async def _show_timeline(self, request: web.Request) -> web.Response:
        """GET /timeline: what each stage did lately, in the Trace Event Format, and a summary."""
        body = {"traceEvents": self._timeline.chrome(), "summary": self._timeline.summary()}
        return web.Response(body=orjson.dumps(body), content_type="application/json")

    def load(self) -> dict[str, float]:
        """Return queue lengths, cache figures and counters."""
        load: dict[str, float] = self._kept.load() | {
            "items": self._count,
            "media_bytes": self._bytes,
            "served": self._served,
            "failed": self._failed,
            "cache_hits": self._hits,
            "cache_misses": self._misses,
        }
        if self._has_ranks:
            load |= self._ranks.load()
            load |= {
                "decode_jobs": self._pool.jobs,
                "decoders_busy": self._pool.busy(),
                "decoder_crashes": self._pool.crashes,
            }
        return load

    async def drain(self) -> None:
        """Refuse new items; return when none is left."""
        self._draining = True
        await self._leave()
        while self._background:
            await asyncio.wait(list(self._background))

    async def _leave(self) -> None:
        if hasattr(self, "_announcer"):
            await self._announcer.leave()

    async def close(self) -> None:
        """End all work, threads and processes."""
        self._draining = True
        await self._leave()
        tasks = list(self._background)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._kept.close()
        for part in ("_ranks", "_pool", "_fetcher"):
            if hasattr(self, part):
                await getattr(self, part).close()
