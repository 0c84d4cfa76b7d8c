"""Reads MiMo's tool calls out of generated text, piece by piece, as OpenAI's tool_calls deltas.

<tool_call>, <function=NAME>, any number of <parameter=KEY>VALUE</parameter>, </function>, </tool_call>.
Pure; the joined deltas don't depend on where the stream was cut. Broken markup never raises.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from transom.gateway.reasoning_parser import partial_suffix
from transom.gateway.tool_values import BARE_TYPES, JsonQuotes, parameter_types, to_json, typed_json

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_VALUE_END = re.compile(rf"{_PARAMETER_END}|{_FUNCTION_END}\s*{_CALL_END}|{_CALL_END}")
_MAX_NAME_CHARS = 256


@dataclass(slots=True)
class ToolDelta:
    """A piece of call `index`; id and name come once, with its first piece."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class ToolSplit:
    """What became certain with one push."""

    content: str = ""
    calls: list[ToolDelta] = field(default_factory=list)


class _State(Enum):
    TEXT = "text"
    OPEN = "open"
    BODY = "body"
    VALUE = "value"
    CLOSE = "close"


def new_call_id() -> str:
    """Return an id as OpenAI spells them."""
    return f"call_{secrets.token_hex(12)}"


class ToolParser:
    """Holds the state of one answer. `tools` are the request's, for the types of parameters."""

    def __init__(
        self, tools: Sequence[Mapping[str, Any]], *, new_id: Callable[[], str] = new_call_id
    ) -> None:
        self._types = {tool["function"]["name"]: parameter_types(tool["function"]) for tool in tools}
        self._new_id = new_id
        self._state = _State.TEXT
        self._buffer = ""
        self._raw_open = ""  # what to give back as text when it turns out to be no call
        self._function = ""
        self._key = ""
        self._keys: set[str] = set()  # of this call, up to now
        self._repeated = False  # the value is of a key that has one already, and goes nowhere
        self._streams = False  # the value goes out as it comes: a string
        self._value = ""
        self._value_begun = False
        self._quotes: JsonQuotes | None = None  # of a value that is JSON: its strings may hold end tags
        self._ended = False
        self.started = 0  # calls whose name is known
        self.finished = 0  # calls whose arguments are complete

    def push(self, text: str) -> ToolSplit:
        """Take more text; return what is certain by now."""
        split = ToolSplit()
        self._buffer += text
        steps = {
            _State.TEXT: self._text,
            _State.OPEN: self._open,
            _State.BODY: self._body,
            _State.VALUE: self._in_value,
            _State.CLOSE: self._close,
        }
        while steps[self._state](split):
            pass
        return split

    def finish(self, *, truncated: bool = False) -> ToolSplit:
        """Return what was held back; the text has ended.

        A call that lacks only its end is completed; after `truncated` its arguments stay unfinished, so
        that nobody runs half a command, and the start of one that has no name yet is dropped.
        """
        split = ToolSplit()
        self._ended = True
        if self._state is _State.VALUE and self._quotes is not None and self._quotes.open:
            # No string of JSON at all: the first end tag was meant as one.
            self._buffer, self._value, self._quotes = self._value + self._buffer, "", None
            split = self.push("")
        if self._state is _State.TEXT:
            text = self._buffer.rstrip() if self.started else self._buffer
            split.content += text
        elif self._state is _State.OPEN and not truncated:
            split.content += self._raw_open + self._buffer
        elif not truncated and self._state is not _State.CLOSE:
            if self._state is _State.VALUE:
                self._end_value(split, self._strip_broken_end(self._buffer))
            self._end_arguments(split)
        self._buffer = ""
        self._state = _State.TEXT
        return split

    def _text(self, split: ToolSplit) -> bool:
        before, tag, rest = self._buffer.partition(_CALL)
        if tag:
            split.content += before.rstrip()
            self._raw_open, self._buffer = before[len(before.rstrip()) :] + _CALL, rest
            self._state = _State.OPEN
            return True
        # White space before a call is no content, so it waits for what follows it.
        body = self._buffer[: len(self._buffer) - partial_suffix(self._buffer, _CALL)].rstrip()
        split.content += body
        self._buffer = self._buffer[len(body) :]
        return False

    def _open(self, split: ToolSplit) -> bool:
        body = self._buffer.lstrip()
        if body.startswith(_FUNCTION):
            name, end, rest = body[len(_FUNCTION) :].partition(">")
            plausible = len(name) <= _MAX_NAME_CHARS and "<" not in name and "\n" not in name
            if end and name.strip() and plausible:
                self._begin_call(split, name.strip(), rest)
                return True
            if not end and plausible:
                return False
        elif _FUNCTION.startswith(body):
            return False
        split.content += self._raw_open
        self._state = _State.TEXT
        return True

    def _begin_call(self, split: ToolSplit, name: str, rest: str) -> None:
        self._function, self._buffer, self._state = name, rest, _State.BODY
        self._keys = set()
        split.calls.append(ToolDelta(self.started, id=self._new_id(), name=name, arguments="{"))
        self.started += 1

    def _body(self, split: ToolSplit) -> bool:
        """Find the next tag of a call; anything between tags is noise of a confused model."""
        at = self._buffer.find("<")
        if at < 0:
            self._buffer = ""
            return False
        self._buffer = self._buffer[at:]
        for tag, state in ((_FUNCTION_END, _State.CLOSE), (_CALL_END, _State.TEXT), (_CALL, _State.OPEN)):
            if self._buffer.startswith(tag):
                self._buffer = self._buffer[len(tag) :]
                self._raw_open = _CALL
                self._end_arguments(split)
                self._state = state
                return True
        if self._buffer.startswith(_PARAMETER):
            key, end, rest = self._buffer[len(_PARAMETER) :].partition(">")
            if end:
                self._begin_value(key.strip(), rest)
                return True
            if len(key) <= _MAX_NAME_CHARS:
                return False
        elif any(tag.startswith(self._buffer) for tag in (_FUNCTION_END, _CALL_END, _CALL, _PARAMETER)):
            return False
        self._buffer = self._buffer[1:]
        return True

    def _begin_value(self, key: str, rest: str) -> None:
        types = self._types.get(self._function, {}).get(key)
        self._key, self._buffer, self._state = key, rest, _State.VALUE
        # What has gone out can't be taken back, so the first value of a key stays, streamed or whole.
        self._repeated = key in self._keys
        self._keys.add(key)
        self._streams = types is None or types == {"string"}
        self._value, self._value_begun = "", False
        json_only = types is not None and not types <= BARE_TYPES and not self._ended
        self._quotes = JsonQuotes() if json_only else None

    def _in_value(self, split: ToolSplit) -> bool:
        if not self._value_begun:
            if not self._buffer:
                return False
            # Both spellings exist: <p>value</p>, and the value on lines of its own.
            self._buffer = self._buffer.removeprefix("\n")
            self._value_begun = True
            if self._streams:
                self._emit_value(split, f'{self._name()}"')
        found = _VALUE_END.search(self._buffer)
        if found and self._quotes is not None:
            self._quotes.feed(self._buffer[: found.start()])
            if self._quotes.open:
                self._quotes.feed(found[0])
                self._value += self._buffer[: found.end()]
                self._buffer = self._buffer[found.end() :]
                return True
        if found:
            value = self._buffer[: found.start()]
            self._buffer = self._buffer[found.end() :]
            self._end_value(split, value)
            self._state = _State.BODY
            if found[0] != _PARAMETER_END:
                self._end_arguments(split)
                self._state = _State.TEXT
            return True
        certain = _certain_len(self._buffer)
        if self._streams:
            self._emit_value(split, to_json(self._buffer[:certain])[1:-1])
        else:
            self._value += self._buffer[:certain]
            if self._quotes is not None:
                self._quotes.feed(self._buffer[:certain])
        self._buffer = self._buffer[certain:]
        return False

    def _end_value(self, split: ToolSplit, rest: str) -> None:
        if not self._value_begun and self._streams:
            self._emit_value(split, f'{self._name()}"')
        rest = rest.removesuffix("\n")
        if self._streams:
            self._emit_value(split, to_json(rest)[1:-1] + '"')
            return
        types = self._types.get(self._function, {}).get(self._key) or set()
        self._emit_value(split, self._name() + typed_json(self._value + rest, types))

    def _strip_broken_end(self, rest: str) -> str:
        """Drop an end tag that was cut off in the middle."""
        cut = _certain_len(rest)
        return rest[:cut] if rest[cut:].strip() else rest

    def _close(self, split: ToolSplit) -> bool:
        body = self._buffer.lstrip()
        if body.startswith(_CALL_END):
            self._buffer = body[len(_CALL_END) :]
        elif _CALL_END.startswith(body):
            return False
        self._state = _State.TEXT
        return True

    def _name(self) -> str:
        """Return what stands before a value: its key, and whatever parts it from the one before."""
        return f"{', ' if len(self._keys) > 1 else ''}{to_json(self._key)}: "

    def _end_arguments(self, split: ToolSplit) -> None:
        self._emit(split, "}")
        self.finished += 1

    def _emit_value(self, split: ToolSplit, arguments: str) -> None:
        if not self._repeated:
            self._emit(split, arguments)

    def _emit(self, split: ToolSplit, arguments: str) -> None:
        if not arguments:
            return
        index = self.started - 1
        if split.calls and split.calls[-1].index == index:
            split.calls[-1].arguments += arguments
        else:
            split.calls.append(ToolDelta(index, arguments=arguments))


def _certain_len(text: str) -> int:
    """Return how much of a value can't belong to its end: a final newline and the start of an end tag can."""
    at = text.find("<")
    while at >= 0:
        if _may_end(text[at:]):
            return at - 1 if at and text[at - 1] == "\n" else at
        at = text.find("<", at + 1)
    return len(text) - text.endswith("\n")


def _may_end(text: str) -> bool:
    if _PARAMETER_END.startswith(text) or _CALL_END.startswith(text) or _FUNCTION_END.startswith(text):
        return True
    return text.startswith(_FUNCTION_END) and _CALL_END.startswith(text[len(_FUNCTION_END) :].lstrip())
