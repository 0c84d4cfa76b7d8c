"""Typed reading of a client's JSON: every refusal names the field's path, the value and what is allowed.

Pure; knows nothing of HTTP or of what the fields mean. An explicit null counts as absent. Bounds and
defaults come from the type that describes the object, see rules.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import orjson

from transom.errors import RequestError
from transom.gateway.rules import Rule, Spec, spec_of, spec_of_rule

T = TypeVar("T")
_SHOWN_CHARS = 60
_CONTAINERS = (dict, list)
_KINDS = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}


def show(value: Any) -> str:
    """Return a short spelling of a client's value, fit for an error message."""
    if isinstance(value, (dict, list)):
        return f"{_article(_KINDS[type(value)])} of {len(value)}"
    text = repr(value) if isinstance(value, str) else "null" if value is None else str(value).lower()
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}... ({len(text)} characters)"


def kind_of(value: Any) -> str:
    """Return the JSON type of a parsed value, with its article."""
    return "null" if value is None else _article(_KINDS.get(type(value), type(value).__name__))


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def refuse(path: str, problem: str) -> RequestError:
    """Return the error for the field at `path`."""
    return RequestError(f"{path}: {problem}" if path else problem, param=path or None)


def nests_deeper(value: Any, limit: int) -> bool:
    """Say whether arrays and objects nest deeper than `limit`. Iterative on purpose, level by level."""
    level = [value] if type(value) in _CONTAINERS else []
    for _ in range(limit):
        if not level:
            return False
        level = [
            child
            for item in level
            for child in (item.values() if type(item) is dict else item)
            if type(child) in _CONTAINERS
        ]
    return bool(level)


def load_json(text: str | bytes | bytearray, limit: int) -> Any:
    """Parse JSON text; raise NestingError when it nests deeper than `limit`, else ValueError."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        if "depth limit" in error.msg:  # the parser's own, which is far above ours
            raise NestingError from None
        raise
    if nests_deeper(value, limit):
        raise NestingError
    return value


class NestingError(Exception):
    """JSON text nests deeper than is worked on."""


class Fields:
    """One JSON object at `path`; the root has the empty path. `spec` says what its fields may be."""

    def __init__(self, value: Any, path: str = "", spec: Spec | type[msgspec.Struct] | None = None) -> None:
        if not isinstance(value, dict):
            where = "" if path else "the body: "
            raise refuse(path, f"{where}expected an object, got {kind_of(value)}")
        self.raw: dict[str, Any] = value
        self.path = path
        self._spec = spec_of(spec) if isinstance(spec, type) else spec

    def at(self, name: str) -> str:
        """Return the path of a field."""
        return f"{self.path}.{name}" if self.path else name

    def has(self, name: str) -> bool:
        """Say whether the field is there and not null."""
        return self.raw.get(name) is not None

    def refuse(self, name: str, problem: str) -> RequestError:
        """Return the error for one field of this object."""
        return refuse(self.at(name), problem)

    def _rule(self, name: str) -> Rule:
        return _OPEN if self._spec is None else self._spec[name]

    def _get(self, name: str, kind: str, check: Callable[[Any], bool], default: T, required: bool) -> Any:
        value = self.raw.get(name)
        if value is None:
            if required:
                raise self.refuse(name, f"a required {kind} is missing")
            return default
        if not check(value):
            raise self.refuse(name, f"expected {_article(kind)}, got {kind_of(value)}")
        return value

    def text(self, name: str, default: Any = None, *, required: bool = False) -> Any:
        """Return a string field."""
        rule = self._rule(name)
        default = rule.default if default is None else default
        value = self._get(name, "string", lambda v: isinstance(v, str), default, required)
        if not isinstance(value, str):
            return value
        if rule.choices and value not in rule.choices:
            raise self.refuse(name, f"{show(value)} is not one of {', '.join(sorted(rule.choices))}")
        if rule.max_chars is not None and len(value) > rule.max_chars:
            raise self.refuse(name, f"{len(value)} characters, at most {rule.max_chars} are allowed")
        return value

    def flag(self, name: str) -> Any:
        """Return a boolean field."""
        default = self._rule(name).default
        return self._get(name, "boolean", lambda v: isinstance(v, bool), default, False)

    def integer(self, name: str, *, le: int | None = None) -> Any:
        """Return an integer field; 3.0 counts as 3. `le` is a bound beside the type's."""

        def whole(value: Any) -> bool:
            return not isinstance(value, bool) and (
                isinstance(value, int) or (isinstance(value, float) and value.is_integer())
            )

        rule = self._rule(name)
        value = self._get(name, "integer", whole, None, False)
        if value is None:
            return rule.default
        self._check_range(name, int(value), rule, le)
        return int(value)

    def number(self, name: str, *, le: float | None = None) -> Any:
        """Return a number field as a float. `le` is a bound beside the type's."""
        rule = self._rule(name)
        value = self._get(
            name, "number", lambda v: isinstance(v, (int, float)) and not isinstance(v, bool), None, False
        )
        if value is None:
            return rule.default
        self._check_range(name, value, rule, le)
        return float(value)

    def _check_range(self, name: str, value: float, rule: Rule, le: float | None) -> None:
        high = rule.le if le is None else le
        low = rule.ge
        if (low is not None and not value >= low) or (high is not None and not value <= high):
            allowed = [f"at least {low}"] * (low is not None) + [f"at most {high}"] * (high is not None)
            raise self.refuse(name, f"{show(value)} is out of range, {' and '.join(allowed)}")

    def array(self, name: str, *, required: bool = False) -> list[Any]:
        """Return an array field; absent is empty."""
        rule = self._rule(name)
        value: list[Any] = self._get(name, "array", lambda v: isinstance(v, list), [], required)
        if (required or self.has(name)) and len(value) < rule.min_len:
            raise self.refuse(name, f"{len(value)} items, at least {rule.min_len} needed")
        if rule.max_len is not None and len(value) > rule.max_len:
            raise self.refuse(name, f"{len(value)} items, at most {rule.max_len} are allowed")
        return value

    def object(self, name: str, *, required: bool = False) -> Fields | None:
        """Return an object field, ready to be read itself."""
        rule = self._rule(name)
        value = self._get(name, "object", lambda v: isinstance(v, dict), None, required)
        if value is None:
            return None
        if rule.values is not None and rule.max_len is not None and len(value) > rule.max_len:
            raise self.refuse(name, f"{len(value)} entries, at most {rule.max_len} are allowed")
        return Fields(value, self.at(name), spec_of_rule(rule))

    def objects(self, name: str) -> Iterator[Fields]:
        """Yield the objects of an array field."""
        spec = spec_of_rule(self._rule(name))
        for number, item in enumerate(self.array(name)):
            yield Fields(item, f"{self.at(name)}[{number}]", spec)


_OPEN = Rule()
