"""The JSON of answers in OpenAI's shapes, streamed and whole.

Pure; runs in the gateway process. A renderer serves one client request and remembers only what its
later pieces need.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from transom.gateway.output import ChoiceOutput, Delta
from transom.gateway.tool_parser import ToolDelta
from transom.messages import PromptStats, TokenLogprob
from transom.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Head:
    """What every piece of an answer repeats."""

    id: str
    created: int
    model: str


def usage(
    stats: Sequence[PromptStats],
    outputs: Sequence[ChoiceOutput],
    notes: Sequence[tuple[int, str]] = (),
) -> dict[str, Any]:
    """Return the usage object; `stats` has one entry per prompt, however many choices it had.

    `notes` are what encoders remark on media items, by number.
    """
    media_notes = [{"item": item, "note": note} for item, note in notes]
    prompt = sum(one.prompt_tokens for one in stats)
    completion = sum(one.completion_tokens for one in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(one.cached_tokens for one in stats),
            "image_tokens": sum(one.image_tokens for one in stats),
            "video_tokens": sum(one.video_tokens for one in stats),
            "audio_tokens": sum(one.audio_tokens for one in stats),
        },
        "completion_tokens_details": {"reasoning_tokens": sum(one.reasoning_tokens for one in outputs)},
        **({"media_notes": media_notes} if media_notes else {}),
    }


class Renderer(ABC):
    """Shapes the answer of one endpoint."""

    def __init__(self, head: Head, tokenizer: Tokenizer, *, include_usage: bool, logprobs: bool) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._include_usage = include_usage
        self._logprobs = logprobs

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = self._head
        return {
            "id": head.id, "object": kind, "created": head.created, "model": head.model, "choices": choices,
        }  # fmt: skip

    def _event(self, kind: str, choice: dict[str, Any]) -> dict[str, Any]:
        event = self._envelope(kind, [choice])
        if self._include_usage:
            event["usage"] = None
        return event

    @abstractmethod
    def events(self, index: int, delta: Delta, finish_reason: str | None) -> list[dict[str, Any]]:
        """Return the stream events for news of a choice."""

    @abstractmethod
    def last_event(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the event that carries the usage."""

    @abstractmethod
    def whole(self, deltas: Sequence[Sequence[Delta]], reasons: Sequence[str], usage: dict[str, Any]) -> Any:
        """Return the body of an answer that is not streamed; `deltas` by choice."""


class ChatRenderer(Renderer):
    """POST /v1/chat/completions."""

    def __init__(self, head: Head, tokenizer: Tokenizer, *, include_usage: bool, logprobs: bool) -> None:
        super().__init__(head, tokenizer, include_usage=include_usage, logprobs=logprobs)
        self._begun: set[int] = set()
        self._waiting: dict[int, list[TokenLogprob]] = {}

    def events(self, index: int, delta: Delta, finish_reason: str | None) -> list[dict[str, Any]]:
        pieces: list[dict[str, Any]] = []
        if index not in self._begun:
            self._begun.add(index)
            pieces.append({"role": "assistant", "content": ""})
        if delta.reasoning:
            pieces.append({"reasoning_content": delta.reasoning})
        if delta.content:
            pieces.append({"content": delta.content})
        if delta.tool_calls:
            pieces.append({"tool_calls": [_call_delta(call) for call in delta.tool_calls]})
        # Text may be held back while its log-probabilities are known: they go out with the next piece.
        waiting = self._waiting.setdefault(index, [])
        waiting += delta.logprobs
        if finish_reason is not None:
            pieces.append({})
        events = []
        for number, piece in enumerate(pieces):
            last = number == len(pieces) - 1
            choice: dict[str, Any] = {
                "index": index,
                "delta": piece,
                "logprobs": None,
                "finish_reason": finish_reason if last else None,
            }
            if waiting and "role" not in piece:
                choice["logprobs"] = self._logprob_object(waiting)
                waiting.clear()
            events.append(self._event("chat.completion.chunk", choice))
        return events

    def last_event(self, usage: dict[str, Any]) -> dict[str, Any]:
        return self._envelope("chat.completion.chunk", []) | {"usage": usage}

    def whole(self, deltas: Sequence[Sequence[Delta]], reasons: Sequence[str], usage: dict[str, Any]) -> Any:
        choices = []
        for index, (pieces, reason) in enumerate(zip(deltas, reasons, strict=True)):
            calls = join_calls([call for piece in pieces for call in piece.tool_calls])
            content = "".join(piece.content for piece in pieces)
            message: dict[str, Any] = {
                "role": "assistant",
                "content": content if content or not calls else None,
                "refusal": None,
            }
            reasoning = "".join(piece.reasoning for piece in pieces)
            if reasoning:
                message["reasoning_content"] = reasoning
            if calls:
                message["tool_calls"] = calls
            choice: dict[str, Any] = {"index": index, "message": message, "logprobs": None}
            if self._logprobs:
                choice["logprobs"] = self._logprob_object([one for piece in pieces for one in piece.logprobs])
            choices.append(choice | {"finish_reason": reason})
        return self._envelope("chat.completion", choices) | {"usage": usage}

    def _logprob_object(self, items: Sequence[TokenLogprob]) -> dict[str, Any]:
        content = [
            _packed(
                self._token(one.token_id, one.logprob)
                | {"top_logprobs": [self._token(id, logprob) for id, logprob in one.top]}
            )
            for one in items
        ]
        return {"content": content, "refusal": None}

    def _token(self, id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(id)
        return {"token": data.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(data)}


def _packed(value: dict[str, Any]) -> orjson.Fragment:
    """Return JSON in the place of an object, which takes six times the room: of tokens there may be many."""
    return orjson.Fragment(orjson.dumps(value))


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can hold: OpenAI spells minus infinity as -9999."""
    return max(logprob, -9999.0)


def _call_delta(call: ToolDelta) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": call.arguments}
    if call.id is None:
        return {"index": call.index, "function": function}
    return {
        "index": call.index, "id": call.id, "type": "function", "function": {"name": call.name, **function},
    }  # fmt: skip


def join_calls(deltas: Sequence[ToolDelta]) -> list[dict[str, Any]]:
    """Return whole tool calls from their pieces."""
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        call = calls.setdefault(
            delta.index,
            {"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": ""}},
        )
        call["function"]["arguments"] += delta.arguments
    return list(calls.values())


@dataclass(slots=True)
class _Offset:
    chars: int = 0
    waiting: list[TokenLogprob] = field(default_factory=list)


class CompletionRenderer(Renderer):
    """POST /v1/completions. `echoes` are the prompts' texts where the client wants them back."""

    def __init__(
        self,
        head: Head,
        tokenizer: Tokenizer,
        *,
        include_usage: bool,
        logprobs: bool,
        echoes: Sequence[str] | None = None,
    ) -> None:
        super().__init__(head, tokenizer, include_usage=include_usage, logprobs=logprobs)
        self._echoes = echoes
        self._begun: set[int] = set()
        self._offsets: dict[int, _Offset] = {}

    def _echo(self, index: int) -> str:
        if self._echoes is None or index in self._begun:
            return ""
        self._begun.add(index)
        return self._echoes[index]

    def _choice(
        self, index: int, text: str, logprobs: list[TokenLogprob], reason: str | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprob_object(index, logprobs) if self._logprobs else None,
            "finish_reason": reason,
        }

    def events(self, index: int, delta: Delta, finish_reason: str | None) -> list[dict[str, Any]]:
        state = self._offsets.setdefault(index, _Offset())
        state.waiting += delta.logprobs
        text = self._echo(index) + delta.content
        if not text and finish_reason is None:
            return []
        waiting, state.waiting = state.waiting, []
        return [self._event("text_completion", self._choice(index, text, waiting, finish_reason))]

    def last_event(self, usage: dict[str, Any]) -> dict[str, Any]:
        return self._envelope("text_completion", []) | {"usage": usage}

    def whole(self, deltas: Sequence[Sequence[Delta]], reasons: Sequence[str], usage: dict[str, Any]) -> Any:
        choices = []
        for index, (pieces, reason) in enumerate(zip(deltas, reasons, strict=True)):
            text = self._echo(index) + "".join(piece.content for piece in pieces)
            logprobs = [one for piece in pieces for one in piece.logprobs]
            choices.append(self._choice(index, text, logprobs, reason))
        return self._envelope("text_completion", choices) | {"usage": usage}

    def _logprob_object(self, index: int, items: Sequence[TokenLogprob]) -> dict[str, Any]:
        state = self._offsets.setdefault(index, _Offset())
        tokens, offsets = [], []
        for one in items:
            tokens.append(self._text(one.token_id))
            offsets.append(state.chars)
            state.chars += len(tokens[-1])
        return {
            "tokens": tokens,
            "token_logprobs": [finite(one.logprob) for one in items],
            "top_logprobs": [
                _packed({self._text(id): finite(value) for id, value in one.top}) for one in items
            ],
            "text_offset": offsets,
        }

    def _text(self, id: int) -> str:
        return self._tokenizer.token_bytes(id).decode("utf-8", "replace")
