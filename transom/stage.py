"""The frame of every worker process: transport, readiness line, health listener, signals, orderly end.

A stage implements `Stage`; `run_stage` owns the event loop. The stage must not block that loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import orjson
import uvloop
from aiohttp import web

from transom.config import StageConfig
from transom.curve import FleetKey
from transom.errors import TransomError
from transom.http_listener import HttpListener
from transom.log import request_id_var, setup_logging
from transom.messages import Ping, Pong
from transom.metrics import (
    CONTENT_TYPE,
    Collector,
    Labelled,
    LoadCollector,
    StateCollector,
    expose,
    make_registry,
)
from transom.transport import Received, Transport

logger = logging.getLogger(__name__)

_ORPHAN_END_S = 1.5  # beyond draining: time to release everything once the supervisor is gone
_MAX_BREAKS = 4096  # peers whose lost connections are remembered


class Stage(ABC):
    """One stage process. Every method runs on the event loop; none may block it.

    `totals` names the figures of `load` that only ever grow: metrics show them as counters. `labelled` are
    those that metrics show under a common name.
    """

    name: str
    totals: ClassVar[frozenset[str]] = frozenset()
    labelled: ClassVar[Mapping[str, Labelled]] = {}

    @abstractmethod
    async def start(self, transport: Transport) -> None:
        """Load what is needed; return when jobs can be taken."""

    @abstractmethod
    async def handle(self, received: Received) -> None:
        """Take one message. Work that lasts goes elsewhere; a TransomError raised here is logged."""

    @abstractmethod
    def peer_lost(self, address: str) -> None:
        """The connection to a peer that we send to has ended: end what depended on it."""

    @abstractmethod
    def load(self) -> dict[str, float]:
        """Return cheap figures of the current load (queue lengths, running requests)."""

    @abstractmethod
    async def drain(self) -> None:
        """Return when no work is left; new work is refused already. Bounded by the caller."""

    @abstractmethod
    async def close(self) -> None:
        """Release everything: threads, processes, shared memory."""

    def unready_reason(self) -> str | None:
        """Return why the started stage can't take work now (the gateway: a stage has no worker)."""
        return None

    def collectors(self) -> Iterable[Collector]:
        """Return further metrics beside the figures of `load`; asked for once, before `start`."""
        return ()

    def routes(self) -> list[web.RouteDef]:
        """Return further HTTP routes of this stage."""
        return []

    def app_limits(self) -> dict[str, Any]:
        """Return keyword arguments for `aiohttp.web.Application`."""
        return {}


class StageRunner:
    """Runs one stage from start to end. `incarnation` tells a restarted process from its predecessor."""

    def __init__(self, stage: Stage, config: StageConfig) -> None:
        self.stage = stage
        self.config = config
        self.incarnation = uuid.uuid4().hex[:12]
        self.ready = False
        self.draining = False
        self._stop = asyncio.Event()
        self._breaks: dict[str, int] = {}  # by peer: connections to it that have ended
        self._started_s = time.monotonic()
        self._registry = make_registry(
            [
                LoadCollector(stage.name, stage.load, stage.totals, stage.labelled),
                StateCollector(stage.name, lambda: self._problem() is None),
                *stage.collectors(),
            ]
        )

    async def run(self) -> None:
        config = self.config
        key = FleetKey.load(config.curve_key_file) if config.curve_key_file else None
        transport = Transport(
            bind=config.bind,
            advertise=config.advertise,
            key=key,
            send_buffer_bytes=config.send_buffer_mb * 1024 * 1024,
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        if config.watch_stdin:
            self._watch_stdin(loop)
        transport.on_peer_lost = self._peer_lost
        await transport.start()
        listener = await self._start_http()
        receiver = asyncio.create_task(self._receive(transport))
        starter = asyncio.create_task(self.stage.start(transport))
        stopper = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({starter, stopper, receiver}, return_when=asyncio.FIRST_COMPLETED)
            if starter.done():
                await starter
                self.ready = True
                self._announce(transport, listener)
                await asyncio.wait({stopper, receiver}, return_when=asyncio.FIRST_COMPLETED)
            else:
                starter.cancel()
            if receiver.done():
                await receiver
            await self._drain()
        finally:
            receiver.cancel()
            stopper.cancel()
            await self.stage.close()
            await transport.flush(0.5)
            await listener.close()
            await transport.close()

    async def _drain(self) -> None:
        self.draining = True
        self.ready = False
        try:
            async with asyncio.timeout(self.config.drain_timeout_s):
                await self.stage.drain()
        except TimeoutError:
            logger.warning("work left after %.1f s of draining is dropped", self.config.drain_timeout_s)

    def _watch_stdin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Stop when the supervisor is gone, however it died: its end of our stdin closes.

        Watched by a thread, so that a process whose event loop hangs ends too.
        """

        def watch() -> None:
            with contextlib.suppress(OSError):
                while os.read(sys.stdin.fileno(), 4096):
                    pass
            with contextlib.suppress(RuntimeError):  # the loop is closed: we are ending anyway
                loop.call_soon_threadsafe(self._stop.set)
            time.sleep(self.config.drain_timeout_s + _ORPHAN_END_S)
            os._exit(1)

        threading.Thread(target=watch, name="stdin watch", daemon=True).start()

    async def _receive(self, transport: Transport) -> None:
        while True:
            received = await transport.recv()
            message = received.message
            token = request_id_var.set(getattr(message, "request_id", None))
            try:
                if isinstance(message, Ping):
                    pong = Pong(
                        nonce=message.nonce,
                        stage=self.stage.name,
                        incarnation=self.incarnation,
                        ready=self._problem() is None,
                        load=self.stage.load(),
                        breaks=self._breaks.get(message.reply_to, 0),
                    )
                    transport.send(message.reply_to, pong)
                else:
                    await self.stage.handle(received)
            except TransomError as error:
                logger.warning("%s from %s: %s", type(message).__name__, received.peer, error.message)
            except Exception:
                logger.exception("%s from %s failed", type(message).__name__, received.peer)
            finally:
                request_id_var.reset(token)

    def _peer_lost(self, address: str) -> None:
        self._breaks[address] = self._breaks.pop(address, 0) + 1
        if len(self._breaks) > _MAX_BREAKS:
            del self._breaks[next(iter(self._breaks))]
        try:
            self.stage.peer_lost(address)
        except Exception:
            logger.exception("handling the loss of %s failed", address)

    async def _start_http(self) -> HttpListener:
        app = web.Application(**self.stage.app_limits())
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/ready", self._ready_probe),
                web.get("/metrics", self._metrics),
                *self.stage.routes(),
            ]
        )
        listener = HttpListener(app, head_timeout_s=self.config.head_timeout_s)
        await listener.start(self.config.http_host, self.config.http_port)
        return listener

    async def _health(self, request: web.Request) -> web.Response:
        body = {
            "status": "draining" if self.draining else "ok" if self.ready else "starting",
            "stage": self.stage.name,
            "incarnation": self.incarnation,
            "uptime_s": round(time.monotonic() - self._started_s, 3),
            "load": self.stage.load(),
        }
        return web.Response(body=orjson.dumps(body), content_type="application/json")

    async def _ready_probe(self, request: web.Request) -> web.Response:
        problem = self._problem()
        body = orjson.dumps({"ready": problem is None, "reason": problem})
        return web.Response(
            body=body, status=200 if problem is None else 503, content_type="application/json"
        )

    def _problem(self) -> str | None:
        """Return why no work can be taken now."""
        if self.draining:
            return "draining"
        return self.stage.unready_reason() if self.ready else "starting"

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=expose(self._registry), headers={"Content-Type": CONTENT_TYPE})

    def _announce(self, transport: Transport, listener: HttpListener) -> None:
        """Print the readiness line: the one JSON object that a stage writes to stdout."""
        line = {
            "event": "ready",
            "stage": self.stage.name,
            "inbox": transport.address,
            "http": listener.url,
            "pid": os.getpid(),
            "incarnation": self.incarnation,
        }
        sys.stdout.write(orjson.dumps(line).decode() + "\n")
        sys.stdout.flush()


def run_stage(make_stage: Callable[[], Stage], config: StageConfig, *, name: str) -> int:
    """Run a stage until it is told to stop; return the exit code of the process.

    `make_stage` is called after logging is set up, so that heavy imports are logged and timed.
    """
    setup_logging(name, level=config.log_level, json=config.log_json)

    async def main() -> None:
        await StageRunner(make_stage(), config).run()

    try:
        uvloop.run(main())
    except TransomError as error:
        logger.error("%s stops: %s", name, error.message)
        return 2
    except KeyboardInterrupt:
        return 0
    return 0
