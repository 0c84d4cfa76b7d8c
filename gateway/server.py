"""The gateway stage: the HTTP API in front, the fleet of workers behind.

Routes messages of workers to the requests they belong to. Loads no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
from typing import Any

from aiohttp import web

from transom.errors import UnavailableError
from transom.gateway import playground
from transom.gateway.admission import Admission
from transom.gateway.api_keys import ApiKeys, KeyLimits
from transom.gateway.config import GatewayConfig
from transom.gateway.embeddings import LiveEmbedding
from transom.gateway.endpoints import ENDPOINTS
from transom.gateway.exchange import Dispatcher
from transom.gateway.fleet import STAGES, Fleet, StageName
from transom.gateway.fleet_view import show_fleet
from transom.gateway.handlers import Handlers, shutting_down
from transom.gateway.http_body import hold_expectation
from transom.gateway.http_edge import middlewares
from transom.gateway.metrics import GatewayMetrics
from transom.gateway.prepare import Model
from transom.gateway.quota import Quotas
from transom.gateway.requests import LiveRequest, RequestTable
from transom.gateway.telemetry import make_telemetry
from transom.gateway.trace import TraceBook
from transom.grammar import GrammarCompiler, grammar_tokenizer
from transom.messages import EmbeddingChunk, EncodeDone, ItemSize, Join, Pong, RequestFailed, TokenChunk
from transom.metrics import Collector
from transom.stage import Stage
from transom.transport import Received, Transport

logger = logging.getLogger(__name__)

_SENDERS: dict[type, tuple[StageName, ...]] = {
    EncodeDone: ("encoder",),
    ItemSize: ("encoder",),
    EmbeddingChunk: ("encoder",),
    TokenChunk: ("prefill", "decode"),
    RequestFailed: STAGES,
}


class GatewayStage(Stage):
    """One gateway process."""

    name = "gateway"
    totals = GrammarCompiler.TOTALS

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._keys = ApiKeys.from_file(
            config.api_keys_file,
            KeyLimits(
                requests_per_minute=config.key_requests_per_minute, max_inflight=config.key_max_inflight
            ),
        )
        self._metrics = GatewayMetrics()
        self._telemetry = make_telemetry(otel=config.otel)
        self._quotas = Quotas(self._keys, count=self._metrics.count_key, at_once=self._metrics.change_key)
        self._table = RequestTable()
        self._admission = Admission(
            max_choices=config.max_inflight,
            max_tokens=config.max_queue_tokens,
            max_bytes=config.max_buffered_mb * 1024 * 1024,
            max_waiting=config.max_waiting,
            max_wait_s=config.max_wait_s,
            shared=len(self._keys) > 1,
        )
        self._fleet: Fleet | None = None
        self._handlers: Handlers | None = None
        self._grammars = GrammarCompiler()
        self._pinger: asyncio.Task[None] | None = None

    async def start(self, transport: Transport) -> None:
        config = self._config
        raise_open_files()
        model = await asyncio.to_thread(Model.load, config)
        fleet = self._fleet = Fleet(
            transport,
            {"encoder": config.encoder, "prefill": config.prefill, "decode": config.decode},
            on_lost=self._table.lost,
            ping_interval_s=config.ping_interval_s,
            worker_timeout_s=config.worker_timeout_s,
            needed=needed_stages(config, media=bool(model.info.pads)),
        )
        dispatcher = Dispatcher(fleet, self._table, transport.address)
        traces = TraceBook(config.kept_traces, fleet.name)
        tokenizer = model.tokenizer
        await asyncio.to_thread(self._grammars.load, lambda: grammar_tokenizer(tokenizer, tokenizer.eos_ids))
        self._handlers = Handlers(
            config,
            model,
            dispatcher,
            self._admission,
            self._quotas,
            self._metrics,
            traces,
            self._telemetry,
            lambda: show_fleet(fleet, self.load()),
            self._grammars,
        )
        self._pinger = asyncio.create_task(fleet.run())
        logger.info("serves %s, context %d tokens", ", ".join(model.names), model.max_context)

    async def handle(self, received: Received) -> None:
        message = received.message
        if self._fleet is None:
            return
        if isinstance(message, Pong):
            self._fleet.pong(received.peer, message)
            return
        if isinstance(message, Join):
            if self._config.accept_encoders:
                self._fleet.join(message)
            else:
                logger.warning("%s announces itself; see --accept-encoders", received.peer)
            return
        if not isinstance(message, (TokenChunk, ItemSize, EncodeDone, EmbeddingChunk, RequestFailed)):
            logger.warning("%s from %s is not for a gateway", type(message).__name__, received.peer)
            return
        self._fleet.heard(received.peer)
        live = self._table.find(message.request_id)
        if live is None:  # it has ended here; its abort is on the way
            return
        stages = _SENDERS[type(message)]
        expected = {self._fleet.peer(work.address) for work in live.works() if work.stage in stages}
        if received.peer not in expected:
            logger.warning("%s from %s, which has no part in it", type(message).__name__, received.peer)
        elif isinstance(message, EncodeDone):
            live.on_encode_done(message)
        elif isinstance(message, ItemSize):
            live.on_item_size(message)
        elif isinstance(message, RequestFailed):
            live.on_failed(message)
        elif isinstance(message, TokenChunk) and isinstance(live, LiveRequest):
            live.on_chunk(message)
        elif isinstance(message, EmbeddingChunk) and isinstance(live, LiveEmbedding):
            live.on_embedding(message, received.frames[0])
        else:
            logger.warning("%s from %s is not for this request", type(message).__name__, received.peer)

    def peer_lost(self, address: str) -> None:
        if self._fleet is not None:
            self._fleet.lost(address, "the connection ended")

    def load(self) -> dict[str, float]:
        figures = {
            "choices": float(self._admission.choices),
            "tokens": float(self._admission.tokens),
            "buffered_bytes": float(self._admission.buffered_bytes),
            "waiting": float(self._admission.waiting),
        }
        if self._fleet is not None:
            for stage in ("encoder", "prefill", "decode"):
                figures[f"ready_{stage}"] = float(len(self._fleet.ready(stage)))
        figures |= self._grammars.figures()
        return figures

    def collectors(self) -> list[Collector]:
        return self._metrics.collectors()

    def unready_reason(self) -> str | None:
        missing = self._fleet.missing() if self._fleet is not None else ["worker"]
        return f"no ready {', '.join(missing)}" if missing else None

    async def drain(self) -> None:
        if self._handlers is not None:
            self._handlers.draining = True
        self._admission.send_away(shutting_down)
        await self._table.wait_idle()

    async def close(self) -> None:
        if self._pinger is not None:
            self._pinger.cancel()
        await self._telemetry.close()
        self._grammars.close()

    def app_limits(self) -> dict[str, Any]:
        return {
            "middlewares": middlewares(self._keys, self._quotas, self._config.cors_origins),
        }

    def routes(self) -> list[web.RouteDef]:
        return [
            *(
                web.route(one.method, one.route, self._route(one.handler), expect_handler=hold_expectation)
                for one in ENDPOINTS
                if one.handler
            ),
            *playground.routes(),
        ]

    def _route(self, name: str) -> Any:
        """Return a handler that answers 503 until the stage has started."""

        async def handler(request: web.Request) -> web.StreamResponse:
            if self._handlers is None:
                raise UnavailableError("the gateway is starting", retry_after_s=1)
            response: web.StreamResponse = await getattr(self._handlers, name)(request)
            return response

        return handler


def needed_stages(config: GatewayConfig, *, media: bool) -> list[StageName]:
    """Return the stages without which nothing can be served."""
    spared: set[StageName] = set() if media else {"encoder"}
    if not config.decode:  # prefill workers decode too
        spared.add("decode")
    return [stage for stage in STAGES if stage not in spared]


def raise_open_files() -> None:
    """Let the process open as many files as the system allows at all: each client takes a descriptor."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems call it unlimited and then refuse
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
