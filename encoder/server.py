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
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import orjson
from aiohttp import web

from transom.encoder.admission import Admission, Item
from transom.encoder.announce import Announcer
from transom.encoder.config import EncoderConfig
from transom.encoder.decode_pool import DecodePool
from transom.encoder.downloads import Downloads
from transom.encoder.encoding import Encoding
from transom.encoder.expand import Expander
from transom.encoder.fetch import FetchLimits
from transom.encoder.fetch_pool import FetchPool
from transom.encoder.flights import Flights
from transom.encoder.kept import KeptEncodings
from transom.encoder.lookup import Lookup
from transom.encoder.metrics import EncoderMetrics, RankCollector
from transom.encoder.models.config import AudioConfig, ProcessorConfig
from transom.encoder.pipeline import Pipeline
from transom.encoder.ranks.pool import Ranks
from transom.encoder.revision import model_revision
from transom.encoder.spans import Timeline
from transom.encoder.video_decoder import check_video_decoder
from transom.errors import DeadlineError, MediaError, StageLostError, TransomError, UnavailableError
from transom.hub import model_name, resolve_model
from transom.log import log_arguments, request_id_var
from transom.messages import (
    Abort,
    EmbeddingChunk,
    EncodeDone,
    EncodeJob,
    ItemSize,
    MediaSize,
    RequestFailed,
    TensorMeta,
)
from transom.metrics import Collector
from transom.stage import Stage
from transom.transport import Received, Transport
from transom.under_way import UnderWay

logger = logging.getLogger(__name__)

_MB = 1024 * 1024
_DESCRIPTORS = 65_536
_SHUTDOWN = "the encoder is shutting down"
_LOST = "the prefill worker of this request was lost: the encoder's connection to it ended"


def _allow_descriptors() -> None:
    """Let the process have as many descriptors as it may: each waiting item and piece holds one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))


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
            "fetcher_crashes",
            "rank_restarts",
            "moved_pieces",
            "trials",
        }
    )

    def __init__(self, config: EncoderConfig) -> None:
        self._config = config
        self._background: set[asyncio.Task[None]] = set()
        self._kept = KeptEncodings()
        self._metrics = EncoderMetrics()
        self._timeline = Timeline()
        self._admission = Admission(config, self._timeline)
        self._draining = False
        self._served = self._failed = self._hits = self._misses = 0
        self._under_way = UnderWay()

    async def start(self, transport: Transport) -> None:
        """Start the fetch workers, the decode workers and the ranks, side by side."""
        config = self._config
        self._transport = transport
        _allow_descriptors()
        log = log_arguments(config.log_level, config.log_json)
        self._pool = DecodePool(
            workers=config.decode_processes,
            timeout_s=config.decode_timeout_s,
            memory_mb=config.decode_memory_mb,
            log=log,
        )
        self._fetches = FetchPool(FetchLimits.of(config), workers=config.fetch_workers, log=log)
        folder = Path(await asyncio.to_thread(resolve_model, config.model))
        self._ranks = Ranks(config, folder, self._metrics, self._timeline)
        expander, *_ = await asyncio.gather(
            asyncio.to_thread(Expander.from_folder, folder),
            self._fetches.start(),
            self._pool.start(),
            self._ranks.start(),
            check_video_decoder(config.video_decoder),
        )
        self._dtype = self._ranks.dtype
        revision = await asyncio.to_thread(
            model_revision, folder, config.full_decode_pixels, config.reduced_jpeg, config.video_decoder
        )
        await self._kept.open(
            f"{config.embedding_cache_scope}/{model_name(folder)}/{revision}/{self._dtype}",
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
        self._lookup = Lookup(
            Downloads(self._fetches, self._metrics, self._spawn),
            self._flights,
            self._admission,
            revision=revision,
            dtype=self._dtype,
        )
        self._announcer = Announcer(transport, config.announce_to)
        self._announcer.start()
        name = model_name(folder)
        logger.info("encoder of %s, %d ranks, %d decode workers", name, config.ranks, config.decode_processes)

    async def handle(self, received: Received) -> None:
        """Take a job or an abort."""
        message = received.message
        if isinstance(message, EncodeJob):
            self._admit(message, received.frames)
        elif isinstance(message, Abort):
            self._admission.abort(message.request_id)
        else:
            logger.warning("%s is nothing for an encoder", type(message).__name__)

    def _admit(self, job: EncodeJob, frames: list[memoryview]) -> None:
        if self._admission.is_aborted(job.request_id):
            return
        try:
            if self._draining:
                raise UnavailableError(_SHUTDOWN, retry_after_s=1)
            item = self._admission.admit(job, frames[0] if frames else None)
        except TransomError as error:
            self._tell_failure(job, error)
            return
        item.task = self._spawn(self._serve(item))
        # An abort may come before the task's first step; then nothing of it runs, not even its `finally`.
        item.task.add_done_callback(lambda _: self._admission.drop(item))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _serve(self, item: Item) -> None:
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
            self._admission.drop(item)

    async def _encode(self, item: Item) -> None:
        job = item.job
        item.queue_ms = round((time.monotonic() - item.received_s) * 1000, 3)
        encoding = await self._lookup.find(item)
        was_complete = encoding.complete
        reader = encoding.join(partial(self._tell_size, job))
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
        self._under_way.add(job.reply_to, job.request_id, job.gateway, time.monotonic())
        await self._tell_done(item, encoding, is_hit=was_complete or encoding.cache_hit)

    def _tell_size(self, job: EncodeJob, size: MediaSize) -> None:
        """Tell how large an item is; it also stands at the end of the item, so that this may be lost."""
        message = ItemSize(request_id=job.request_id, item_index=job.item_index, size=size)
        with contextlib.suppress(TransomError):
            self._transport.send(job.gateway, message)

    async def _tell_done(self, item: Item, encoding: Encoding, *, is_hit: bool) -> None:
        """Tell what came of an item. The gateway gives out no answer before it has heard it."""
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
            size=encoding.size,
        )
        self._metrics.served(job.modality, timings, is_hit=is_hit)
        await self._transport.send_wait(job.gateway, done)

    def _fail(self, item: Item, error: TransomError) -> None:
        """Tell the failure; the request's other items have no use any more."""
        self._failed += 1
        logger.info("item %d (%s) failed: %s", item.job.item_index, item.job.param, error.message)
        self._tell_failure(item.job, error)
        self._admission.cancel(item.job.request_id, but=item)

    def _tell_failure(self, job: EncodeJob, error: TransomError) -> None:
        self._metrics.failed(job.modality, error.status)
        info = msgspec.structs.replace(error.info(), param=job.param)
        if isinstance(error, MediaError):
            info = msgspec.structs.replace(info, message=f"{job.param}: {error.message}")
        message = RequestFailed(request_id=job.request_id, error=info, stage=self.name)
        for address in dict.fromkeys((job.gateway, job.reply_to)):
            with contextlib.suppress(TransomError):
                self._transport.send(address, message)

    def peer_lost(self, address: str) -> None:
        """Drop the items that concern nobody else; tell gateways which requests lack embeddings now.

        The prefill worker may live and wait for them: then nobody else would tell. One that has had them all
        has answered, and the gateway knows.
        """
        lost = {(job.request_id, job.gateway) for job in self._admission.cancel_of(address)}
        lost |= self._under_way.lost(address, time.monotonic())
        info = StageLostError(_LOST).info()
        for request_id, gateway in lost:
            if gateway == address:  # it took embeddings itself
                continue
            with contextlib.suppress(TransomError):
                self._transport.send(
                    gateway, RequestFailed(request_id=request_id, error=info, stage=self.name)
                )

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
            "items": self._admission.count,
            "media_bytes": self._admission.held_bytes,
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
                "fetches_running": self._fetches.running,
                "fetcher_crashes": self._fetches.crashes,
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
        for part in ("_ranks", "_pool", "_fetches"):
            if hasattr(self, part):
                await getattr(self, part).close()
