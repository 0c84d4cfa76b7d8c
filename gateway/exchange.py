"""Sends a client's request into the fleet and gathers what comes back, until its one end.

Lives on the gateway's event loop. However an exchange ends, every worker that may hold a part is told.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from transom.errors import DeadlineError, OverloadedError, StageLostError
from transom.gateway.embeddings import LiveEmbedding
from transom.gateway.fleet import Fleet
from transom.gateway.media_totals import MediaLimits, MediaTotals
from transom.gateway.prompt import Prompt
from transom.gateway.requests import LiveRequest, RequestTable, Work
from transom.gateway.schema import MediaItem
from transom.messages import Abort, EncodeJob, Grammar, Modality, PrefillJob, Sampling, TokenChunk

logger = logging.getLogger(__name__)

# What an item will take of the prompt, before anybody has looked at it: only for load and admission.
_TYPICAL_TOKENS: dict[Modality, int] = {"image": 256, "video": 2048, "audio": 128}


@dataclass(frozen=True, slots=True)
class Attachment:
    """A media item with its routing key."""

    item: MediaItem
    routing_key: str


@dataclass(frozen=True, slots=True)
class Plan:
    """One choice to be made: choices with the same `prompt` object share a prefill worker."""

    prompt: Prompt
    sampling: Sampling
    grammar: Grammar | None = None


def media_cost(one: Attachment) -> int:
    """Return the tokens that an item counts for before it is encoded."""
    return _TYPICAL_TOKENS[one.item.modality]


def _media_tokens(attachments: Sequence[Attachment]) -> int:
    return sum(media_cost(one) for one in attachments)


def total_tokens(plans: Sequence[Plan], attachments: Sequence[Attachment]) -> int:
    """Return what a request counts for in admission: prompts and output."""
    media_tokens = _media_tokens(attachments)
    return sum(plan.prompt.text_tokens + media_tokens + plan.sampling.max_tokens for plan in plans)


@dataclass(slots=True)
class Exchange:
    """The choices of one client request, in order."""

    timeout_s: float
    deadline_s: float  # on the monotonic clock
    choices: list[LiveRequest] = field(default_factory=list)
    end_reason: str = "the client is gone"
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def wake(self) -> None:
        """Let the waiter look again."""
        self._wake.set()

    async def wait(self, idle_s: float | None = None) -> bool:
        """Wait until a choice has news; False after `idle_s` without. Raise DeadlineError at the deadline."""
        until = None if idle_s is None else time.monotonic() + idle_s
        while not any(choice.has_news() for choice in self.choices):
            self._wake.clear()
            now = time.monotonic()
            if now >= self.deadline_s:
                self.end_reason = "deadline"
                raise self._too_late()
            if until is not None and now >= until:
                return False
            limit = self.deadline_s if until is None else min(until, self.deadline_s)
            # A timer costs a fraction of asyncio.timeout, and this runs once a token of every stream.
            timer = asyncio.get_running_loop().call_later(limit - now, self._wake.set)
            try:
                await self._wake.wait()
            finally:
                timer.cancel()
        return True

    def bound_unread(self, limit_bytes: int, hang_up: Callable[[], bool]) -> None:
        """Call `hang_up` when more than that waits to be taken, per choice; True means that it did."""
        for choice in self.choices:
            choice.unread_limit_bytes = limit_bytes
            choice.hang_up = hang_up

    def bound_media(self, limits: MediaLimits, params: Sequence[str]) -> None:
        """Fail as soon as the items that were written at `params` are too much, all together."""
        for choice in self.choices:
            choice.totals = MediaTotals(limits, params)

    def take(self) -> list[tuple[int, list[TokenChunk]]]:
        """Return the new chunks by choice; raise the error of a failed one."""
        try:
            return [
                (number, chunks) for number, choice in enumerate(self.choices) if (chunks := choice.take())
            ]
        except DeadlineError:
            self.end_reason = "deadline"
            raise self._too_late() from None  # a worker's clock runs since it got its part
        except Exception:
            self.end_reason = "a part failed"
            raise

    def _too_late(self) -> DeadlineError:
        return DeadlineError(f"the answer was not complete after {self.timeout_s:g} s")


class Dispatcher:
    """Opens exchanges for which there is room. Owns nothing but the table's entries."""

    def __init__(self, fleet: Fleet, table: RequestTable, inbox: str) -> None:
        self._fleet = fleet
        self._table = table
        self._inbox = inbox

    @contextmanager
    def open(
        self,
        request_id: str,
        plans: Sequence[Plan],
        attachments: Sequence[Attachment],
        *,
        timeout_s: float,
        cache_salt: str = "",
        priority: int = 0,
    ) -> Iterator[Exchange]:
        """Send everything out at once; on leaving, end what is not done and give back all room."""
        media_tokens = _media_tokens(attachments)
        exchange = Exchange(timeout_s=timeout_s, deadline_s=time.monotonic() + timeout_s)
        unix_deadline_s = time.time() + timeout_s
        try:
            prefills: dict[int, str] = {}
            for number, plan in enumerate(plans):
                prefill = prefills.get(id(plan.prompt)) or self._fleet.choose("prefill")
                prefills[id(plan.prompt)] = prefill
                live = self._live(
                    exchange,
                    request_id if len(plans) == 1 else f"{request_id}-{number}",
                    plan,
                    attachments,
                    prefill,
                    media_tokens,
                )
                self._send(live, plan, attachments, unix_deadline_s, cache_salt, priority)
            yield exchange
        finally:
            for live in exchange.choices:
                self._table.remove(live)
                live.close(self.abort, exchange.end_reason)

    def _live(
        self,
        exchange: Exchange,
        request_id: str,
        plan: Plan,
        attachments: Sequence[Attachment],
        prefill: str,
        media_tokens: int,
    ) -> LiveRequest:
        """Choose the workers of one choice, count its load and enter it into the table."""
        prompt_tokens = plan.prompt.text_tokens + media_tokens
        output_tokens = prompt_tokens + plan.sampling.max_tokens
        decode = None
        if self._fleet.disaggregated:
            decode = Work(self._fleet.choose("decode"), "decode", output_tokens)
        encoders: dict[int, Work] = {}
        for number, one in enumerate(attachments):
            address = self._fleet.choose_encoder(one.routing_key)
            encoders[number] = Work(address, "encoder", media_cost(one))
        live = LiveRequest(
            request_id=request_id,
            prefill=Work(prefill, "prefill", prompt_tokens if decode else output_tokens),
            decode=decode,
            encoders=encoders,
            wake=exchange.wake,
            release=self._fleet.release,
        )
        for work in live.works():
            self._fleet.take(work.address, work.tokens)
        exchange.choices.append(live)
        self._table.add(live)
        return live

    def _send(
        self,
        live: LiveRequest,
        plan: Plan,
        attachments: Sequence[Attachment],
        deadline_s: float,
        cache_salt: str,
        priority: int,
    ) -> None:
        for number, one in enumerate(attachments):
            address = live.encoders[number].address
            self._send_item(address, live.request_id, number, one, live.prefill.address, deadline_s)
        self._fleet.send(
            live.prefill.address,
            PrefillJob(
                request_id=live.request_id,
                parts=plan.prompt.parts,
                sampling=plan.sampling,
                deadline_s=deadline_s,
                gateway=self._inbox,
                decode=live.decode.address if live.decode else "",
                cache_salt=cache_salt,
                priority=priority,
                grammar=plan.grammar,
            ),
        )

    def _send_item(
        self, address: str, request_id: str, number: int, one: Attachment, taker: str, deadline_s: float
    ) -> None:
        """Send an item to an encoder; `taker` is the inbox that gets its embeddings."""
        item = one.item
        job = EncodeJob(
            request_id=request_id,
            item_index=number,
            param=item.param,
            modality=item.modality,
            routing_key=one.routing_key,
            url=item.url,
            options=item.options,
            deadline_s=deadline_s,
            gateway=self._inbox,
            reply_to=taker,
        )
        self._fleet.send(address, job, () if item.data is None else (item.data,))

    @contextmanager
    def open_embedding(
        self,
        request_id: str,
        one: Attachment,
        *,
        timeout_s: float,
        max_bytes: int,
        limits: MediaLimits,
        grow: Callable[[int], None],
    ) -> Iterator[LiveEmbedding]:
        """Send one item to its encoder, with this gateway as the taker; on leaving give back all room."""
        tokens = media_cost(one)
        work = Work(self._fleet.choose_encoder(one.routing_key), "encoder", tokens)
        live = LiveEmbedding(
            request_id=request_id,
            work=work,
            max_bytes=max_bytes,
            totals=MediaTotals(limits, (one.item.param,)),
            grow=grow,
            release=self._fleet.release,
        )
        self._fleet.take(work.address, work.tokens)
        self._table.add(live)
        try:
            deadline_s = time.time() + timeout_s
            self._send_item(work.address, request_id, 0, one, self._inbox, deadline_s)
            yield live
        finally:
            self._table.remove(live)
            live.close(self.abort)

    def worker_name(self, address: str) -> str:
        """Return what clients see instead of a worker's address."""
        return self._fleet.name(address)

    def abort(self, address: str, message: Abort) -> None:
        """Tell a worker to drop a request. A lost worker needs no telling."""
        try:
            self._fleet.send(address, message)
        except (OverloadedError, StageLostError) as error:
            logger.warning("abort for %s not sent to %s: %s", message.request_id, address, error.message)


def spread_seed(sampling: Sampling, choice: int) -> Sampling:
    """Return the sampling of choice k: its own seed, so that choices differ but repeat."""
    if choice == 0:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + choice) & ((1 << 63) - 1))
