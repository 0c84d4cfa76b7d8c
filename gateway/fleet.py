"""The workers as the gateway sees them: who is ready, who was lost, what each has in work.

Lives on the gateway's event loop. Pings every worker; a loss is reported once per life of a worker.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from transom.errors import TransomError, UnavailableError
from transom.gateway.router import Candidate, choose
from transom.hash_ring import HashRing, pick
from transom.messages import Join, Message, Ping, Pong
from transom.transport import Frame, Transport

logger = logging.getLogger(__name__)

StageName = Literal["encoder", "prefill", "decode"]
STAGES: tuple[StageName, ...] = ("encoder", "prefill", "decode")
_MAX_ENCODERS = 256  # configured and joined
_MAX_WEIGHT = 64
_FORGET_S = 30.0
_MAX_ASKED = 256  # pings of one worker that are remembered


@dataclass(slots=True)
class Worker:
    """`address` is as configured; `peer` is the name under which its messages come in."""

    address: str
    stage: StageName
    peer: str = ""
    ready: bool = False
    incarnation: str = ""
    breaks: int | None = None  # of its connection to us, as this incarnation said last
    last_heard_s: float = -math.inf
    last_used_s: float = -math.inf
    asked: dict[int, float] = field(default_factory=dict)  # pings without an answer, and when they were sent
    told_s: float | None = None  # when it was asked for what it last told
    load: dict[str, float] = field(default_factory=dict)
    own_tokens: int = 0
    own_requests: int = 0
    complained: bool = False
    number: int = 0
    weight: int = 1  # an encoder's ranks
    joined_s: float | None = None  # when it last announced itself; None: it is configured


class Fleet:
    """`on_lost(address, stage, why, gone)` is called when a worker has lost the requests that it may hold.

    Unless it is `gone`, it may hold later ones and can be told to drop them.

    Without a worker of each of the `needed` stages nothing can be served.
    """

    def __init__(
        self,
        transport: Transport,
        addresses: Mapping[StageName, Sequence[str]],
        *,
        on_lost: Callable[[str, StageName, str, bool], None],
        ping_interval_s: float,
        worker_timeout_s: float,
        needed: Sequence[StageName] = STAGES,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._transport = transport
        self._workers = {
            address: Worker(address, stage, number=number)
            for stage in STAGES
            for number, address in enumerate(addresses.get(stage, ()))
        }
        self._by_peer: dict[str, Worker] = {}
        self._ticked_s: float | None = None
        self._on_lost = on_lost
        self._interval_s = ping_interval_s
        self._timeout_s = worker_timeout_s
        self._clock = clock
        self._rng = rng or random.Random()
        self._nonces = 0
        self._ring = HashRing(addresses.get("encoder", ()))
        self._needed = needed

    def __getitem__(self, address: str) -> Worker:
        return self._workers[address]

    def name(self, address: str) -> str:
        """Return what clients see instead of an address: the stage and the worker's number in it."""
        worker = self._workers.get(address)
        return f"{worker.stage}-{worker.number}" if worker else "encoder"  # only those are forgotten

    def peer(self, address: str) -> str:
        """Return the name under which a worker's messages come in."""
        worker = self._workers.get(address)
        return (worker.peer if worker else "") or address

    def workers(self, stage: StageName | None = None) -> list[Worker]:
        """Return the workers of a stage, or all."""
        return [worker for worker in self._workers.values() if stage in (None, worker.stage)]

    def ready(self, stage: StageName) -> list[Worker]:
        """Return the workers that can take work now."""
        return [worker for worker in self.workers(stage) if worker.ready]

    @property
    def disaggregated(self) -> bool:
        """Whether decode workers take over from prefill; without any, prefill workers decode too."""
        return bool(self.workers("decode"))

    def missing(self) -> list[StageName]:
        """Return the needed stages that have no ready worker."""
        return [stage for stage in self._needed if not self.ready(stage)]

    async def run(self) -> None:
        """Ping until cancelled."""
        while True:
            try:
                self.tick()
            except Exception:  # without pings no loss would be noticed any more
                logger.exception("a round of pings failed")
            await asyncio.sleep(self._interval_s)

    def tick(self) -> None:
        """Ask every worker for its load; give up those that have been silent for too long."""
        now = self._clock()
        self._excuse(now)
        self._forget_gone(now)
        for worker in self._workers.values():
            if worker.ready and now - worker.last_heard_s > self._timeout_s:
                self._lose(worker, f"it has not answered for {self._timeout_s:g} s")
            self._nonces += 1
            worker.asked[self._nonces] = now
            if len(worker.asked) > _MAX_ASKED:
                del worker.asked[next(iter(worker.asked))]
            try:
                self._transport.send(
                    worker.address, Ping(reply_to=self._transport.address, nonce=self._nonces)
                )
            except TransomError as error:
                logger.debug("can't ping %s: %s", worker.address, error.message)

    def _excuse(self, now: float) -> None:
        """Leave out of every worker's silence the time in which this process stood still and heard nobody.

        A machine that was frozen for a while wakes up with all its workers, and loses no request.
        """
        stood_s = 0.0 if self._ticked_s is None else now - self._ticked_s - self._interval_s
        if stood_s > self._interval_s:
            for worker in self._workers.values():
                worker.last_heard_s = min(now, worker.last_heard_s + stood_s)
        self._ticked_s = now

    def pong(self, peer: str, pong: Pong) -> None:
        """Take a worker's answer."""
        worker = next(
            (one for one in self._workers.values() if peer in (one.address, one.peer)), None
        ) or next((one for one in self._workers.values() if pong.nonce in one.asked), None)
        if worker is None:
            logger.warning("a pong from %s, which is no worker of ours", peer)
            return
        if pong.stage != worker.stage:
            if not worker.complained:
                logger.error("%s is set as %s, but calls itself %s", worker.address, worker.stage, pong.stage)
            worker.complained = True
            return
        if worker.incarnation and worker.incarnation != pong.incarnation:
            self._lose(worker, "it was restarted")
        if worker.breaks is not None and pong.breaks > worker.breaks:
            # It took us for lost, and what it had to say to us is lost.
            logger.warning("%s at %s has lost its connection to us", worker.stage, worker.address)
            self._on_lost(worker.address, worker.stage, "its connection to the gateway ended", False)
        if pong.ready and not worker.ready:
            logger.info("%s at %s is ready", worker.stage, worker.address)
        self._by_peer.pop(worker.peer, None)
        self._by_peer[peer] = worker
        worker.peer = peer
        worker.incarnation = pong.incarnation
        worker.breaks = pong.breaks
        worker.ready = pong.ready
        worker.load = pong.load
        self._date(worker, pong.nonce)
        worker.last_heard_s = self._clock()
        worker.complained = False
        if worker.stage == "encoder":
            self._weigh(worker, pong.load.get("ranks", 1.0))

    def _date(self, worker: Worker, nonce: int) -> None:
        """Note when a worker was asked for what it tells now; it answers in the order of the questions."""
        asked_s = worker.asked.get(nonce)
        if asked_s is not None:
            worker.told_s = asked_s
            worker.asked = {one: when for one, when in worker.asked.items() if one > nonce}

    def age_s(self, worker: Worker) -> float | None:
        """Return how old a worker's figures may be: since it was asked. None before it told any."""
        return None if worker.told_s is None else self._clock() - worker.told_s

    def heard(self, peer: str) -> None:
        """Take any message of a worker for a sign of life: behind many others its pong may be late."""
        worker = self._by_peer.get(peer)
        if worker is not None:
            worker.last_heard_s = self._clock()

    def _weigh(self, worker: Worker, ranks: float) -> None:
        weight = int(ranks) if 1 <= ranks <= _MAX_WEIGHT else 1
        if weight != worker.weight:
            worker.weight = weight
            self._rebuild_ring()

    def _rebuild_ring(self) -> None:
        self._ring = HashRing({one.address: one.weight for one in self.workers("encoder")})

    def join(self, message: Join) -> None:
        """Take in an encoder that announces itself, or take leave of one."""
        worker = self._workers.get(message.address)
        if worker is not None and (worker.stage != "encoder" or worker.joined_s is None):
            return  # it is configured: nothing that it says adds to that
        if message.leaving:
            if worker is not None:
                # What it has in work it still finishes; it gets nothing new.
                worker.ready = False
                worker.joined_s = -math.inf
            return
        if worker is None:
            encoders = self.workers("encoder")
            if len(encoders) >= _MAX_ENCODERS:
                logger.warning("%s is not taken: there are %d encoders", message.address, len(encoders))
                return
            number = max((one.number for one in encoders), default=-1) + 1
            worker = self._workers[message.address] = Worker(message.address, "encoder", number=number)
            self._rebuild_ring()
            logger.info("encoder at %s has joined", message.address)
        worker.joined_s = self._clock()

    def _forget_gone(self, now: float) -> None:
        """Drop joined encoders that have not been heard of for long and hold nothing."""
        gone = [
            one
            for one in self._workers.values()
            if one.joined_s is not None and now - one.joined_s > _FORGET_S
            and now - one.last_heard_s > _FORGET_S and not one.own_requests
        ]  # fmt: skip
        for worker in gone:
            if worker.incarnation:
                self._lose(worker, "it has left")
            logger.info("encoder at %s is forgotten", worker.address)
            self._by_peer.pop(worker.peer, None)
            del self._workers[worker.address]
        if gone:
            self._rebuild_ring()

    def lost(self, address: str, why: str) -> None:
        """Take note that the connection to a worker has ended."""
        worker = self._workers.get(address)
        if worker is not None and (worker.ready or worker.incarnation):
            self._lose(worker, why)

    def _lose(self, worker: Worker, why: str) -> None:
        logger.warning("%s at %s is lost: %s", worker.stage, worker.address, why)
        worker.ready = False
        worker.incarnation = ""
        worker.breaks = None
        worker.load = {}
        self._on_lost(worker.address, worker.stage, why, True)

    def choose(self, stage: StageName) -> str:
        """Return the worker that should take the next request; raise UnavailableError when there is none."""
        address = choose(
            (
                Candidate(one.address, one.own_tokens, one.load.get("tokens", 0.0), one.last_used_s)
                for one in self.ready(stage)
            ),
            self._rng,
        )
        if address is None:
            raise UnavailableError(f"no {stage} worker is ready", retry_after_s=1)
        return address

    def choose_encoder(self, routing_key: str) -> str:
        """Return the encoder for a media item: the ring's owner of its key unless that is overloaded."""
        ready = self.ready("encoder")
        load = {one.address: float(one.own_requests) for one in ready}
        weights = {one.address: one.weight for one in ready}
        address = pick(self._ring.order(routing_key), load, weights=weights)
        if address is None:
            raise UnavailableError("no encoder is ready", retry_after_s=1)
        return address

    def take(self, address: str, tokens: int) -> None:
        """Count work given to a worker."""
        worker = self._workers[address]
        worker.own_tokens += tokens
        worker.own_requests += 1
        worker.last_used_s = self._clock()

    def release(self, address: str, tokens: int) -> None:
        """Count the end of work that was given by `take`."""
        worker = self._workers[address]
        worker.own_tokens -= tokens
        worker.own_requests -= 1

    def send(self, address: str, message: Message, frames: Sequence[Frame] = ()) -> None:
        """Send to a worker; raise OverloadedError when its queue is full."""
        self._transport.send(address, message, frames)

    def check_integrity(self) -> None:
        """Assert that no counter went below zero."""
        for worker in self._workers.values():
            assert worker.own_tokens >= 0, worker
            assert worker.own_requests >= 0, worker
