"""Compiles the grammars of answers: the gateway to check them, prefill and decode to sample by them.

Compiling runs in threads of its own with a deadline, and what came of it is kept in a bounded cache: no event
loop and no engine waits for it. Knows neither schemas nor requests; loads no torch.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from transom.errors import CheckpointError, OverloadedError, RequestError, TransomError
from transom.messages import Grammar
from transom.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_GRAMMAR_BYTES = 1024 * 1024
_DEADLINE_S = 5.0
_THREADS = 2
_MAX_COMPILING = 64
_MAX_CACHED = 256
_MAX_CACHED_BYTES = 8 * 1024 * 1024
# The largest grammars within these compile in about a second, and a step of them takes some 40 ms at most
# (one core at 2.5 GHz); ordinary schemas take 2 ms and 0.05 ms.
_LIMITS = LLParserLimits(
    max_items_in_row=4096,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


class _Vocabulary:
    """What LLTokenizer asks of a tokenizer. Control tokens never match text, only their own ids."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos_ids: Sequence[int], size: int) -> None:
        if not eos_ids:
            raise CheckpointError("the model has no end-of-sequence token: its answers can't be constrained")
        self._tokenizer = tokenizer
        self.eos_token_id = eos_ids[0]
        self.tokens = [tokenizer.token_bytes(id) for id in range(size)]
        self.special_token_ids = sorted(id for id in tokenizer.control_tokens.values() if id < size)

    def __call__(self, text: bytes | str) -> list[int]:
        known = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(known, special=False)


def grammar_tokenizer(
    tokenizer: Tokenizer, eos_ids: Sequence[int], vocab_size: int | None = None
) -> LLTokenizer:
    """Return the vocabulary for masks over `vocab_size` ids; takes a second for a large one."""
    size = vocab_size or tokenizer.vocab_size
    ends = [id for id in eos_ids if id < size]
    # The wrapper is found by its attributes, whatever the stub says.
    wrapper: object = _Vocabulary(tokenizer, ends, size)
    return LLTokenizer(wrapper, eos_token=ends)  # type: ignore[arg-type]


@dataclass(slots=True, eq=False)
class _Compile:
    started: bool = False
    outcome: asyncio.Future[LLMatcher | str] = field(init=False)


class GrammarCompiler:
    """One per process, used on its event loop once `load` has run."""

    TOTALS = frozenset({"grammars_compiled", "grammar_cache_hits"})  # those of `figures` that only grow

    def __init__(self) -> None:
        self._vocabulary: LLTokenizer | None = None
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")
        self._cache: OrderedDict[str, LLMatcher | str] = OrderedDict()  # a text is why it can't be compiled
        self._cached_bytes = 0
        self._running: dict[str, _Compile] = {}
        self._hits = 0
        self._compiled = 0

    def load(self, make: Callable[[], LLTokenizer]) -> None:
        """Make the vocabulary. Blocks, and keeps all threads of the process waiting for a second or so.

        Without one the process does its other work: it is requests with a grammar that are told.
        """
        try:
            self._vocabulary = make()
        except CheckpointError as error:
            logger.warning("answers can't be constrained here: %s", error.message)

    def figures(self) -> dict[str, float]:
        """Return counts for metrics."""
        return {
            "grammars_cached": len(self._cache),
            "grammars_compiled": self._compiled,
            "grammar_cache_hits": self._hits,
        }

    async def matcher(self, grammar: Grammar) -> LLMatcher:
        """Return a fresh matcher, which the caller may use on any one thread.

        Raise RequestError, naming the grammar's `param`, for one that is wrong, too large or too slow to
        compile, and OverloadedError when too many others are being compiled.
        """
        text = grammar.text
        if self._vocabulary is None:
            raise TransomError("the checkpoint of this process has no vocabulary to constrain answers by")
        found = self._cache.get(text)
        if found is not None:
            self._cache.move_to_end(text)
            self._hits += 1
        else:
            if len(text) > MAX_GRAMMAR_BYTES:
                raise _refusal(
                    grammar, f"a grammar of {len(text)} bytes, at most {MAX_GRAMMAR_BYTES} are taken"
                )
            found = await self._outcome(grammar)
        if isinstance(found, str):
            raise _refusal(grammar, found)
        return found.deep_copy()

    async def _outcome(self, grammar: Grammar) -> LLMatcher | str:
        """Wait for the one compile of this text, which goes on for others when the waiter gives up."""
        running = self._running.get(grammar.text) or self._begin(grammar.text)
        try:
            async with asyncio.timeout(_DEADLINE_S):
                return await asyncio.shield(running.outcome)
        except TimeoutError:
            if not running.started:
                raise OverloadedError(
                    f"{len(self._running)} schemas are being compiled", param=grammar.param, retry_after_s=1
                ) from None
            raise _refusal(grammar, f"compiling takes longer than {_DEADLINE_S:g} s") from None

    def _begin(self, text: str) -> _Compile:
        if len(self._running) >= _MAX_COMPILING:
            raise OverloadedError(f"{len(self._running)} schemas are being compiled", retry_after_s=1)
        running = self._running[text] = _Compile()

        def work() -> LLMatcher | str:
            running.started = True
            return self._compile(text)

        def keep(outcome: asyncio.Future[LLMatcher | str]) -> None:
            del self._running[text]
            if not outcome.cancelled() and outcome.exception() is None:
                self._compiled += 1
                self._keep(text, outcome.result())

        running.outcome = asyncio.get_running_loop().run_in_executor(self._pool, work)
        running.outcome.add_done_callback(keep)
        return running

    def _compile(self, text: str) -> LLMatcher | str:
        assert self._vocabulary is not None
        matcher = LLMatcher(self._vocabulary, LLMatcher.grammar_from_lark(text), log_level=0, limits=_LIMITS)
        probe = matcher.deep_copy()
        if not probe.is_error():
            # The first mask is often the dearest one: too dear is better said now.
            probe.compute_bitmask()
        return _plain(probe.get_error()) if probe.is_error() else matcher

    def _keep(self, text: str, outcome: LLMatcher | str) -> None:
        self._cache[text] = outcome
        self._cached_bytes += len(text)
        while len(self._cache) > _MAX_CACHED or self._cached_bytes > _MAX_CACHED_BYTES:
            dropped, _ = self._cache.popitem(last=False)
            self._cached_bytes -= len(dropped)

    def close(self) -> None:
        """Start nothing more; a compile that runs ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _refusal(grammar: Grammar, problem: str) -> RequestError:
    return RequestError(f"{grammar.param}: {problem}", param=grammar.param)


def _plain(error: str) -> str:
    """Return the library's message without the places in a text that the client never saw."""
    first, *rest = error.split("\n")
    problem = first.rpartition("failed to compile JSON schema: ")[2].strip()
    if problem.startswith("oneOf"):
        return "the options of oneOf must exclude each other, by a type or a constant; anyOf may do"
    # A bad regular expression is drawn on several lines, with what is wrong on the last one.
    reason = next((line for line in rest if line.startswith("error: ")), "")
    return f"{problem} {reason.removeprefix('error: ')}".strip()
