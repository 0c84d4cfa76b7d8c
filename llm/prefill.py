"""The prefill worker: takes prompts and embeddings, puts the first token out, hands the KV to decode.

A job that names no decode worker is decoded here. Event loop side; the computing is the engine's. Prompts
grow as embeddings arrive, each independently.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from functools import partial

from transom.errors import (
    ContextLengthError,
    DeadlineError,
    OverloadedError,
    ProtocolError,
    StageLostError,
    TransomError,
    UnavailableError,
    from_info,
)
from transom.llm.build import GB
from transom.llm.config import PrefillConfig
from transom.llm.constraint import Constraint
from transom.llm.kv_transfer import ZmqKVTransfer, from_frame, kv_name, unpack_return
from transom.llm.prompt import Frame, PromptAssembler
from transom.llm.request import (
    Drop,
    Event,
    Extend,
    FailedEvent,
    Hold,
    KeepAnswer,
    PrefilledEvent,
    Request,
    Start,
    TokenEvent,
)
from transom.llm.worker import LlmStage, check_deadline
from transom.messages import (
    Abort,
    EmbeddingChunk,
    KVGrant,
    KVHandoff,
    KVReserve,
    KVReturn,
    PrefillJob,
    RequestFailed,
)
from transom.recent_ids import RecentIds
from transom.transport import Received, Transport
from transom.under_way import UnderWay

logger = logging.getLogger(__name__)

_PARK_S = 60.0  # how long chunks wait for a job that the gateway may never send


@dataclass(slots=True, eq=False)
class _Job:
    """A request this worker answers for: from PrefillJob until its KV is sent or it has ended."""

    job: PrefillJob
    prompt: PromptAssembler
    waiting_tokens: int  # its share of the queue bound; 0 once prefilled
    held_bytes: int = 0  # embeddings parked here or held by the engine
    started: bool = False  # the engine knows it
    prefilled: bool = False  # the engine has handed it over
    first_ms: float = 0.0  # from its arrival to the first token


@dataclass(slots=True, eq=False)
class _Parked:
    """Chunks that came before their job."""

    since_s: float
    chunks: list[tuple[EmbeddingChunk, Frame]] = field(default_factory=list)
    held_bytes: int = 0


class PrefillStage(LlmStage):
    name = "prefill"
    config: PrefillConfig

    def __init__(self, config: PrefillConfig) -> None:
        super().__init__(config)
        self._jobs: dict[str, _Job] = {}
        self._parked: dict[str, _Parked] = {}
        self._under_way = UnderWay()
        self._waiting_tokens = 0
        self._held_bytes = 0
        self._hold = ""
        self._overflowed = RecentIds()  # their chunks came before the job and found no room

    async def start(self, transport: Transport) -> None:
        await super().start(transport)
        self._transfer = ZmqKVTransfer(transport, self._sent)
        self._audio_pad = self.model.config.special_token_ids.get("audio")

    async def close(self) -> None:
        if hasattr(self, "_transfer"):
            await self._transfer.close()
        await super().close()

    def load(self) -> dict[str, float]:
        return {
            **super().load(),
            "jobs": len(self._jobs),
            "tokens": self._waiting_tokens,
            "parked_requests": len(self._parked),
            "embedding_bytes": self._held_bytes,
            "handoff_bytes": self._transfer.pending_bytes if hasattr(self, "_transfer") else 0,
        }

    def jobs(self) -> int:
        return len(self._jobs)

    # Messages.

    async def handle(self, received: Received) -> None:
        message = received.message
        match message:
            case PrefillJob():
                self._take_job(message)
            case EmbeddingChunk():
                self._take_chunk(message, received.frames[0])
            case KVReturn():
                host_kv = unpack_return(message, received.frames, self.model.config, self.kv_dtype)
                self.engine.submit(KeepAnswer(message.request_id, message.output_ids, host_kv))
            case KVGrant():
                self._transfer.granted(message.request_id)
            case RequestFailed():
                # Its sender tells the gateway; here the rest of the request goes.
                self._forget(message.request_id, from_info(message.error).message)
                self.aborted.add(message.request_id, time.time())
            case Abort():
                self._forget(message.request_id, message.reason)
                self.aborted.add(message.request_id, time.time())
            case _:
                raise ProtocolError(f"prefill takes no {type(message).__name__}")

    def _take_job(self, job: PrefillJob) -> None:
        request_id = job.request_id
        parked = self._parked.pop(request_id, None)
        self._held_bytes -= parked.held_bytes if parked else 0
        if request_id in self.aborted or request_id in self._jobs:
            return
        self.transport.watch(job.gateway)
        try:
            prompt = PromptAssembler(job.parts, self._audio_pad)
            self._check_admissible(job, prompt.text_len)
            if job.decode:
                self.transport.watch(job.decode)
        except TransomError as error:
            self.report(job.gateway, request_id, error)
            self.aborted.add(request_id, time.time())  # its chunks are on their way still
            return
        own = self._jobs[request_id] = _Job(job, prompt, prompt.text_len)
        self._waiting_tokens += own.waiting_tokens
        try:
            for chunk, frame in parked.chunks if parked else ():
                self._add_chunk(own, chunk, frame)
        except TransomError as error:
            self._fail(request_id, error)
            return
        self.when_compiled(
            job.grammar, job.sampling, partial(self._start, own, time.time()), partial(self._fail, request_id)
        )

    def _start(self, own: _Job, arrived_s: float, constraint: Constraint | None) -> None:
        job = own.job
        if self._jobs.get(job.request_id) is not own:
            return
        own.started = True
        self.engine.submit(
            Start(
                Request(
                    job.request_id,
                    job.sampling,
                    job.deadline_s,
                    arrived_s=arrived_s,
                    priority=job.priority,
                    hands_off=bool(job.decode),
                    cache_salt=job.cache_salt,
                    constraint=constraint,
                )
            )
        )
        try:
            self._extend(own)
        except TransomError as error:
            self._fail(job.request_id, error)

    def _check_admissible(self, job: PrefillJob, text_len: int) -> None:
        if self.draining:
            raise UnavailableError("the prefill worker is shutting down")
        check_deadline(job.deadline_s, time.time())
        if job.request_id in self._overflowed:
            raise self._no_room_for_embeddings()
        if text_len >= self.engine.context_len:
            raise ContextLengthError(
                f"the prompt has {text_len} tokens of text; at most {self.engine.context_len} fit,"
                " one output token included"
            )
        limit = self.config.max_waiting_tokens
        if self._waiting_tokens and self._waiting_tokens + text_len > limit:
            raise OverloadedError(
                f"{self._waiting_tokens} prompt tokens wait for prefill, {text_len} more would pass {limit}",
                retry_after_s=self.retry_after_s(self._waiting_tokens),
            )

    def _take_chunk(self, chunk: EmbeddingChunk, frame: Frame) -> None:
        request_id = chunk.request_id
        if request_id in self.aborted:
            return
        own = self._jobs.get(request_id)
        limit = self.config.max_parked_mb * 1_000_000
        size = memoryview(frame).nbytes
        full = self._held_bytes and self._held_bytes + size > limit
        if own is None:
            if full or request_id in self._overflowed:
                # There is nobody to answer to yet; the job is refused when it comes.
                self._drop_parked(request_id)
                self._overflowed.add(request_id, time.time())
                return
            parked = self._parked.setdefault(request_id, _Parked(time.time()))
            parked.chunks.append((chunk, frame))
            parked.held_bytes += size
            self._held_bytes += size
            return
        try:
            if full:
                raise self._no_room_for_embeddings()
            self._add_chunk(own, chunk, frame)
            self._extend(own)
        except TransomError as error:
            self._fail(request_id, error)

    def _no_room_for_embeddings(self) -> OverloadedError:
        return OverloadedError(
            f"{self._held_bytes} bytes of embeddings wait for prefill, max_parked_mb allows"
            f" {self.config.max_parked_mb} MB",
            retry_after_s=self.retry_after_s(self._waiting_tokens),
        )

    def _add_chunk(self, own: _Job, chunk: EmbeddingChunk, frame: Frame) -> None:
        own.prompt.add(chunk, frame)
        size = memoryview(frame).nbytes
        own.held_bytes += size
        own.waiting_tokens += len(chunk.token_ids)
        self._waiting_tokens += len(chunk.token_ids)
        self._held_bytes += size

    def _extend(self, own: _Job) -> None:
        """Give the engine what is next of the prompt; ask the decode worker for room once all is known."""
        if not own.started:
            return
        pieces = own.prompt.take()
        request_id = own.job.request_id
        for number, piece in enumerate(pieces, start=1):
            rows = None
            if piece.rows is not None and piece.frame is not None and piece.offsets:
                rows = from_frame(piece.rows, piece.frame)
            complete = own.prompt.complete and number == len(pieces)
            self.engine.submit(
                Extend(request_id, piece.token_ids, piece.offsets, rows, complete, piece.content_key)
            )
        if pieces and own.prompt.complete and own.job.decode and own.job.sampling.max_tokens > 1:
            reserve = KVReserve(
                request_id=request_id,
                prompt_len=own.prompt.prompt_len,
                max_tokens=own.job.sampling.max_tokens,
                prefill=self.transport.address,
                gateway=own.job.gateway,
                deadline_s=own.job.deadline_s,
                priority=own.job.priority,
                kv_dtype=kv_name(self.kv_dtype),
            )
            self._transfer.reserve(reserve, own.job.decode)

    # Events of the engine.

    def on_event(self, event: Event) -> None:
        own = self._jobs.get(event.request_id)
        if own is None:
            return
        match event:
            case TokenEvent():
                self._put_out(own, event)
                if event.finish_reason is not None:
                    self._forget(event.request_id, "finished in prefill")
            case PrefilledEvent():
                self._hand_over(own, event)
            case FailedEvent():
                self._fail(event.request_id, from_info(event.error))

    def _put_out(self, own: _Job, event: TokenEvent) -> None:
        if event.index == 0:
            self._settle(own)
            own.first_ms = sum(event.timings_ms.values())
            timings = {f"prefill_{name}": value for name, value in event.timings_ms.items()}
            self.put_out(own.job.gateway, event, timings, own.prompt.stats(event.cached_tokens))
            return
        timings = {}
        if event.timings_ms:
            timings["decode_compute"] = round(sum(event.timings_ms.values()) - own.first_ms, 3)
        self.put_out(own.job.gateway, event, timings)

    def _hand_over(self, own: _Job, event: PrefilledEvent) -> None:
        self._settle(own)
        own.prefilled = True
        handoff = KVHandoff(
            request_id=event.request_id,
            prompt_ids=event.prompt_ids,
            first_token=event.first_token,
            prompt_len=event.host_kv.length,
            swa_len=event.host_kv.swa_len,
            sampling=own.job.sampling,
            deadline_s=own.job.deadline_s,
            gateway=own.job.gateway,
            tensors=(),
            priority=own.job.priority,
            return_to="" if event.return_from is None else self.transport.address,
            return_from=event.return_from or 0,
            return_page=self.config.page_size,
            grammar=own.job.grammar,
        )
        self._transfer.offer(handoff, event.host_kv)
        self._update_hold()

    def _sent(self, request_id: str, error: TransomError | None) -> None:
        own = self._jobs.get(request_id)
        if error is not None:
            self._fail(request_id, error)
        elif own is not None:
            self._under_way.add(own.job.decode, request_id, own.job.gateway, time.monotonic())
            self._forget(request_id, "handed over")
        self._update_hold()

    def _update_hold(self) -> None:
        """Take no new prompts into the engine while too much KV waits for decode workers."""
        pending, limit = self._transfer.pending_bytes, self.config.host_reserve_gb * GB
        hold = f"host memory: {limit:.0f} bytes of KV wait for decode" if pending > limit else ""
        if hold != self._hold:
            self._hold = hold
            self.engine.submit(Hold(hold))

    # Ends.

    def _settle(self, own: _Job) -> None:
        """The prompt is computed: it no longer waits, and its embeddings are gone."""
        self._waiting_tokens -= own.waiting_tokens
        self._held_bytes -= own.held_bytes
        own.waiting_tokens = own.held_bytes = 0

    def _forget(self, request_id: str, reason: str) -> None:
        self._drop_parked(request_id)
        own = self._jobs.pop(request_id, None)
        if own is None:
            return
        self._settle(own)
        self._transfer.drop(request_id, reason)
        if not own.prefilled:
            self.engine.submit(Drop(request_id))
        self._update_hold()
        self.job_ended()

    def _fail(self, request_id: str, error: TransomError) -> None:
        own = self._jobs.get(request_id)
        if own is not None:
            self.report(own.job.gateway, request_id, error)
            self._forget(request_id, error.message)
            self.aborted.add(request_id, time.time())

    def _drop_parked(self, request_id: str) -> None:
        parked = self._parked.pop(request_id, None)
        if parked is not None:
            self._held_bytes -= parked.held_bytes

    def fail_all(self, error: TransomError) -> None:
        for request_id in list(self._jobs):
            self._fail(request_id, error)

    def tick(self, now_s: float) -> None:
        for request_id in [r for r, p in self._parked.items() if p.since_s < now_s - _PARK_S]:
            self._drop_parked(request_id)
        for request_id in [r for r, own in self._jobs.items() if own.job.deadline_s <= now_s]:
            self._fail(request_id, DeadlineError("the deadline passed before the answer was complete"))

    def peer_lost(self, address: str) -> None:
        lost = StageLostError("the decode worker of this request was lost")
        for request_id, gateway in self._under_way.lost(address, time.monotonic()):
            self.report(gateway, request_id, lost)
        for request_id, own in list(self._jobs.items()):
            if own.job.decode == address:
                self._fail(request_id, lost)
            elif own.job.gateway == address:
                self._forget(request_id, "the gateway was lost")
