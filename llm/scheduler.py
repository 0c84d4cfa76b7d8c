"""Decides what an engine computes next: a pure function of plain data, the same in server, tests, simulator.

Knows no torch, no clock of its own and no pools: only page counts. In what order is for transom.llm.policies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transom.llm.waits import Wait, WaitReason


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request as the policy sees it.

    `stored_len` tokens have KV: in the pools when it has pages there, else in host memory. `known_len` counts
    all tokens known so far, `ready_len` those that could be computed now. Of a running request `full_pages`
    and `swa_pages` are what its retraction gives back; those of a waiting one are cached pages that count as
    free until its admission. `shared_pages` are cached pages which others keep in use anyway. `shares` names
    other prompts in work with the number of leading tokens in common that a cache could hand on.
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
    deadline_s: float = float("inf")
    shares: tuple[tuple[str, int], ...] = ()

    @property
    def table_pages(self) -> int:
        """Full pages that it need not get any more."""
        return self.full_pages + self.shared_pages


# One part in nine of a step is for ends of prompts and decoding requests only: a prompt a little longer than
# a chunk gets its first token now and not a step later, for a handful of tokens.
_TAIL_PART = 9


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step may use, and how positions become pages."""

    batch_tokens: int
    running_requests: int
    page_size: int
    window: int

    @property
    def tail_tokens(self) -> int:
        """Tokens of a step that are left free by chunks which do not finish a prompt."""
        return self.batch_tokens // _TAIL_PART


@dataclass(frozen=True, slots=True)
class FreePages:
    """Pages to be had in each pool: free ones, and those that a cache gives up on demand."""

    full: int
    swa: int


@dataclass(frozen=True, slots=True)
class Follow:
    """A request that is not computed because `leader` is about to compute `tokens` tokens of its prompt."""

    leader: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, to be done in this order: retract, admit, compute `steps` (request id -> tokens)."""

    retract: tuple[str, ...]
    admit: tuple[str, ...]
    steps: dict[str, int]
    waiting: Wait | None  # why the next request in line is not admitted; None when none waits
    follows: dict[str, Follow]

    @property
    def waiting_reason(self) -> str:
        """`waiting` in words; "" when none waits."""
        return self.waiting.text if self.waiting else ""


Order = Callable[[Sequence[RequestView], float], list[RequestView]]


def plan_step(
    running: Sequence[RequestView],
    waiting: Sequence[RequestView],
    free: FreePages,
    limits: Limits,
    *,
    now_s: float,
    order: Order,
    hold: str = "",
) -> Plan:
    """Plan the next step: decoding requests first, then prompts in `order`, running or not.

    When pages run out the last in order are retracted; for a request of higher priority also when it would
    have to wait. As long as each request alone fits the pools, the first in order always advances, hence so
    does everyone in the end. `hold` is a reason to admit nobody.
    """
    step = _Step(order(running, now_s), free, limits)
    line = [view for view in order(waiting, now_s) if view.ready_len > 0]
    if line and not hold:
        step.make_way(line[0])
    step.decode()
    wait = Wait(WaitReason.HOST_MEMORY, hold) if hold else None
    if step.ran_out:
        wait = wait or Wait(step.short_of, f"pages ran out: {len(step.retracted)} requests were retracted")
    prompts = [v for v in step.alive if not v.decoding and v.ready_len > 0]
    wait = step.walk(order([*prompts, *line], now_s), wait)
    if not step.tokens and prompts:
        step.free_the_first(prompts)
    elif not step.tokens and line and step.alive and not hold and not step.retracted:
        # Requests that wait for embeddings hold the pages which the first in line needs now.
        step.retract_last()
    return Plan(
        tuple(step.retracted),
        tuple(step.admitted),
        step.tokens,
        wait if len(step.admitted) < len(line) else None,
        step.follows,
    )


class _Step:
    """A step under construction: what is left of pages and budget."""

    def __init__(self, running: list[RequestView], free: FreePages, limits: Limits) -> None:
        self.alive = running  # first in order first
        self.full, self.swa = free.full, free.swa
        self.budget = limits.batch_tokens
        self.limits = limits
        self.claimed = 0
        self.tokens: dict[str, int] = {}
        self.retracted: list[str] = []
        self.admitted: list[str] = []
        self.follows: dict[str, Follow] = {}
        self.ran_out = False
        self.short_of = WaitReason.FULL_POOL  # the pool for which requests were retracted
        self._computing: dict[str, RequestView] = {}  # prompts that advance in this step

    def make_way(self, view: RequestView) -> None:
        """Retract requests of lower priority, the last in order first, if that lets `view` in."""
        self.claimed = sum(self._claim(v) for v in self.alive)
        lower = [v for v in self.alive if v.priority < view.priority]
        lack = self._lacks(view)
        if not lower or lack is None:
            return
        full, swa, alive, retracted = self.full, self.swa, list(self.alive), list(self.retracted)
        for victim in reversed(lower):
            self._retract(victim)
            self.claimed -= self._claim(victim)
            if self._lacks(view) is None:
                self.short_of = lack.reason
                return
        self.full, self.swa, self.alive, self.retracted = full, swa, alive, retracted

    def decode(self) -> None:
        """One token for each decoding request; when pages run out the last in order make room."""
        for view in [v for v in self.alive if v.decoding and v.ready_len > 0]:
            if not self._room:
                return
            while view in self.alive and (short_of := self._short_of(view, 1)):
                self._retract(next(v for v in reversed(self.alive) if v.request_id not in self.tokens))
                self.ran_out, self.short_of = True, short_of
            if view in self.alive:
                self._take(view, 1)

    def walk(self, prompts: Sequence[RequestView], wait: Wait | None) -> Wait | None:
        """Spend the rest of the budget on prompts in order, admitting those in line until one does not fit.

        `wait` is why nobody may be admitted; return why one was not.
        """
        # Running prompts keep a claim on the pages they still need, and each decoding request on one more:
        # otherwise what is admitted now is retracted soon after.
        self.claimed = sum(self._claim(v) for v in self.alive)
        running = {view.request_id for view in self.alive}
        followed: Wait | None = None
        for view in prompts:
            if (follow := self._leader_of(view)) is not None:
                self.follows[view.request_id] = follow
                text = f"{follow.leader} is computing {follow.tokens} tokens that it shares"
                followed = followed or Wait(WaitReason.SHARED_PROMPT, text)
            elif view.request_id not in running:
                wait = wait or self._admit(view)
            elif self._room:
                count = self._affordable(view)
                self.claimed -= self._need(view, count)[0] if count else 0
                self._compute(view, count)
        return wait or followed

    def free_the_first(self, prompts: Sequence[RequestView]) -> None:
        """All pages are held by prompts that can't go on: the first one gets those of the last ones."""
        head = prompts[0]
        while not self._affordable(head) and len(self.alive) > 1:
            self._retract(next(v for v in reversed(self.alive) if v is not head))
        self._take(head, self._affordable(head))

    def retract_last(self) -> None:
        self._retract(self.alive[-1])

    def _leader_of(self, view: RequestView) -> Follow | None:
        """Return whom to wait for: a prompt of this step that will compute what `view` lacks.

        Less than a window, such as the head of a chat template, is not worth a step's wait.
        """
        for other, tokens in view.shares:
            leader = self._computing.get(other)
            if (
                leader is not None
                and view.stored_len <= leader.stored_len < tokens
                and tokens >= max(self.limits.window, view.stored_len + self.limits.page_size)
            ):
                return Follow(other, tokens)
        return None

    def _admit(self, view: RequestView) -> Wait | None:
        """Take a request into the step; return why not."""
        running, most = len(self.tokens), self.limits.running_requests
        if running >= most:
            return Wait(WaitReason.RUNNING_REQUESTS, f"{running} of {most} requests are running")
        if self._allowance(view) <= 0:
            return Wait(WaitReason.BATCH_TOKENS, f"the step's {self.limits.batch_tokens} tokens are spent")
        if self.retracted and view.shared_pages:
            # Those may have kept its cached pages in use, which would count as free now, and as its own.
            text = f"{len(self.retracted)} requests were retracted that may have shared its pages"
            return Wait(self.short_of, text)
        if (lack := self._lacks(view)) is not None:
            return lack
        wanted = self._wanted(view)
        self._occupy(view, 1)
        count = self._first_count(view)
        self.claimed += wanted - self._need(view, count)[0] + int(view.decoding)
        self.admitted.append(view.request_id)
        self._compute(view, count)
        return None

    def _lacks(self, view: RequestView) -> Wait | None:
        """Say which pages a waiting request would need and can't have; None when it fits."""
        claimed = self.claimed if self.alive or self.admitted else 0
        spare = self.full - claimed - view.full_pages
        wanted = self._wanted(view)
        if wanted > spare:
            return Wait(WaitReason.FULL_POOL, f"full pool: {wanted} pages wanted, {max(spare, 0)} spare")
        self._occupy(view, 1)
        count = self._first_count(view)
        fits = count > 0 and self._short_of(view, count) is None
        self._occupy(view, -1)
        if fits:
            return None
        swa = self._need(view, 1)[1] + view.swa_pages
        return Wait(WaitReason.SWA_POOL, f"SWA pool: {swa} pages wanted, {self.swa} free")

    def _wanted(self, view: RequestView) -> int:
        return self._pages(max(view.known_len, view.stored_len + 1)) - view.table_pages

    def _first_count(self, view: RequestView) -> int:
        return 1 if view.stored_len and not view.table_pages else self._affordable(view)

    def _compute(self, view: RequestView, count: int) -> None:
        if count > 0:
            self._take(view, count)
            self._computing[view.request_id] = view

    @property
    def _room(self) -> bool:
        return self.budget > 0 and len(self.tokens) < self.limits.running_requests

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

    def _short_of(self, view: RequestView, count: int) -> WaitReason | None:
        """Return the pool that lacks the pages for `count` further tokens; None when both have them."""
        full, swa = self._need(view, count)
        if full > self.full:
            return WaitReason.FULL_POOL
        return WaitReason.SWA_POOL if swa > self.swa else None

    def _affordable(self, view: RequestView) -> int:
        """Return how many of the request's ready tokens budget and free pages allow."""
        slots = (view.table_pages + min(self.full, self.swa)) * self.limits.page_size - view.stored_len
        return max(0, min(view.ready_len, self._allowance(view), slots))

    def _allowance(self, view: RequestView) -> int:
        """Return how many of its tokens the budget allows: the whole of it only to finish the prompt."""
        finishes = view.stored_len + view.ready_len >= view.known_len and view.ready_len <= self.budget
        return self.budget if finishes else self.budget - self.limits.tail_tokens

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
