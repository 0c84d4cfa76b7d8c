"""Splits a model's thinking, `<think>...</think>` at the start of its text, from the answer.

Pure and incremental: the pieces don't depend on where the stream was cut. Gateway process.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

OPEN = "<think>"
CLOSE = "</think>"


class _State(Enum):
    START = "start"
    REASONING = "reasoning"
    CONTENT = "content"


@dataclass(slots=True)
class Split:
    """What became certain with one push."""

    reasoning: str = ""
    content: str = ""


def partial_suffix(text: str, tag: str) -> int:
    """Return how many last characters of `text` could be the start of `tag` (the whole tag excluded)."""
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0


class ReasoningParser:
    """`inside`: the prompt has opened the thinking already, so the text starts within it."""

    def __init__(self, *, inside: bool = False) -> None:
        self._state = _State.REASONING if inside else _State.START
        self._held = ""

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends inside the thinking."""
        return self._state is _State.REASONING

    def push(self, text: str) -> Split:
        """Take more text; return what is certain by now."""
        split = Split()
        self._held += text
        if self._state is _State.START:
            self._start(split)
        if self._state is _State.REASONING:
            self._reason(split)
        if self._state is _State.CONTENT:
            split.content += self._held
            self._held = ""
        return split

    def _start(self, split: Split) -> None:
        body = self._held.lstrip()
        if body.startswith(OPEN):
            self._held = body[len(OPEN) :]
            self._state = _State.REASONING
        elif not OPEN.startswith(body):
            self._state = _State.CONTENT

    def _reason(self, split: Split) -> None:
        reasoning, close, rest = self._held.partition(CLOSE)
        if close:
            split.reasoning += reasoning
            self._held = rest
            self._state = _State.CONTENT
            return
        keep = partial_suffix(self._held, CLOSE)
        split.reasoning += self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]

    def finish(self) -> Split:
        """Return what was held back; the text has ended."""
        held, self._held = self._held, ""
        if self._state is _State.REASONING:
            return Split(reasoning=held)
        return Split(content=held)


def split_reasoning(text: str) -> tuple[str | None, str]:
    """Split a finished text; None when it holds no complete thinking at its start."""
    if not text.lstrip().startswith(OPEN) or CLOSE not in text:
        return None, text
    parser = ReasoningParser()
    split = parser.push(text)
    return split.reasoning, split.content
