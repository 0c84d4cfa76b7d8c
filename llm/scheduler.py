"""Decides what an engine computes next: pure functions over plain data, the same in server, tests, simulator.

Knows no torch, no clock of its own and no pools: only page counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request as the policy sees it.

    `stored_len` tokens have KV: in the pools when it has pages there, else in host memory. `known_len` counts
    all tokens known so far, `ready_len` those that could be computed now. Of a running request `full_pages`
    and `swa_pages` are what its retraction gives back; those of a waiting one are cached pages that count as
    free until its admission. `shared_pages` are cached pages which others keep in use anyway.
    """

    request_id: str
    arrived_s: float
    priority: int
    stored_len: int
    known_len: int
    ready_len: int
    decoding: bool
    full_pages: int
    swa_pages: int
    shared_pages: int = 0

    @property
    def table_pages(self) -> int:
        """Full pages that it need not get any more."""
        return self.full_pages + self.shared_pages


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step may use, and how positions become pages."""

    batch_tokens: int
    running_requests: int
    page_size: int
    window: int


@dataclass(frozen=True, slots=True)
class FreePages:
    """Pages to be had in each pool: free ones, and those that a cache gives up on demand."""

    full: int
    swa: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, to be done in this order: retract, admit, compute `steps` (request id -> tokens)."""

    retract: tuple[str, ...]
    admit: tuple[str, ...]
    steps: dict[str, int]
    waiting_reason: str  # why the next request in line is not admitted; "" when none waits


Order = Callable[[Sequence[RequestView], float], list[RequestView]]


def first_come_first_served(views: Sequence[RequestView], now_s: float) -> list[RequestView]:
    """Return `views` with the higher priority first, then the older."""
    return sorted(views, key=lambda view: (-view.priority, view.arrived_s))


def plan_step(
    running: Sequence[RequestView],
    waiting: Sequence[RequestView],
    free: FreePages,
    limits: Limits,
    *,
    now_s: float,
    hold: str = "",
    order: Order = first_come_first_served,
) -> Plan:
    """Plan the next step; running requests come before waiting ones, decoding before prefill.

    When pages run out the last in order are retracted. As long as each request alone fits the pools, the
    first in order always advances, hence so does everyone in the end. `hold` is a reason to admit nobody.
    """
    step = _Step(order(running, now_s), free, limits)
    step.decode()
    step.prefill()
    line = [view for view in order(waiting, now_s) if view.ready_len > 0]
    reason = hold
    if step.retracted:
        reason = reason or f"pages ran out: {len(step.retracted)} requests were retracted"
    if not reason:
        reason = step.admit(line)
        if reason and step.idle:
            # Requests that wait for embeddings hold the pages which this one needs now.
            step.retract_last()
    return Plan(tuple(step.retracted), tuple(step.admitted), step.tokens, reason if line else "")


class _Step:
    """A step under construction: what is left of pages and budget."""

    def __init__(self, running: list[RequestView], free: FreePages, limits: Limits) -> None:
        self.alive = running  # first in order first
        self.full, self.swa = free.full, free.swa
        self.budget = limits.batch_tokens
        self.limits = limits
        self.tokens: dict[str, int] = {}
        self.retracted: list[str] = []
        self.admitted: list[str] = []

    def decode(self) -> None:
        """One token for each decoding request; when pages run out the last in order make room."""
        for view in [v for v in self.alive if v.decoding]:
            if not self._room:
                return
            while view in self.alive and not self._fits(view, 1):
                self._retract(next(v for v in reversed(self.alive) if v.request_id not in self.tokens))
            if view in self.alive:
                self._take(view, 1)

    def prefill(self) -> None:
        """Spend the rest of the budget on prompts that are under way."""
        ready = [v for v in self.alive if not v.decoding and v.ready_len > 0]
        for view in ready:
            if self._room:
                self._take(view, self._affordable(view))
        if ready and not self.tokens:
            # All pages are held by prompts that can't go on: the first one gets those of the last ones.
            head = ready[0]
            while not self._affordable(head) and len(self.alive) > 1:
                self._retract(next(v for v in reversed(self.alive) if v is not head))
            self._take(head, self._affordable(head))

    def admit(self, line: Sequence[RequestView]) -> str:
        """Take requests into the step in order until one does not fit; return why not."""
        active = sum(v.decoding or v.ready_len > 0 for v in self.alive)
        # Running prompts keep a claim on the pages they still need, and each decoding request on one more:
        # otherwise what is admitted now is retracted soon after.
        claimed = sum(self._claim(v) for v in self.alive)
        for view in line:
            if active >= self.limits.running_requests:
                return f"{active} of {self.limits.running_requests} requests are running"
            if self.budget <= 0:
                return f"the step's {self.limits.batch_tokens} tokens are spent"
            spare = self.full - (claimed if self.alive or self.admitted else 0) - view.full_pages
            wanted = self._pages(max(view.known_len, view.stored_len + 1)) - view.table_pages
            if wanted > spare:
                return f"full pool: {wanted} pages wanted, {max(spare, 0)} spare"
            self._occupy(view, 1)
            count = 1 if view.stored_len and not view.table_pages else self._affordable(view)
            if not count or not self._fits(view, count):
                self._occupy(view, -1)
                need = self._need(view, 1)[1] + view.swa_pages
                return f"SWA pool: {need} pages wanted, {self.swa} free"
            self.admitted.append(view.request_id)
            active += 1
            self._take(view, count)
            claimed += wanted - self._need(view, count)[0] + int(view.decoding)
        return ""

    @property
    def _room(self) -> bool:
        return self.budget > 0 and len(self.tokens) < self.limits.running_requests

    @property
    def idle(self) -> bool:
        """Nothing can be computed although requests hold pages."""
        return not self.tokens and bool(self.alive)

    def retract_last(self) -> None:
        self._retract(self.alive[-1])

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.limits.page_size)

    def _need(self, view: RequestView, count: int) -> tuple[int, int]:
        """Return the pages (full, SWA) that `count` further tokens take."""
        end = self._pages(view.stored_len + count)
        full = end - view.table_pages
        if view.table_pages or not view.stored_len:
            return full, full
        # Coming back from host memory: SWA pages for the live window only.
        first_live = max(view.stored_len - self.limits.window + 1, 0) // self.limits.page_size
        return full, end - first_live

    def _claim(self, view: RequestView) -> int:
        if view.decoding:
            return 1
        taken = self.tokens.get(view.request_id, 0)
        return self._pages(view.known_len) - max(view.table_pages, self._pages(view.stored_len + taken))

    def _fits(self, view: RequestView, count: int) -> bool:
        full, swa = self._need(view, count)
        return full <= self.full and swa <= self.swa

    def _affordable(self, view: RequestView) -> int:
        """Return how many of the request's ready tokens budget and free pages allow."""
        slots = (view.table_pages + min(self.full, self.swa)) * self.limits.page_size - view.stored_len
        return max(0, min(view.ready_len, self.budget, slots))

    def _take(self, view: RequestView, count: int) -> None:
        if count <= 0:
            return
        full, swa = self._need(view, count)
        self.full -= full
        self.swa -= swa
        self.budget -= count
        self.tokens[view.request_id] = count

    def _retract(self, view: RequestView) -> None:
        self.alive.remove(view)
        self.retracted.append(view.request_id)
        self._occupy(view, -1)

    def _occupy(self, view: RequestView, sign: int) -> None:
        self.full -= sign * view.full_pages
        self.swa -= sign * view.swa_pages
