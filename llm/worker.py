"""What prefill and decode processes share: events onto the loop, aborted ids, draining.

Runs on the event loop; the engine has its own thread and is reached through commands and events only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from llguidance import LLTokenizer

from transom.errors import DeadlineError, TransomError
from transom.grammar import GrammarCompiler, grammar_tokenizer
from transom.hub import resolve_model
from transom.llm.build import build_engine, pick_kv_dtype
from transom.llm.config import LlmConfig
from transom.llm.constraint import Constraint
from transom.llm.request import Event, TokenEvent
from transom.llm.waits import WAIT_FIGURES
from transom.messages import Grammar, Message, PromptStats, RequestFailed, Sampling, TokenChunk
from transom.metrics import Labelled
from transom.recent_ids import RecentIds
from transom.stage import Stage
from transom.tokenizer import Tokenizer
from transom.transport import Frame, Transport

logger = logging.getLogger(__name__)

_TICK_S = 0.25


class LlmStage(Stage):
    """A stage around one engine. Subclasses say what messages and events mean."""

    totals = (
        frozenset(
            {
                "step_seconds",
                "model_seconds",
                "computed_tokens",
                "ahead_tokens",
                "cache_hit_tokens",
                "cache_cut_tokens",
                "cache_answer_tokens",
                "retractions",
                "graph_steps",
                "graph_padded_rows",
            }
        )
        | GrammarCompiler.TOTALS
    )
    # The device is the only tier that holds pages.
    labelled: ClassVar[Mapping[str, Labelled]] = {
        "full_used_slots": Labelled("pool_used_slots", {"tier": "device", "pool": "full"}),
        "full_total_slots": Labelled("pool_total_slots", {"tier": "device", "pool": "full"}),
        "swa_used_slots": Labelled("pool_used_slots", {"tier": "device", "pool": "swa"}),
        "swa_total_slots": Labelled("pool_total_slots", {"tier": "device", "pool": "swa"}),
        "cache_hit_tokens": Labelled("cache_hit_tokens", {"tier": "device"}),
        **{key: Labelled("waiting", {"reason": reason.value}) for key, reason in WAIT_FIGURES.items()},
    }

    def __init__(self, config: LlmConfig) -> None:
        self.config = config
        self.aborted = RecentIds()
        self.draining = False
        self._ended = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None
        self._fatal = ""
        self._rate = _Rate()
        self._grammars = GrammarCompiler()
        self._compiling: set[asyncio.Task[None]] = set()

    def _make_vocabulary(self) -> LLTokenizer:
        config = self.model.config
        tokenizer = Tokenizer.from_folder(resolve_model(self.config.model))
        return grammar_tokenizer(tokenizer, config.eos_token_ids, config.vocab_size)

    async def start(self, transport: Transport) -> None:
        self.transport = transport
        self.kv_dtype = pick_kv_dtype(self.config)
        loop = asyncio.get_running_loop()

        def emit(events: list[Event]) -> None:
            # The loop may be closing while the engine ends its last step.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._take_events, events)

        def on_fatal(error: BaseException) -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._engine_died, error)

        self.engine, self.model = await asyncio.to_thread(build_engine, self.config, emit)
        await asyncio.to_thread(self._grammars.load, self._make_vocabulary)
        self.engine.start(on_fatal)
        self._ticker = asyncio.create_task(self._tick_for_ever())

    @abstractmethod
    def on_event(self, event: Event) -> None:
        """Take one engine event, on the loop."""

    @abstractmethod
    def tick(self, now_s: float) -> None:
        """End what has waited past its deadline outside the engine."""

    @abstractmethod
    def jobs(self) -> int:
        """Return how many requests this worker still holds."""

    @abstractmethod
    def fail_all(self, error: TransomError) -> None:
        """End every request with `error`."""

    def load(self) -> dict[str, float]:
        engine = getattr(self, "engine", None)
        return {**engine.load(), **self._grammars.figures()} if engine is not None else {}

    def unready_reason(self) -> str | None:
        return self._fatal or None

    async def drain(self) -> None:
        self.draining = True
        while self.jobs():
            self._ended.clear()
            await self._ended.wait()

    async def close(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        for task in self._compiling:
            task.cancel()
        self._grammars.close()
        if hasattr(self, "engine"):
            await asyncio.to_thread(self.engine.stop)

    def when_compiled(
        self,
        grammar: Grammar | None,
        sampling: Sampling,
        begin: Callable[[Constraint | None], None],
        fail: Callable[[TransomError], None],
    ) -> None:
        """Call `begin` with what the answer must match: now without a grammar, else once it is compiled.

        The request may have ended by then. `fail` is called instead when it can't be compiled.
        """
        if grammar is None:
            begin(None)
            return

        async def compile_it(grammar: Grammar) -> None:
            try:
                matcher = await self._grammars.matcher(grammar)
            except TransomError as error:
                fail(error)
                return
            begin(
                Constraint(grammar, matcher, self.model.config.eos_token_ids, ignore_eos=sampling.ignore_eos)
            )

        task = asyncio.get_running_loop().create_task(compile_it(grammar))
        self._compiling.add(task)
        task.add_done_callback(self._compiling.discard)

    def job_ended(self) -> None:
        """Wake up `drain`."""
        self._ended.set()

    def tell(self, address: str, message: Message, frames: Sequence[Frame] = ()) -> None:
        """Send, or log why not: a peer that can't be reached is dealt with by `peer_lost`."""
        try:
            self.transport.send(address, message, frames)
        except TransomError as error:
            logger.warning("%s to %s was not sent: %s", type(message).__name__, address, error.message)

    def put_out(
        self,
        gateway: str,
        event: TokenEvent,
        timings_ms: Mapping[str, float],
        prompt: PromptStats | None = None,
    ) -> None:
        """Tell the gateway an output token; one that only ends the answer is not shown."""
        shown = event.emit and event.logprob is not None
        self.tell(
            gateway,
            TokenChunk(
                request_id=event.request_id,
                index=event.index,
                token_ids=[event.token_id] if event.emit else [],
                finish_reason=event.finish_reason,
                logprobs=[event.logprob] if shown and event.logprob is not None else None,
                prompt=prompt,
                timings_ms=dict(timings_ms),
            ),
        )

    def report(self, gateway: str, request_id: str, error: TransomError) -> None:
        """Tell the gateway that a request ends with `error`."""
        logger.info("request %s fails: %s", request_id, error.message)
        self.tell(gateway, RequestFailed(request_id=request_id, error=error.info(), stage=self.name))

    def retry_after_s(self, tokens: int) -> float:
        """Return in how many seconds `tokens` tokens will have been computed at the present rate."""
        return min(max(1.0, round(tokens / max(self._rate.per_s, 50.0))), 60.0)

    def _take_events(self, events: list[Event]) -> None:
        for event in events:
            try:
                self.on_event(event)
            except TransomError as error:
                logger.warning("%s: %s", type(event).__name__, error.message)

    async def _tick_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._rate.update(self.engine.load()["computed_tokens"], time.monotonic())
            self.tick(time.time())

    def _engine_died(self, error: BaseException) -> None:
        """Without its engine the process is useless: end it, whoever supervises it starts a new one."""
        self._fatal = f"the engine stopped: {error}"
        self.fail_all(TransomError(f"the {self.name} worker failed"))
        signal.raise_signal(signal.SIGTERM)


def check_deadline(deadline_s: float, now_s: float) -> None:
    """Raise DeadlineError when the deadline has passed."""
    if deadline_s <= now_s:
        raise DeadlineError(f"the deadline passed {now_s - deadline_s:.1f} s ago")


class _Rate:
    """Tokens a second while busy, smoothed over some seconds."""

    def __init__(self) -> None:
        self.per_s = 0.0
        self._tokens = 0.0
        self._at_s: float | None = None

    def update(self, tokens: float, now_s: float) -> None:
        if self._at_s is not None and tokens > self._tokens:
            rate = (tokens - self._tokens) / max(now_s - self._at_s, 1e-3)
            self.per_s = rate if not self.per_s else 0.9 * self.per_s + 0.1 * rate
        self._tokens, self._at_s = tokens, now_s
