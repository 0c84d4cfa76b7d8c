"""What encoder load is sent to: an encoder over its own wire, a server with the chat API, processes of ours.

Runs in the benchmark's process, standing for gateway and prefill in one. Knows no load and no media.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import aiohttp
import orjson
from prometheus_client.parser import text_string_to_metric_families

from transom.bench.encoder_media import Item
from transom.bench.origin import device_name
from transom.bench.processes import Child
from transom.client import inline_part, why
from transom.commands.base import base_url
from transom.config import add_flags, client_api_key, config_from_args
from transom.curve import FleetKey
from transom.encoder.config import EncoderConfig
from transom.errors import TransomError, UnavailableError
from transom.messages import EmbeddingChunk, EncodeDone, EncodeJob, Ping, Pong, RequestFailed
from transom.transport import Transport

_CONNECT_S = 2.0
_PING_S = 10.0
_START_S = 300.0


@dataclass(slots=True)
class Outcome:
    """What came back for one item; `first_s` is when its first embeddings did."""

    rows: int = 0
    first_s: float | None = None
    cache_hit: bool | None = None
    timings_ms: dict[str, float] = field(default_factory=dict)


class Target(ABC):
    """Something that encodes; an async context manager. `encode` raises TransomError."""

    @abstractmethod
    async def __aenter__(self) -> Target: ...

    @abstractmethod
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @abstractmethod
    async def encode(self, item: Item, url: str | None, timeout_s: float) -> Outcome:
        """Return when all embeddings of an item are here; `url` says where to fetch it, None: inline."""


@dataclass(slots=True)
class _Waiting:
    outcome: Outcome
    ended: asyncio.Future[None]
    is_told: bool = False
    has_last: bool = False


class WireTarget(Target):
    """One encoder's ZMQ inbox."""

    def __init__(
        self, inbox: str, *, bind: str = "tcp://127.0.0.1:0", advertise: str = "", key_file: str = ""
    ) -> None:
        self._inbox = inbox
        key = FleetKey.load(key_file) if key_file else None
        self._transport = Transport(bind=bind, advertise=advertise, key=key, connect_timeout_s=_CONNECT_S)
        self._waiting: dict[str, _Waiting] = {}
        self._pong: asyncio.Future[Pong] | None = None

    async def __aenter__(self) -> WireTarget:
        await self._transport.start()
        self._receiver = asyncio.create_task(self._receive())
        self._transport.on_peer_lost = self._lost
        try:
            await self._ping()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._receiver.cancel()
        await asyncio.gather(self._receiver, return_exceptions=True)
        await self._transport.close()

    async def _ping(self) -> None:
        self._pong = asyncio.get_running_loop().create_future()
        self._transport.send(self._inbox, Ping(self._transport.address, 1))
        try:
            async with asyncio.timeout(_PING_S):
                pong = await self._pong
        except TimeoutError:
            raise UnavailableError(f"no encoder answers at {self._inbox} within {_PING_S:g} s") from None
        if not pong.ready:
            raise UnavailableError(f"{pong.stage} at {self._inbox} is not ready")

    async def _receive(self) -> None:
        while True:
            received = await self._transport.recv()
            message = received.message
            if isinstance(message, Pong):
                if self._pong is not None and not self._pong.done():
                    self._pong.set_result(message)
            elif isinstance(message, EmbeddingChunk | EncodeDone | RequestFailed):
                self._take(message)

    def _take(self, message: EmbeddingChunk | EncodeDone | RequestFailed) -> None:
        waiting = self._waiting.get(message.request_id)
        if waiting is None or waiting.ended.done():
            return
        outcome = waiting.outcome
        if isinstance(message, RequestFailed):
            failure = TransomError(message.error.message)
            failure.status = message.error.status
            waiting.ended.set_exception(failure)
            return
        if isinstance(message, EmbeddingChunk):
            outcome.rows += message.rows.shape[0]
            outcome.first_s = outcome.first_s or time.perf_counter()
            waiting.has_last = message.last
        else:
            outcome.cache_hit = message.cache_hit
            outcome.timings_ms = message.timings_ms
            waiting.is_told = True
        if waiting.is_told and waiting.has_last:
            waiting.ended.set_result(None)

    def _lost(self, address: str) -> None:
        if self._pong is not None and not self._pong.done():
            self._pong.set_exception(UnavailableError(f"no encoder listens at {address}"))
        for waiting in self._waiting.values():
            if not waiting.ended.done():
                waiting.ended.set_exception(UnavailableError(f"connection to {address} was lost"))

    async def encode(self, item: Item, url: str | None, timeout_s: float) -> Outcome:
        job = EncodeJob(
            request_id=uuid.uuid4().hex,
            item_index=0,
            param="messages[0].content[0]",
            modality=item.kind,
            routing_key=item.name,
            url=url,
            deadline_s=time.time() + timeout_s,
            gateway=self._transport.address,
            reply_to=self._transport.address,
        )
        waiting = _Waiting(Outcome(), asyncio.get_running_loop().create_future())
        self._waiting[job.request_id] = waiting
        begin = time.perf_counter()
        try:
            await self._transport.send_wait(self._inbox, job, [] if url else [item.data])
            async with asyncio.timeout(timeout_s + 1):
                await waiting.ended
        except TimeoutError:
            raise UnavailableError(f"no answer within {timeout_s:g} s") from None
        finally:
            del self._waiting[job.request_id]
        outcome = waiting.outcome
        if outcome.first_s is not None:
            outcome.first_s -= begin
        return outcome


class ChatTarget(Target):
    """A server with the chat API: a gateway, or another engine. One token is generated an item."""

    def __init__(self, url: str, *, model: str = "") -> None:
        self._url = base_url(url)
        self._model = model

    async def __aenter__(self) -> ChatTarget:
        key = client_api_key()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )
        try:
            if not self._model:
                body = await self._json(self._session.get(f"{self._url}/v1/models"))
                self._model = str(body["data"][0]["id"])
        except BaseException as error:
            await self._session.close()
            if isinstance(error, (aiohttp.ClientError, KeyError, IndexError, TypeError)):
                raise UnavailableError(f"{self._url}: no model is served: {why(error)}") from None
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    @staticmethod
    async def _json(request: Any) -> Any:
        async with request as response:
            raw = await response.read()
            if response.status != 200:
                raise UnavailableError(f"HTTP {response.status}: {raw[:200].decode('utf-8', 'replace')}")
            return orjson.loads(raw)

    async def encode(self, item: Item, url: str | None, timeout_s: float) -> Outcome:
        kind = f"{item.kind}_url"
        part = {"type": kind, kind: {"url": url}} if url else inline_part(item.data, item.mime, item.kind)
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": [part]}],
            "max_tokens": 1,
            "temperature": 0,
        }
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            await self._json(
                self._session.post(f"{self._url}/v1/chat/completions", json=body, timeout=timeout)
            )
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise UnavailableError(f"{self._url}: {why(error)}") from None
        return Outcome()


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds of a process and its children so far, and what it counted about forwards."""

    cpu_s: float | None
    forward_s: float
    batches: dict[float, float]  # upper bound of pieces -> batches with no more, vision lane


class OwnProcess:
    """A worker process started for the benchmark: an async context manager; it ends with us."""

    def __init__(self, module: str, flags: Sequence[str]) -> None:
        self._command = [sys.executable, "-m", module, *flags, "--watch-stdin", "--log-level", "warning"]

    @classmethod
    def encoder(cls, model: str, flags: Sequence[str]) -> OwnProcess:
        """An encoder that may fetch from loopback and shares its embeddings with nobody."""
        return cls("transom", ["encoder", *_settings(model), *flags])

    @classmethod
    def sequential(cls, model: str, flags: Sequence[str]) -> OwnProcess:
        """The baseline, with the same settings."""
        return cls("transom.bench.sequential_encoder", [*_settings(model), *flags])

    async def __aenter__(self) -> OwnProcess:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the process has ended
        try:
            self._child = await asyncio.to_thread(Child, self._command, log=self._log, limit_s=_START_S)
        except UnavailableError as error:
            self._log.seek(0)
            told = self._log.read().decode("utf-8", "replace").strip().splitlines()[-1:]
            self._log.close()
            raise UnavailableError(": ".join([error.message, *told])) from None
        self.inbox, self.http = str(self._child.line["inbox"]), str(self._child.line["http"])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self._child.stop)
        self._log.close()

    async def usage(self) -> Usage:
        """Ask what it has used so far."""
        return Usage(self._child.cpu_s(), *await _read_forwards(self.http))


def _settings(model: str) -> list[str]:
    scope = uuid.uuid4().hex
    return [
        "--model", model, "--allow-private-addresses", "--fetch-ports", "0", "--embedding-cache-scope", scope,
    ]  # fmt: skip


def own_device(flags: Sequence[str]) -> str:
    """Return how rows name the device of an own encoder with these command-line flags.

    What it computes on can also be set by the environment, as any setting.
    """
    parser = argparse.ArgumentParser()
    add_flags(parser, EncoderConfig)
    return device_name(config_from_args(EncoderConfig, "encoder", parser.parse_args(flags)).device)


async def read_usage(process: OwnProcess | None, metrics_url: str) -> Usage | None:
    """Return what an own process has used, or what a running encoder tells at its health listener."""
    if process is not None:
        return await process.usage()
    if metrics_url:
        return Usage(None, *await _read_forwards(metrics_url))
    return None


async def _read_forwards(http: str) -> tuple[float, dict[float, float]]:
    """Return the seconds of all vision forwards and the cumulative histogram of their pieces."""
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{base_url(http)}/metrics") as response:
            text = await response.text()
    except aiohttp.ClientError as error:
        raise UnavailableError(f"{http}/metrics: {why(error)}") from None
    seconds = 0.0
    batches: dict[float, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.get("lane") != "vision":
                continue
            if sample.name == "transom_encoder_forward_seconds_sum":
                seconds += sample.value
            elif sample.name == "transom_encoder_batch_pieces_bucket":
                bound = float(sample.labels["le"])
                batches[bound] = batches.get(bound, 0.0) + sample.value
    return seconds, batches
