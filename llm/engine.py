"""The engine: one thread that batches requests through the model over the paged pools.

The same core serves prefill workers (requests that hand off), decode workers (requests that arrive with KV)
and both at once. Knows no sockets: commands come in by `submit`, events leave by one callback a step.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from transom.errors import DeadlineError, TransomError
from transom.llm.decode_graphs import DecodeGraphs
from transom.llm.flight import Flight, Runway
from transom.llm.holdings import Holdings
from transom.llm.intake import Intake
from transom.llm.meter import Meter
from transom.llm.model.causal_lm import CausalLM
from transom.llm.model.fused import FusedModel
from transom.llm.output import finish_reason, timings_ms, token_event
from transom.llm.pools import DualPools
from transom.llm.prefix_cache import PrefixCache
from transom.llm.request import (
    Command,
    Drop,
    Event,
    FailedEvent,
    Hold,
    KeepAnswer,
    Request,
    Start,
    StartedEvent,
)
from transom.llm.runner import ModelRunner, Step, make_current, pages_of
from transom.llm.sampler import Draw
from transom.llm.scheduler import Limits, Order, Plan, plan_step
from transom.llm.views import look
from transom.llm.waits import count_waits
from transom.messages import FinishReason

logger = logging.getLogger(__name__)


class _Signal(Enum):
    LANDED = "a flight has ended"
    STOP = "end the thread"


@dataclass(frozen=True)
class EngineLimits:
    """Bounds of one engine. `context_len` counts prompt and output; the pools may lower it.

    With `overlap` a step is planned while the one before is computed.
    """

    batch_tokens: int
    running_requests: int
    context_len: int
    swa_release_interval: int
    overlap: bool = False


# A lock takes no infinite timeout, which is what a request without deadline asks for.
_LONGEST_WAIT_S = 3600.0


class Engine:
    """Owns model, pools and requests.

    Only `submit`, `load`, `context_len` and `waiting_reason` may be used by other threads; `step` belongs to
    whoever drives the engine: its own thread after `start`, the caller without it.
    """

    def __init__(
        self,
        model: CausalLM | FusedModel,
        pools: DualPools,
        limits: EngineLimits,
        emit: Callable[[list[Event]], None],
        *,
        order: Order,
        cache: PrefixCache | None = None,
        graphs: DecodeGraphs | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.context_len = min(limits.context_len, pools.full_pages.capacity * pools.page_size)
        self.waiting_reason = ""  # why the next request in line is not running; "" when none waits
        self._waits = count_waits(0, 0, 0, None)
        self._hold = ""
        self._device = pools.device
        self._intake = Intake(model.config, pools.device, self.context_len)
        self._eos_ids = model.config.eos_token_ids
        self._runner = ModelRunner(model, pools, graphs)
        self._runway = Runway(self._runner, pools.device, self._wake, overlap=limits.overlap)
        self._flights: deque[Flight] = deque()  # launched; two at most, and one between steps
        self._cache = cache
        self._holdings = Holdings(pools, cache, limits.swa_release_interval)
        self._order = order
        self._limits = limits
        most = min(limits.running_requests, limits.batch_tokens)
        self._policy_limits = Limits(limits.batch_tokens, most, pools.page_size, pools.kept)
        self._emit = emit
        self._clock = clock
        self._commands: queue.SimpleQueue[Command | _Signal] = queue.SimpleQueue()
        self._stopped = False
        self._requests: dict[str, Request] = {}  # all of them
        self._running: dict[str, Request] = {}  # those with pages
        self._events: list[Event] = []
        self._next_deadline_s = float("inf")
        self._leaving: list[tuple[Request, FinishReason | None]] = []
        self._meter = Meter()
        self._busy = False
        self._checked = True
        self._thread: threading.Thread | None = None

    # The loop: everything that happens in a step, in order.

    def step(self, wait_s: float | None = 0.0) -> bool:
        """Do one step; wait up to `wait_s` (None: as long as it takes) for work if there was none.

        Return False once `stop` was called.
        """
        if not self._take_commands(wait_s):
            return False
        begin = time.perf_counter()
        self._expire()
        plan = self._plan_ahead()
        for request_id in plan.retract:
            self._retract(self._requests[request_id])
        # What a prompt will reuse is pinned before the KV of others needs room.
        for request in sorted(
            map(self._requests.__getitem__, plan.admit), key=lambda r: r.host_kv is not None
        ):
            self._admit(request)
        self._launch([self._make_step(name, count) for name, count in plan.steps.items()])
        self._land(leave=1 if plan.steps and self._limits.overlap else 0)
        if self._busy:
            self._meter.step_s += time.perf_counter() - begin
        self._check_when_idle()
        self._publish()
        return True

    def start(self, on_fatal: Callable[[BaseException], None]) -> None:
        """Run the loop in a thread of its own; `on_fatal` is called there if it ends by an error."""

        def run() -> None:
            try:
                make_current(self._device)
                while self.step(wait_s=None):
                    pass
            except BaseException as error:
                logger.exception("the engine stops")
                on_fatal(error)

        self._thread = threading.Thread(target=run, name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current step; blocks until it has ended."""
        self._commands.put(_Signal.STOP)
        if self._thread is not None:
            self._thread.join()
        self._runway.close()

    def _wake(self) -> None:
        self._commands.put(_Signal.LANDED)

    def submit(self, command: Command) -> None:
        """Hand over a command; thread-safe, never blocks."""
        self._commands.put(command)

    @property
    def tokens_per_s(self) -> float:
        """What the model has computed in a second of its time so far, 1 at least."""
        return self._meter.tokens_per_s

    def load(self) -> dict[str, float]:
        """Return figures of the current load; thread-safe, each figure true at some recent moment.

        Used slots are those that requests keep: cached ones that could be evicted count as free.
        """
        requests, running = len(self._requests), len(self._running)
        return {
            "running_requests": running,
            "waiting_requests": max(requests - running, 0),
            **self._waits,
            **self._meter.figures(),
            **self._holdings.figures(),
            **self._runner.figures(),
        }

    # Commands and deadlines.

    def _take_commands(self, wait_s: float | None) -> bool:
        """Apply all commands that are there; without work, wait for the first one or a deadline.

        Return False once `stop` was called.
        """
        if self._stopped:
            return False
        patience = wait_s
        if self._busy or self._flights:
            patience = 0.0
        elif self._requests:
            until_deadline = min(max(self._next_deadline_s - self._clock(), 0.0), _LONGEST_WAIT_S)
            patience = until_deadline if patience is None else min(patience, until_deadline)
        try:
            while True:
                command = (
                    self._commands.get(timeout=patience) if patience != 0.0 else self._commands.get_nowait()
                )
                self._apply(command)
                patience = 0.0
        except queue.Empty:
            return not self._stopped

    def _await(self, flight: Flight) -> None:
        """Wait until the flight has landed, taking commands as they come."""
        while not flight.landed:
            self._apply(self._commands.get())
            if self._cache is not None and self._commands.empty():
                for request in self._requests.values():
                    if request.request_id not in self._running:
                        self._cache.prepare(request)

    def _apply(self, command: Command | _Signal) -> None:
        if isinstance(command, _Signal):
            self._stopped |= command is _Signal.STOP
            return
        if isinstance(command, Start):
            request = command.request
            self._requests[request.request_id] = request
            self._next_deadline_s = min(self._next_deadline_s, request.deadline_s)
            self._guarded(request, self._intake.take)
            return
        if isinstance(command, Hold):
            self._hold = command.reason
            return
        if isinstance(command, KeepAnswer):
            if self._cache is not None:
                self._cache.keep_answer(command.request_id, command.output_ids, command.host_kv)
                self._checked = False
            return
        request_id = command.request_id
        known = self._requests.get(request_id)
        if known is None:
            return
        if isinstance(command, Drop):
            self._forget(known)
        else:
            known.complete_s = self._clock()
            self._guarded(known, self._intake.grow, command)

    def _guarded(self, request: Request, act: Callable[..., None], *args: object) -> None:
        try:
            act(request, *args)
        except TransomError as error:
            self._fail(request, error)

    def _expire(self) -> None:
        now = self._clock()
        if now < self._next_deadline_s:
            return
        for request in [r for r in self._requests.values() if r.deadline_s <= now]:
            self._fail(request, DeadlineError(f"the deadline passed after {now - request.arrived_s:.1f} s"))
        self._next_deadline_s = min((r.deadline_s for r in self._requests.values()), default=float("inf"))

    # Scheduling.

    def _plan_ahead(self) -> Plan:
        """Plan the next step; first land the one in flight if it decides what the next one is."""
        flying = bool(self._flights)
        if flying and not self._flights[0].foreseeable:
            self._land()
        plan = self._plan()
        if self._flights and plan.retract:
            # What leaves is what has landed, and perhaps some request is about to end.
            self._land()
            plan = self._plan()
        self._busy = bool(plan.steps or plan.retract or flying)
        return plan

    def _plan(self) -> Plan:
        if not self._requests:
            nothing = Plan((), (), {}, None, {})
            self._note_waits(nothing)
            return nothing
        now = self._clock()
        most = self._policy_limits.running_requests
        plan = plan_step(
            *look(self._requests, self._running, self._cache, self._order, most, now),
            self._holdings.free_pages,
            self._policy_limits,
            now_s=now,
            order=self._order,
            hold=self._hold,
        )
        if self._cache is not None:
            self._cache.follow(plan.follows, self._requests)
        self._note_waits(plan)
        return plan

    def _note_waits(self, plan: Plan) -> None:
        """Keep for `load` why those wait that the plan does not admit."""
        waiting = [r for r in self._requests.values() if r.request_id not in self._running]
        unready = sum(not r.ready_len for r in waiting)
        following = sum(name not in self._running for name in plan.follows)
        self._waits = count_waits(len(waiting) - len(plan.admit), unready, following, plan.waiting)
        if plan.waiting_reason != self.waiting_reason:
            self.waiting_reason = plan.waiting_reason
            logger.debug("waiting: %s", plan.waiting_reason or "nobody")

    def _admit(self, request: Request) -> None:
        starts = request.host_kv is not None
        self._holdings.give_first(request)
        if starts:
            self._events.append(StartedEvent(request.request_id))
        request.admitted_s = request.admitted_s or self._clock()
        self._running[request.request_id] = request

    def _retract(self, request: Request) -> None:
        logger.debug("retracting %s at %d tokens", request.request_id, request.computed)
        self._holdings.retract(request)
        self._meter.retractions += 1
        self._running.pop(request.request_id)

    # Computing.

    def _make_step(self, request_id: str, count: int) -> Step:
        request = self._requests[request_id]
        begin = request.computed + request.flying
        end = begin + count
        self._holdings.extend(request, end)
        samples = request.prompt_complete and end == request.known_len + request.flying
        return Step(request, begin, count, samples, request.decoding, not request.prompt_complete)

    def _launch(self, steps: Sequence[Step]) -> None:
        if not steps:
            return
        self._flights.append(self._runway.launch(steps, self._flights[-1] if self._flights else None))
        for step in steps:
            step.request.flying += step.count

    def _land(self, leave: int = 0) -> None:
        """Wait for the flights but the last `leave`, and take note of what they did.

        Once all requests have left the last flight is nobody's any more, and is waited for as well.
        """
        while len(self._flights) > (leave if self._requests else 0):
            flight = self._flights[0]
            self._await(flight)
            self._flights.popleft()
            try:
                draws = flight.draws()
            except Exception as error:
                self._isolate(flight, error)
                continue
            self._meter.landed(flight)
            for step in flight.steps:
                if self._is_wanted(step):
                    self._advance(step, draws.get(step.request))
            # Copying KV out takes a while, and the tokens of others shall not wait for it.
            self._publish()
            self._let_leave()

    def _isolate(self, flight: Flight, error: Exception) -> None:
        """Compute the requests of a batch that failed one by one, so that only the culprit fails."""
        behind = self._flights.popleft() if self._flights else None
        wanted = [step for step in flight.steps if self._is_wanted(step)]
        if behind is not None:
            # It has read what was not written. Waiting for it comes first: it must not write any more.
            self._await(behind)
            wanted_behind = [step for step in behind.steps if self._is_wanted(step)]
        if len(flight.steps) == 1:
            for step in wanted:
                logger.error("request %s failed", step.request.request_id, exc_info=error)
                self._fail(step.request, TransomError(f"computing the request failed: {error}"))
        else:
            logger.warning("a batch of %d requests failed (%s); trying each alone", len(flight.steps), error)
            for step in wanted:
                self._launch([step])
                self._land()
        if behind is not None:
            self._launch([step for step in wanted_behind if self._has(step.request)])

    def _has(self, request: Request) -> bool:
        return self._requests.get(request.request_id) is request

    def _is_wanted(self, step: Step) -> bool:
        """Take note that a step has ended; if its request has left, free its pages and return False."""
        request = step.request
        request.flying -= step.count
        if self._has(request):
            return True
        if not request.flying:
            self._holdings.forget(request)
        return False

    # After computing.

    def _advance(self, step: Step, drawn: Draw | None) -> None:
        request = step.request
        request.computed += step.count
        pages_of(request).length = request.computed
        if drawn is not None and drawn.token is None:
            unfit = TransomError("the model's output is not finite (NaN or infinity)")
            self._fail(request, drawn.error or unfit)
            return
        self._holdings.note(step)
        if drawn is not None and drawn.token is not None:
            self._accept(request, drawn.token, drawn)

    def _accept(self, request: Request, token: int, drawn: Draw) -> None:
        """Put a token out; the request leaves if that is due."""
        index = len(request.output_ids)
        request.output_ids.append(token)
        assert request.sampler is not None
        request.sampler.observe([token])
        reason = finish_reason(request, token, self._eos_ids)
        timings = timings_ms(request, self._clock()) if reason or index == 0 else {}
        self._events.append(token_event(request, index, drawn, reason, timings))
        if reason is not None or request.hands_off:
            self._leaving.append((request, reason))

    def _let_leave(self) -> None:
        """End the requests whose last token is out, and hand off those that go on elsewhere."""
        leaving, self._leaving = self._leaving, []
        for request, reason in leaving:
            last = self._holdings.finish(request) if reason else self._holdings.hand_over(request)
            if last is not None:
                self._events.append(last)
            self._forget(request)

    def _forget(self, request: Request) -> None:
        """Let a request go. Its pages are freed when no step in flight uses them any more."""
        self._holdings.drop_host_kv(request)
        request.embeddings.clear()
        self._requests.pop(request.request_id, None)
        self._running.pop(request.request_id, None)
        if not request.flying:
            self._holdings.forget(request)

    def _fail(self, request: Request, error: TransomError) -> None:
        self._forget(request)
        self._events.append(FailedEvent(request.request_id, error.info()))

    def _check_when_idle(self) -> None:
        if self._requests or self._flights:
            self._checked = False
        elif not self._checked:
            self._holdings.check_integrity()
            self._checked = True

    def _publish(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._emit(events)
