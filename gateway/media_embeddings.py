"""POST /v1/media/embeddings: what the encoder makes of one picture, video or sound, for debugging.

Gateway process, event loop; conversions to text run in a thread. The item takes the way of a chat's items:
same checks, same encoder, same cache.
"""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import orjson
from aiohttp import web
from numpy.typing import NDArray

from transom.errors import RequestError, UnavailableError
from transom.gateway.admission import Admission
from transom.gateway.api_requests import MediaEmbeddingRequest
from transom.gateway.body_work import BodyWork
from transom.gateway.config import GatewayConfig
from transom.gateway.embeddings import LiveEmbedding
from transom.gateway.exchange import Attachment, Dispatcher, media_cost
from transom.gateway.fields import show
from transom.gateway.http_body import Body
from transom.gateway.http_edge import api_key
from transom.gateway.media import MEDIA_PARTS, parse_media_part
from transom.gateway.media_totals import MediaLimits
from transom.gateway.metrics import GatewayMetrics
from transom.gateway.parse import load_body
from transom.gateway.prepare import Model
from transom.gateway.schema import Limits, MediaItem
from transom.gateway.telemetry import Telemetry
from transom.gateway.timeline import Timeline
from transom.gateway.trace import gateway_spans, item_spans, media_item
from transom.messages import EncodeDone

_MB = 1024 * 1024
_WIRE_TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    """A checked body."""

    model: str | None
    item: MediaItem
    as_base64: bool
    timeout_s: float | None


def parse_embedding(body: Body, limits: Limits) -> EmbeddingRequest:
    """Check the body of POST /v1/media/embeddings."""
    fields = load_body(body, MediaEmbeddingRequest)
    part = fields.object("input", required=True)
    assert part is not None
    kind = part.text("type", required=True)
    if kind not in MEDIA_PARTS:
        raise part.refuse("type", f"{show(kind)} is not one of {', '.join(MEDIA_PARTS)}")
    item = parse_media_part(part, kind, limits)
    return EmbeddingRequest(
        model=fields.text("model"),
        item=item,
        as_base64=fields.text("encoding_format") == "base64",
        timeout_s=fields.number("timeout", le=limits.max_timeout_s),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaEmbeddings:
    """Answers the endpoint. Bodies and model names are read as everywhere."""

    config: GatewayConfig
    model: Model
    dispatcher: Dispatcher
    admission: Admission
    metrics: GatewayMetrics
    telemetry: Telemetry
    work: BodyWork
    read_body: Callable[[web.Request, Callable[[int], None]], Awaitable[Body]]
    check_model: Callable[[str | None], str]
    is_draining: Callable[[], bool]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Read, encode, answer."""
        timeline = Timeline()
        caller = api_key().caller
        async with AsyncExitStack() as stack:
            observed = stack.enter_context(self.telemetry.request(request.headers, request.path, timeline))
            stack.enter_context(self.metrics.request("media_embedding", timeline))
            if self.is_draining():
                raise UnavailableError("the gateway is shutting down", retry_after_s=5)
            with self.admission.buffer(caller) as grow:
                body = await self.read_body(request, grow)
                timeline.mark("body")
                parsed = await self.work.parse(
                    caller, len(body), lambda: parse_embedding(body, self.model.limits)
                )
                name = self.check_model(parsed.model)
                key = await self.work.build(len(body), parsed.item.routing_key)
                one = Attachment(parsed.item, key)
                self._check_modality(one.item)
                timeline.mark("parse")
                timeout_s = parsed.timeout_s or self.config.request_timeout_s
                await stack.enter_async_context(self.admission.admit(caller, 1, media_cost(one)))
                timeline.mark("admit")
                live = stack.enter_context(
                    self.dispatcher.open_embedding(
                        f"emb-{uuid.uuid4().hex}",
                        one,
                        timeout_s=timeout_s,
                        max_bytes=self.config.max_embedding_mb * _MB,
                        limits=MediaLimits.of(self.config),
                        grow=stack.enter_context(self.admission.buffer(caller)),
                    )
                )
                timeline.mark("send")
            observed.show = partial(self._trace, live, name, timeline)
            done = await live.wait(time.monotonic() + timeout_s, timeout_s)
            head = {"id": live.request_id, "created": int(timeline.created_s), "model": name}
            text = await asyncio.to_thread(_render, head, live, done, as_base64=parsed.as_base64)
            return web.Response(
                body=text, content_type="application/json", headers={"X-Request-Id": live.request_id}
            )

    def _trace(self, live: LiveEmbedding, name: str, timeline: Timeline) -> dict[str, Any]:
        worker = self.dispatcher.worker_name(live.work.address)
        steps, sent_ms = gateway_spans(timeline)
        return {
            "id": live.request_id,
            "model": name,
            "spans": [*steps, *item_spans(timeline, worker, 0, live.done, sent_ms)],
            "media": [media_item(0, worker, live.done)],
        }

    def _check_modality(self, item: MediaItem) -> None:
        if item.modality not in self.model.info.pads.values():
            raise RequestError(f"{item.param}: this model takes no {item.modality}", param=item.param)


def _render(head: dict[str, Any], live: LiveEmbedding, done: EncodeDone, *, as_base64: bool) -> bytes:
    first = live.chunks[0][0]
    hidden = first.rows.shape[-1]
    raw = b"".join(rows for _, rows in live.chunks)
    values = np.frombuffer(raw, _WIRE_TYPES[first.rows.dtype]).reshape(-1, hidden)
    token_ids = [id for chunk, _ in live.chunks for id in chunk.token_ids]
    body = head | {
        "object": "media.embedding",
        "modality": done.modality,
        "content_key": done.content_key,
        "dtype": first.rows.dtype,
        "shape": list(values.shape),
        "encoding_format": "base64" if as_base64 else "float",
        "embedding": base64.b64encode(raw).decode() if as_base64 else _as_floats(values),
        "token_ids": token_ids,
        "pad_token_ids": list(first.pad_ids),
        "media_tokens": done.media_tokens,
        "audio_tokens": done.audio_tokens,
        "cache_hit": done.cache_hit,
        "notes": list(done.notes),
        "timings_ms": done.timings_ms,
        "usage": {"prompt_tokens": len(token_ids), "total_tokens": len(token_ids)},
    }
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def _as_floats(values: NDArray[Any]) -> NDArray[np.float32]:
    """Return what JSON can show; the upper half of a float32 is a bfloat16."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)
