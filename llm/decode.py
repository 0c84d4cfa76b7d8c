"""The decode worker: promises room for KV, takes it over from prefill, and decodes to the end.

Event loop side; the computing is the engine's. Host memory is promised first, device pages follow when
decoding starts, so that requests in transit never take pages from running ones.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
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
from transom.llm.capacity import answer_margin
from transom.llm.config import DecodeConfig
from transom.llm.constraint import Constraint
from transom.llm.kv_transfer import handoff_bytes, kv_name, pack_kv, unpack_kv
from transom.llm.request import (
    AnswerEvent,
    Drop,
    Event,
    FailedEvent,
    Request,
    ReturnWish,
    Start,
    StartedEvent,
    TokenEvent,
)
from transom.llm.worker import LlmStage, check_deadline
from transom.messages import Abort, KVGrant, KVHandoff, KVReserve, KVReturn, RequestFailed
from transom.transport import Received

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Job:
    """A request this worker knows: asked for -> granted -> arrived (in the engine)."""

    reserve: KVReserve
    host_bytes: int  # promised host memory; given back when decoding starts
    granted: bool = False
    arrived: bool = False
    held: bool = False  # host_bytes count against the reserve

    @property
    def tokens(self) -> int:
        return self.reserve.prompt_len


class DecodeStage(LlmStage):
    name = "decode"
    config: DecodeConfig

    def __init__(self, config: DecodeConfig) -> None:
        super().__init__(config)
        self._jobs: dict[str, _Job] = {}
        self._queue: dict[str, _Job] = {}  # not granted yet, oldest first
        self._queued_tokens = 0
        self._promised_bytes = 0

    def load(self) -> dict[str, float]:
        return {
            **super().load(),
            "jobs": len(self._jobs),
            "tokens": sum(job.tokens for job in self._jobs.values()),
            "queued_requests": len(self._queue),
            "promised_bytes": self._promised_bytes,
        }

    def jobs(self) -> int:
        return len(self._jobs)

    # Messages.

    async def handle(self, received: Received) -> None:
        message = received.message
        match message:
            case KVReserve():
                self._take_reserve(message)
            case KVHandoff():
                self._take_handoff(message, received)
            case Abort():
                self._forget(message.request_id)
                self.aborted.add(message.request_id, time.time())
            case _:
                raise ProtocolError(f"decode takes no {type(message).__name__}")

    def _take_reserve(self, reserve: KVReserve) -> None:
        request_id = reserve.request_id
        if request_id in self.aborted or request_id in self._jobs:
            return
        self.transport.watch(reserve.gateway)
        self.transport.watch(reserve.prefill)
        margin = answer_margin(self.config.page_size)
        need = handoff_bytes(self.model.config, reserve.prompt_len, self.kv_dtype.itemsize, margin)
        try:
            self._check_admissible(reserve, need)
        except TransomError as error:
            self._refuse(reserve, error)
            return
        self._jobs[request_id] = self._queue[request_id] = _Job(reserve, need)
        self._queued_tokens += reserve.prompt_len
        self._grant_what_fits()

    def _check_admissible(self, reserve: KVReserve, need: int) -> None:
        if self.draining:
            raise UnavailableError("the decode worker is shutting down")
        check_deadline(reserve.deadline_s, time.time())
        own = kv_name(self.kv_dtype)
        if reserve.kv_dtype not in ("", own):
            raise UnavailableError(
                f"the prefill worker has KV in {reserve.kv_dtype}, the decode worker in {own}:"
                " they need the same kv_dtype"
            )
        if reserve.prompt_len >= self.engine.context_len:
            raise ContextLengthError(
                f"the prompt has {reserve.prompt_len} tokens; decode has room for {self.engine.context_len},"
                " output included"
            )
        if need > self.config.host_reserve_gb * GB:
            raise ContextLengthError(
                f"the KV of {reserve.prompt_len} tokens takes {need} bytes of host memory, host_reserve_gb"
                f" allows {self.config.host_reserve_gb} GB"
            )
        limit = self.config.max_waiting_tokens
        if self._queue and self._queued_tokens + reserve.prompt_len > limit:
            raise OverloadedError(
                f"{self._queued_tokens} prompt tokens wait for decode,"
                f" {reserve.prompt_len} more would pass {limit}",
                retry_after_s=self.retry_after_s(self._queued_tokens),
            )

    def _grant_what_fits(self) -> None:
        """Promise host memory by priority, then age. Retracted KV counts too, but is never refused."""
        limit = self.config.host_reserve_gb * GB
        used = self._promised_bytes + self.engine.load()["retracted_bytes"]
        while self._queue:
            request_id, job = max(self._queue.items(), key=lambda item: item[1].reserve.priority)
            if used and used + job.host_bytes > limit:
                return
            self._unqueue(request_id)
            job.granted = job.held = True
            used += job.host_bytes
            self._promised_bytes += job.host_bytes
            self.tell(job.reserve.prefill, KVGrant(request_id=request_id))

    def _take_handoff(self, handoff: KVHandoff, received: Received) -> None:
        request_id = handoff.request_id
        if request_id in self.aborted:
            return
        job = self._jobs.get(request_id)
        if job is None or not job.granted or job.arrived:
            # Its promise has expired, or was made by a process that died: it can't continue here.
            self.report(handoff.gateway, request_id, TransomError("decode holds no room for this request"))
            return
        try:
            host_kv = unpack_kv(handoff, received.frames, self.model.config, self.kv_dtype)
        except TransomError as error:
            self._fail(request_id, error)
            return
        job.arrived = True
        wish = None
        if handoff.return_to and handoff.return_page > 0 and handoff.return_from >= 0:
            wish = ReturnWish(handoff.return_from, handoff.return_page, handoff.return_to)
        request = Request(
            request_id,
            handoff.sampling,
            handoff.deadline_s,
            arrived_s=time.time(),
            priority=handoff.priority,
            prompt_ids=list(handoff.prompt_ids),
            prompt_complete=True,
            output_ids=[handoff.first_token],
            host_kv=host_kv,
            wish=wish,
        )
        self.when_compiled(
            handoff.grammar,
            handoff.sampling,
            partial(self._start, job, request),
            partial(self._fail, request_id),
        )

    def _start(self, job: _Job, request: Request, constraint: Constraint | None) -> None:
        if self._jobs.get(request.request_id) is job:
            request.constraint = constraint
            self.engine.submit(Start(request))

    # Events of the engine.

    def on_event(self, event: Event) -> None:
        if isinstance(event, AnswerEvent):
            self._return(event)
            return
        job = self._jobs.get(event.request_id)
        if job is None:
            return
        match event:
            case StartedEvent():
                self._give_back(job)
                self._grant_what_fits()
            case TokenEvent():
                timings = {f"decode_{name}": value for name, value in event.timings_ms.items()}
                self.put_out(job.reserve.gateway, event, timings)
                if event.finish_reason is not None:
                    self._forget(event.request_id)
            case FailedEvent():
                self._fail(event.request_id, from_info(event.error))

    def _return(self, event: AnswerEvent) -> None:
        """Send an answer's KV back to its prefill worker's cache, unless too much waits for that worker."""
        metas, frames = pack_kv(event.host_kv)
        message = KVReturn(
            request_id=event.request_id,
            output_ids=event.output_ids,
            begin=event.host_kv.begin,
            end=event.host_kv.length,
            swa_len=event.host_kv.swa_len,
            tensors=metas,
        )
        self.tell(event.wish.to, message, frames)

    # Ends.

    def _unqueue(self, request_id: str) -> None:
        job = self._queue.pop(request_id, None)
        if job is not None:
            self._queued_tokens -= job.reserve.prompt_len

    def _give_back(self, job: _Job) -> None:
        if job.held:
            job.held = False
            self._promised_bytes -= job.host_bytes

    def _forget(self, request_id: str) -> None:
        job = self._jobs.pop(request_id, None)
        if job is None:
            return
        self._unqueue(request_id)
        self._give_back(job)
        if job.arrived:
            self.engine.submit(Drop(request_id))
        self._grant_what_fits()
        self.job_ended()

    def _fail(self, request_id: str, error: TransomError) -> None:
        job = self._jobs.get(request_id)
        if job is None:
            return
        self._forget(request_id)
        if job.arrived:
            self.report(job.reserve.gateway, request_id, error)
        else:
            self._refuse(job.reserve, error)

    def _refuse(self, reserve: KVReserve, error: TransomError) -> None:
        """Tell both sides that nothing will be decoded here."""
        request_id = reserve.request_id
        self.report(reserve.gateway, request_id, error)
        self.tell(reserve.prefill, RequestFailed(request_id=request_id, error=error.info(), stage=self.name))
        self.aborted.add(request_id, time.time())

    def fail_all(self, error: TransomError) -> None:
        for request_id in list(self._jobs):
            self._fail(request_id, error)

    def tick(self, now_s: float) -> None:
        for request_id, job in list(self._jobs.items()):
            if not job.arrived and job.reserve.deadline_s <= now_s:
                self._fail(request_id, DeadlineError("the deadline passed before decoding could start"))
        self._grant_what_fits()

    def peer_lost(self, address: str) -> None:
        for request_id, job in list(self._jobs.items()):
            if job.reserve.gateway == address:
                self._forget(request_id)
            elif job.reserve.prefill == address and not job.arrived:
                # The prefill worker may live, and wait for a grant that is lost.
                lost = StageLostError("the prefill worker of this request was lost")
                self.report(job.reserve.gateway, request_id, lost)
                self._forget(request_id)
