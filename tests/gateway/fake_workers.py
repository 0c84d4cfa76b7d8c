"""Scripted encoder, prefill and decode workers that speak the real wire protocol over real sockets.

They answer with text that a test chooses, so that the gateway is tested as clients and workers see it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.patience import PATIENCE_S
from transom.errors import ErrorInfo
from transom.gateway.config import GatewayConfig
from transom.gateway.server import GatewayStage
from transom.http_listener import HttpListener
from transom.messages import (
    Abort,
    EmbeddingChunk,
    EncodeDone,
    EncodeJob,
    KVHandoff,
    MediaPart,
    MediaSize,
    Message,
    Ping,
    Pong,
    PrefillJob,
    PromptStats,
    RequestFailed,
    TensorMeta,
    TextPart,
    TokenChunk,
    TokenLogprob,
)
from transom.stage import StageRunner
from transom.tokenizer import Tokenizer
from transom.transport import Received, Transport

ROWS = 4  # embedding rows of every media item


class ScriptedWorker:
    """One worker. `seen` holds all messages except pings, in order."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.transport = Transport()
        self.seen: list[Received] = []
        self.on_message: Callable[[Received], Awaitable[None]] | None = None
        self.ready = True
        self.answer_pings = True
        self.incarnation = "first"
        self.load: dict[str, float] = {}
        self.breaks = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self._news = asyncio.Condition()

    async def start(self) -> None:
        await self.transport.start()
        self._spawn(self._run())

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _run(self) -> None:
        while True:
            received = await self.transport.recv()
            message = received.message
            if isinstance(message, Ping):
                if self.answer_pings:
                    self.transport.send(
                        message.reply_to,
                        Pong(
                            nonce=message.nonce,
                            stage=self.stage,
                            incarnation=self.incarnation,
                            ready=self.ready,
                            load=self.load,
                            breaks=self.breaks,
                        ),
                    )
                continue
            async with self._news:
                self.seen.append(received)
                self._news.notify_all()
            if self.on_message is not None:
                self._spawn(self.on_message(received))

    async def wait_for(self, kind: type[Message], count: int = 1) -> list[Any]:
        """Return the first `count` messages of a type."""

        def found() -> list[Any]:
            return [one.message for one in self.seen if isinstance(one.message, kind)]

        async with asyncio.timeout(PATIENCE_S), self._news:
            await self._news.wait_for(lambda: len(found()) >= count)
            return found()[:count]

    def aborted(self) -> set[str]:
        return {one.message.request_id for one in self.seen if isinstance(one.message, Abort)}

    async def stop(self) -> None:
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.transport.close()


@dataclass
class Script:
    """What the model says to a job. `hold` keeps decode waiting; `chunk` tokens go into one message."""

    answer: Callable[[PrefillJob], str] = lambda job: "hello there"
    finish: str = "stop"
    chunk: int = 1
    hold: asyncio.Event | None = None
    held: Callable[[PrefillJob], bool] = lambda job: True  # which answers the hold is for
    reorder: bool = False
    prefill_error: ErrorInfo | None = None
    encode_error: ErrorInfo | None = None
    logprobs: bool = False
    notes: tuple[str, ...] = ()  # what encoders remark
    size: MediaSize = field(default_factory=MediaSize)  # what they say of each item at its end
    done_when: asyncio.Event | None = None  # holds back that they are done, not what they made


@dataclass
class ScriptedFleet:
    """One encoder, prefill and decode worker each (or more), and the gateway before them."""

    tokenizer: Tokenizer
    encoders: list[ScriptedWorker]
    prefills: list[ScriptedWorker]
    decodes: list[ScriptedWorker]
    script: Script = field(default_factory=Script)
    url: str = ""
    runner: StageRunner | None = None
    _jobs: dict[str, PrefillJob] = field(default_factory=dict)
    _embedded: dict[str, set[int]] = field(default_factory=dict)
    _begun: set[str] = field(default_factory=set)

    @property
    def workers(self) -> list[ScriptedWorker]:
        return [*self.encoders, *self.prefills, *self.decodes]

    @property
    def stage(self) -> GatewayStage:
        assert self.runner is not None
        stage = self.runner.stage
        assert isinstance(stage, GatewayStage)
        return stage

    def wire(self) -> None:
        for worker in self.encoders:
            worker.on_message = self._encoder(worker)
        for worker in self.prefills:
            worker.on_message = self._prefill(worker)
        for worker in self.decodes:
            worker.on_message = self._decode(worker)

    def prompt_text(self, job: PrefillJob) -> str:
        """Return the prompt as text, media items as <image>, <video>, <audio>."""
        return "".join(
            self.tokenizer.decode(part.token_ids, skip_special=False)
            if isinstance(part, TextPart)
            else f"<{part.modality}>"
            for part in job.parts
        )

    def _encoder(self, worker: ScriptedWorker) -> Callable[[Received], Awaitable[None]]:
        async def handle(received: Received) -> None:
            job = received.message
            if not isinstance(job, EncodeJob):
                return
            send = worker.transport.send
            if self.script.encode_error is not None:
                failed = RequestFailed(
                    request_id=job.request_id, error=self.script.encode_error, stage="encoder"
                )
                send(job.gateway, failed)
                send(job.reply_to, failed)
                return
            chunk = EmbeddingChunk(
                request_id=job.request_id,
                item_index=job.item_index,
                chunk_index=0,
                last=True,
                content_key=job.routing_key,
                token_ids=[7] * ROWS,
                pad_ids=(7,),
                rows=TensorMeta("float32", (ROWS, 2)),
            )
            send(job.reply_to, chunk, [bytes(ROWS * 2 * 4)])
            if self.script.done_when is not None:
                await self.script.done_when.wait()
            done = EncodeDone(
                request_id=job.request_id,
                item_index=job.item_index,
                modality=job.modality,
                content_key=job.routing_key,
                media_tokens=ROWS,
                notes=self.script.notes,
                timings_ms={"total": 1.0},
                spans=(("decode", 0.0, 0.4), ("forward", 0.3, 0.5), ("send", 0.8, 0.2)),
                size=self.script.size,
            )
            send(job.gateway, done)

        return handle

    def _prefill(self, worker: ScriptedWorker) -> Callable[[Received], Awaitable[None]]:
        async def handle(received: Received) -> None:
            message = received.message
            if isinstance(message, PrefillJob):
                self._jobs[message.request_id] = message
            elif isinstance(message, EmbeddingChunk):
                self._embedded.setdefault(message.request_id, set()).add(message.item_index)
            else:
                return
            job = self._jobs.get(message.request_id)
            if job is None or job.request_id in self._begun:
                return
            items = [part for part in job.parts if isinstance(part, MediaPart)]
            if len(self._embedded.get(job.request_id, ())) == len(items):
                self._begun.add(job.request_id)
                await self._first_token(worker, job, items)

        return handle

    async def _first_token(self, worker: ScriptedWorker, job: PrefillJob, items: list[MediaPart]) -> None:
        send = worker.transport.send
        if self.script.prefill_error is not None:
            failed = RequestFailed(
                request_id=job.request_id, error=self.script.prefill_error, stage="prefill"
            )
            send(job.gateway, failed)
            return
        kinds = [item.modality for item in items]
        text_len = sum(len(part.token_ids) for part in job.parts if isinstance(part, TextPart))
        stats = PromptStats(
            prompt_tokens=text_len + ROWS * len(items),
            cached_tokens=3,
            image_tokens=ROWS * kinds.count("image"),
            video_tokens=ROWS * kinds.count("video"),
            audio_tokens=ROWS * kinds.count("audio"),
        )
        ids = self.answer_ids(job)
        ends = not ids or job.sampling.max_tokens == 1
        first = TokenChunk(
            request_id=job.request_id,
            index=0,
            token_ids=ids[:1],
            finish_reason=("stop" if not ids else "length") if ends else None,
            prompt=stats,
            timings_ms={"prefill": 2.0},
            logprobs=self.logprobs(ids[:1]),
        )
        handoff = KVHandoff(
            request_id=job.request_id,
            prompt_ids=[],
            first_token=ids[0] if ids else 0,
            prompt_len=text_len,
            swa_len=0,
            sampling=job.sampling,
            deadline_s=job.deadline_s,
            gateway=job.gateway,
            tensors=(),
        )
        if not self.script.reorder:
            send(job.gateway, first)
        if not ends:
            send(job.decode, handoff)
        if self.script.reorder:
            decode = next(one for one in self.decodes if one.transport.address == job.decode)
            await decode.wait_for(KVHandoff)
            await asyncio.sleep(0.05)  # let decode's tokens overtake; the test holds in either order
            send(job.gateway, first)

    def _decode(self, worker: ScriptedWorker) -> Callable[[Received], Awaitable[None]]:
        async def handle(received: Received) -> None:
            handoff = received.message
            if not isinstance(handoff, KVHandoff):
                return
            job = self._jobs[handoff.request_id]
            if self.script.hold is not None and self.script.held(job):
                await self.script.hold.wait()
            ids = self.answer_ids(job)
            size = self.script.chunk
            chunks = [
                TokenChunk(
                    request_id=job.request_id,
                    index=at,
                    token_ids=ids[at : at + size],
                    logprobs=self.logprobs(ids[at : at + size]),
                )
                for at in range(1, len(ids), size)
            ]
            cut = len(ids) >= job.sampling.max_tokens
            chunks.append(
                TokenChunk(
                    request_id=job.request_id,
                    index=len(ids),
                    token_ids=[],
                    finish_reason="length" if cut else self.script.finish,  # type: ignore[arg-type]
                )
            )
            for chunk in reversed(chunks) if self.script.reorder else chunks:
                worker.transport.send(handoff.gateway, chunk)
                await asyncio.sleep(0)

        return handle

    def answer_ids(self, job: PrefillJob) -> list[int]:
        return self.tokenizer.encode(self.script.answer(job))[: job.sampling.max_tokens]

    def logprobs(self, ids: list[int]) -> list[TokenLogprob] | None:
        if not self.script.logprobs:
            return None
        return [TokenLogprob(id, -0.5, [(id, -0.5), (0, -2.0)]) for id in ids]


class QuietRunner(StageRunner):
    """Keeps where it listens, instead of printing it."""

    url = ""

    def _announce(self, transport: Transport, listener: HttpListener) -> None:
        self.url = listener.url


@asynccontextmanager
async def scripted_fleet(
    tokenizer: Tokenizer, *, encoders: int = 1, prefills: int = 1, decodes: int = 1, **settings: Any
) -> AsyncIterator[ScriptedFleet]:
    """Run scripted workers and a real gateway stage before them; yield when all are ready."""
    fleet = ScriptedFleet(
        tokenizer,
        [ScriptedWorker("encoder") for _ in range(encoders)],
        [ScriptedWorker("prefill") for _ in range(prefills)],
        [ScriptedWorker("decode") for _ in range(decodes)],
    )
    for worker in fleet.workers:
        await worker.start()
    fleet.wire()
    config = GatewayConfig(
        **{
            "http_port": 0,
            "encoder": tuple(one.transport.address for one in fleet.encoders),
            "prefill": tuple(one.transport.address for one in fleet.prefills),
            "decode": tuple(one.transport.address for one in fleet.decodes),
            "ping_interval_s": 0.05,
            "drain_timeout_s": 0.2,
            **settings,
        }
    )
    stage = GatewayStage(config)
    fleet.runner = runner = QuietRunner(stage, config)
    running = asyncio.create_task(fleet.runner.run())
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not fleet.runner.ready or stage.unready_reason() is not None:
                if running.done():
                    await running
                await asyncio.sleep(0.01)
        fleet.url = runner.url
        yield fleet
    finally:
        fleet.runner._stop.set()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        for worker in fleet.workers:
            await worker.stop()
