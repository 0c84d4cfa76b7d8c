"""One choice's answer: token chunks in, deltas for the client out.

Detokenises, separates thinking, ends at stop strings and reads tool calls. Pure state of the gateway
process; knows nothing of sockets. Chunks must come in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from transom.errors import UnavailableError
from transom.gateway.reasoning_parser import CLOSE, OPEN, ReasoningParser
from transom.gateway.stop import StopMatcher
from transom.gateway.tool_parser import ToolDelta, ToolParser
from transom.messages import TokenChunk, TokenLogprob
from transom.tokenizer import Tokenizer

_SPOKEN = (OPEN, CLOSE, "<tool_call>", "</tool_call>")


@dataclass(slots=True)
class Delta:
    """What one push adds to the answer."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolDelta] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def logprob_bytes(self) -> int:
        """Return about what the log-probabilities take of memory (CPython 3.11)."""
        return sum(200 + 112 * len(one.top) for one in self.logprobs)

    def add(self, other: Delta) -> None:
        """Append what came after."""
        self.content += other.content
        self.reasoning += other.reasoning
        self.tool_calls += other.tool_calls
        self.logprobs += other.logprobs


class ChoiceOutput:
    """`finish_reason` is None while the answer goes on; `by_gateway` says that the engine must be told."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: tuple[str, ...] = (),
        min_tokens: int = 0,
        reasoning: ReasoningParser | None = None,
        tools: ToolParser | None = None,
        single_tool_call: bool = False,
        forced: str = "",
        named_tool: bool = False,
    ) -> None:
        # Control tokens stay out of the text, except those that the parsers read.
        spoken = {tokenizer.token_id(tag) for tag in _SPOKEN} if reasoning or tools else set()
        self._hidden = tokenizer.special_ids - spoken
        self._detokenizer = tokenizer.detokenizer(skip_special=False)
        self._stop = StopMatcher(stop)
        self._min_tokens = min_tokens
        self._reasoning = reasoning
        self._tools = tools
        self._single = single_tool_call
        self._named = named_tool
        self.finish_reason: str | None = None
        self.by_gateway = False
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self._opening = Delta()
        if tools is not None and forced:
            self._opening.tool_calls += tools.push(forced).calls

    def ended(self) -> bool:
        """Say whether the finish reason is known."""
        return self.finish_reason is not None

    def push(self, chunk: TokenChunk) -> Delta:
        """Take the next chunk; after the finish everything is ignored."""
        delta, self._opening = self._opening, Delta()
        if self.ended():
            return delta
        for number, id in enumerate(chunk.token_ids):
            self.completion_tokens += 1
            if self._reasoning is not None and self._reasoning.in_reasoning:
                self.reasoning_tokens += 1
            if chunk.logprobs is not None and number < len(chunk.logprobs):
                delta.logprobs.append(chunk.logprobs[number])
            if id not in self._hidden:
                self._take(self._detokenizer.push((id,)), delta)
            if self.ended():
                self.by_gateway = chunk.finish_reason is None
                return delta
        if chunk.finish_reason is not None:
            self._finish(chunk.finish_reason, delta)
        return delta

    def _take(self, text: str, delta: Delta) -> None:
        if self._reasoning is not None:
            split = self._reasoning.push(text)
            delta.reasoning += split.reasoning
            text = split.content
        self._answer(text, delta)

    def _answer(self, text: str, delta: Delta) -> None:
        if self.completion_tokens >= self._min_tokens:  # earlier text is not looked at
            text = self._stop.push(text)
        self._content(text, delta)
        if self._stop.hit is not None:
            self._end_content(delta, truncated=False)
            self.finish_reason = self._reason("stop")
        elif self._single and self._tools is not None and self._tools.finished:
            self.finish_reason = self._reason("stop")

    def _content(self, text: str, delta: Delta) -> None:
        if self._tools is None:
            delta.content += text
            return
        split = self._tools.push(text)
        delta.content += split.content
        delta.tool_calls += split.calls

    def _end_content(self, delta: Delta, *, truncated: bool) -> None:
        if self._tools is None:
            return
        split = self._tools.finish(truncated=truncated)
        delta.content += split.content
        delta.tool_calls += split.calls

    def _finish(self, reason: str, delta: Delta) -> None:
        if reason == "abort":
            raise UnavailableError("the worker gave up the request", retry_after_s=1)
        if reason == "stop":
            self.completion_tokens += 1  # the end token is computed, but never sent
        self._take(self._detokenizer.flush(), delta)
        if self._reasoning is not None and not self.ended():
            rest = self._reasoning.finish()
            delta.reasoning += rest.reasoning
            self._answer(rest.content, delta)
        if not self.ended():
            self._content(self._stop.finish(), delta)
            self._end_content(delta, truncated=reason == "length")
            self.finish_reason = self._reason(reason)

    def _reason(self, reason: str) -> str:
        """OpenAI says "stop" when the client itself named the tool."""
        called = self._tools is not None and self._tools.started
        return "tool_calls" if called and reason == "stop" and not self._named else reason
