"""The engine: one thread that batches requests through the model over the paged pools.

The same core serves prefill workers (requests that hand off), decode workers (requests that arrive with KV)
and both at once. Knows no sockets: commands come in by `submit`, events leave by one callback a step.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from transom.errors import DeadlineError, TransomError
from transom.llm.capacity import pages_for
from transom.llm.intake import Intake
from transom.llm.model.causal_lm import CausalLM
from transom.llm.model.fused import FusedModel
from transom.llm.output import finish_reason, timings_ms, token_event
from transom.llm.pools import DualPools, RequestKV
from transom.llm.prefix_cache import PrefixCache
from transom.llm.request import (
    AnswerEvent,
    Command,
    Drop,
    Event,
    FailedEvent,
    Hold,
    KeepAnswer,
    PrefilledEvent,
    Request,
    ReturnWish,
    Start,
    StartedEvent,
)
from transom.llm.runner import ModelRunner, Step, pages_of
from transom.llm.sampler import Draw
from transom.llm.scheduler import FreePages, Limits, Order, Plan, plan_step
from transom.llm.views import look

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineLimits:
    """Bounds of one engine. `context_len` counts prompt and output; the pools may lower it."""

    batch_tokens: int
    running_requests: int
    context_len: int
    swa_release_interval: int


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
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.context_len = min(limits.context_len, pools.full_pages.capacity * pools.page_size)
        self.waiting_reason = ""  # why the next request in line is not running; "" when none waits
        self._hold = ""
        self._intake = Intake(model.config, pools.device, self.context_len)
        self._eos_ids = model.config.eos_token_ids
        self._runner = ModelRunner(model, pools)
        self._pools = pools
        self._cache = cache
        self._order = order
        self._limits = limits
        self._policy_limits = Limits(
            limits.batch_tokens,
            min(limits.running_requests, limits.batch_tokens),
            pools.page_size,
            pools.kept,
        )
        self._emit = emit
        self._clock = clock
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._requests: dict[str, Request] = {}  # all of them
        self._running: dict[str, Request] = {}  # those with pages
        self._events: list[Event] = []
        self._next_deadline_s = float("inf")
        self._computed_tokens = 0
        self._ahead_tokens = 0
        self._step_s = self._model_s = 0.0
        self._retracted_bytes = 0
        self._retractions = 0
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
        plan = self._plan()
        for request_id in plan.retract:
            self._retract(self._requests[request_id])
        # What a prompt will reuse is pinned before the KV of others needs room.
        for request in sorted(map(self._requests.__getitem__, plan.admit), key=_has_host_kv):
            self._admit(request)
        self._compute_isolated([self._make_step(name, count) for name, count in plan.steps.items()])
        self._busy = bool(plan.steps or plan.retract)
        if self._busy:
            self._step_s += time.perf_counter() - begin
        self._check_when_idle()
        self._publish()
        return True

    def start(self, on_fatal: Callable[[BaseException], None]) -> None:
        """Run the loop in a thread of its own; `on_fatal` is called there if it ends by an error."""

        def run() -> None:
            try:
                while self.step(wait_s=None):
                    pass
            except BaseException as error:
                logger.exception("the engine stops")
                on_fatal(error)

        self._thread = threading.Thread(target=run, name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current step; blocks until it has ended."""
        self._commands.put(None)
        if self._thread is not None:
            self._thread.join()

    def submit(self, command: Command) -> None:
        """Hand over a command; thread-safe, never blocks."""
        self._commands.put(command)

    @property
    def tokens_per_s(self) -> float:
        """What the model has computed in a second of its time so far, 1 at least."""
        return max(self._computed_tokens / self._model_s, 1.0) if self._model_s else 1.0

    def load(self) -> dict[str, float]:
        """Return figures of the current load; thread-safe, each figure true at some recent moment.

        Used slots are those that requests keep: cached ones that could be evicted count as free.
        """
        pools, requests, running = self._pools, len(self._requests), len(self._running)
        free = self._free_pages()
        return {
            "running_requests": running,
            "waiting_requests": max(requests - running, 0),
            "full_used_slots": (pools.full_pages.capacity - free.full) * pools.page_size,
            "full_total_slots": pools.full_pages.capacity * pools.page_size,
            "swa_used_slots": (pools.swa_pages.capacity - free.swa) * pools.page_size,
            "swa_total_slots": pools.swa_pages.capacity * pools.page_size,
            "computed_tokens": self._computed_tokens,
            "ahead_tokens": self._ahead_tokens,
            "step_seconds": self._step_s,
            "model_seconds": self._model_s,
            "retracted_bytes": self._retracted_bytes,
            "retractions": self._retractions,
            **(self._cache.figures() if self._cache else {}),
        }

    # Commands and deadlines.

    def _take_commands(self, wait_s: float | None) -> bool:
        """Apply all commands that are there; without work, wait for the first one or a deadline."""
        patience = wait_s
        if self._busy:
            patience = 0.0
        elif self._requests:
            until_deadline = min(max(self._next_deadline_s - self._clock(), 0.0), _LONGEST_WAIT_S)
            patience = until_deadline if patience is None else min(patience, until_deadline)
        try:
            while True:
                command = (
                    self._commands.get(timeout=patience) if patience != 0.0 else self._commands.get_nowait()
                )
                if command is None:
                    return False
                self._apply(command)
                patience = 0.0
        except queue.Empty:
            return True

    def _apply(self, command: Command) -> None:
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

    def _plan(self) -> Plan:
        if not self._requests:
            self.waiting_reason = ""
            return Plan((), (), {}, "", {})
        now = self._clock()
        most = self._policy_limits.running_requests
        plan = plan_step(
            *look(self._requests, self._running, self._cache, self._order, most, now),
            self._free_pages(),
            self._policy_limits,
            now_s=now,
            order=self._order,
            hold=self._hold,
        )
        if self._cache is not None:
            self._cache.follow(plan.follows)
        if plan.waiting_reason != self.waiting_reason:
            self.waiting_reason = plan.waiting_reason
            logger.debug("waiting: %s", plan.waiting_reason or "nobody")
        return plan

    def _free_pages(self) -> FreePages:
        if self._cache is not None:
            return self._cache.free_pages
        return FreePages(self._pools.full_pages.available, self._pools.swa_pages.available)

    def _admit(self, request: Request) -> None:
        """Give the request pages: those of its own KV, or of the cached prefix, or none yet."""
        if request.host_kv is not None:
            if self._cache is not None:
                full = pages_for(request.host_kv.length, self._pools.page_size)
                self._cache.make_room(full, full)
            request.kv = self._pools.adopt(request.host_kv)
            self._drop_host_kv(request)
            self._events.append(StartedEvent(request.request_id))
        elif self._cache is not None:
            self._cache.attach(request)
        else:
            request.kv = RequestKV()
        request.admitted_s = request.admitted_s or self._clock()
        self._running[request.request_id] = request

    def _retract(self, request: Request) -> None:
        """Take the request's pages: decoding ones keep their KV in host memory, prompts start anew."""
        assert request.kv is not None
        if request.decoding:
            request.host_kv = self._pools.offload(request.kv)
            self._retracted_bytes += request.host_kv.size_bytes
        else:
            request.computed = 0
        request.retractions += 1
        self._retractions += 1
        logger.debug("retracted %s at %d tokens", request.request_id, request.kv.length)
        self._release(request)

    # Computing.

    def _make_step(self, request_id: str, count: int) -> Step:
        request = self._requests[request_id]
        kv, end = pages_of(request), request.computed + count
        if end > kv.count * self._pools.page_size:
            (self._cache or self._pools).extend(kv, end)
        return Step(request, count, request.prompt_complete and count == request.ready_len)

    @torch.inference_mode()
    def _compute_isolated(self, steps: Sequence[Step]) -> None:
        """Compute a batch; if it raises, compute its requests one by one, so that only the culprit fails."""
        if not steps:
            return
        begin = time.perf_counter()
        try:
            draws = self._runner.run(steps)
            self._model_s += time.perf_counter() - begin
        except Exception as error:
            if len(steps) > 1:
                logger.warning("a batch of %d requests failed (%s); trying each alone", len(steps), error)
                for step in steps:
                    self._compute_isolated([step])
                return
            logger.exception("request %s failed", steps[0].request.request_id)
            self._fail(steps[0].request, TransomError(f"computing the request failed: {error}"))
            return
        self._computed_tokens += sum(step.count for step in steps)
        self._ahead_tokens += sum(step.count for step in steps if not step.request.prompt_complete)
        for step in steps:
            self._advance(step, draws.get(step.request.request_id))

    # After computing.

    def _advance(self, step: Step, drawn: Draw | None) -> None:
        request = step.request
        kv = pages_of(request)
        request.computed += step.count
        kv.length = request.computed
        if drawn is not None and drawn.token is None:
            unfit = TransomError("the model's output is not finite (NaN or infinity)")
            self._fail(request, drawn.error or unfit)
            return
        due = not request.decoding or kv.length % self._limits.swa_release_interval == 0
        if self._cache is None:
            if due:
                self._pools.slide(kv)
        elif not request.decoding:
            self._cache.store(request)
        elif due:
            self._cache.slide(request)
        if drawn is not None and drawn.token is not None:
            self._accept(request, drawn.token, drawn)

    def _accept(self, request: Request, token: int, drawn: Draw) -> None:
        """Put a token out; end the request or hand it off if that is due."""
        index = len(request.output_ids)
        request.output_ids.append(token)
        assert request.sampler is not None
        request.sampler.observe([token])
        reason = finish_reason(request, token, self._eos_ids)
        timings = timings_ms(request, self._clock()) if reason or index == 0 else {}
        self._events.append(token_event(request, index, drawn, reason, timings))
        if reason is None and not request.hands_off:
            return
        if self._cache is not None:
            self._cache.finish(request)
        if reason is None:
            host_kv = self._pools.offload(pages_of(request))
            wanted = self._cache.hand_over(request) if self._cache is not None else None
            self._events.append(
                PrefilledEvent(request.request_id, request.prompt_ids, token, host_kv, wanted)
            )
        elif request.wish is not None:
            self._return_answer(request, request.wish)
        self._forget(request)

    def _return_answer(self, request: Request, wish: ReturnWish) -> None:
        """Put out the whole pages of what was generated, for the prefix cache where the prompt is."""
        end = request.computed // wish.page_size * wish.page_size
        if end > max(wish.begin, request.computed - self._pools.window):
            host_kv = self._pools.copy_out(pages_of(request), wish.begin, end)
            self._events.append(AnswerEvent(request.request_id, wish, request.output_ids, host_kv))

    def _release(self, request: Request) -> None:
        if request.kv is not None:
            if self._cache is not None:
                self._cache.release(request)
            else:
                self._pools.release(request.kv)
            request.kv = None
        self._running.pop(request.request_id, None)

    def _drop_host_kv(self, request: Request) -> None:
        if request.host_kv is not None and request.retractions:
            self._retracted_bytes -= request.host_kv.size_bytes
        request.host_kv = None

    def _forget(self, request: Request) -> None:
        self._release(request)
        self._drop_host_kv(request)
        request.embeddings.clear()
        if self._cache is not None:
            self._cache.forget(request.request_id)
        self._requests.pop(request.request_id, None)

    def _fail(self, request: Request, error: TransomError) -> None:
        self._forget(request)
        self._events.append(FailedEvent(request.request_id, error.info()))

    def _check_when_idle(self) -> None:
        if self._requests:
            self._checked = False
        elif not self._checked:
            (self._cache or self._pools).check_integrity(())
            self._checked = True

    def _publish(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._emit(events)


def _has_host_kv(request: Request) -> bool:
    return request.host_kv is not None
