"""Typed reading of a client's JSON: every refusal names the field's path, the value and what is allowed.

Pure; knows nothing of HTTP or of what the fields mean. An explicit null counts as absent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

from transom.errors import RequestError

T = TypeVar("T")
_SHOWN_CHARS = 60
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


def check_depth(value: Any, limit: int) -> None:
    """Raise RequestError when arrays and objects nest deeper than `limit`. Iterative on purpose."""
    stack: list[tuple[Any, int]] = [(value, 1)]
    while stack:
        item, depth = stack.pop()
        if isinstance(item, (dict, list)):
            if depth > limit:
                raise refuse("", f"the body nests deeper than {limit} levels")
            stack.extend((child, depth + 1) for child in (item.values() if isinstance(item, dict) else item))


class Fields:
    """One JSON object at `path`; the root has the empty path."""

    def __init__(self, value: Any, path: str = "") -> None:
        if not isinstance(value, dict):
            where = "" if path else "the body: "
            raise refuse(path, f"{where}expected an object, got {kind_of(value)}")
        self.raw: dict[str, Any] = value
        self.path = path

    def at(self, name: str) -> str:
        """Return the path of a field."""
        return f"{self.path}.{name}" if self.path else name

    def has(self, name: str) -> bool:
        """Say whether the field is there and not null."""
        return self.raw.get(name) is not None

    def refuse(self, name: str, problem: str) -> RequestError:
        """Return the error for one field of this object."""
        return refuse(self.at(name), problem)

    def _get(self, name: str, kind: str, check: Callable[[Any], bool], default: T, required: bool) -> Any:
        value = self.raw.get(name)
        if value is None:
            if required:
                raise self.refuse(name, f"a required {kind} is missing")
            return default
        if not check(value):
            raise self.refuse(name, f"expected {_article(kind)}, got {kind_of(value)}")
        return value

    def text(
        self,
        name: str,
        default: Any = None,
        *,
        required: bool = False,
        choices: Collection[str] | None = None,
        max_chars: int | None = None,
    ) -> Any:
        """Return a string field."""
        value = self._get(name, "string", lambda v: isinstance(v, str), default, required)
        if isinstance(value, str) and choices is not None and value not in choices:
            raise self.refuse(name, f"{show(value)} is not one of {', '.join(sorted(choices))}")
        if isinstance(value, str) and max_chars is not None and len(value) > max_chars:
            raise self.refuse(name, f"{len(value)} characters, at most {max_chars} are allowed")
        return value

    def flag(self, name: str, default: Any = False) -> Any:
        """Return a boolean field."""
        return self._get(name, "boolean", lambda v: isinstance(v, bool), default, False)

    def integer(self, name: str, default: Any = None, *, ge: int | None = None, le: int | None = None) -> Any:
        """Return an integer field; 3.0 counts as 3."""

        def whole(value: Any) -> bool:
            return not isinstance(value, bool) and (
                isinstance(value, int) or (isinstance(value, float) and value.is_integer())
            )

        value = self._get(name, "integer", whole, None, False)
        if value is None:
            return default
        self._check_range(name, int(value), ge, le)
        return int(value)

    def number(
        self, name: str, default: Any = None, *, ge: float | None = None, le: float | None = None
    ) -> Any:
        """Return a number field as a float."""
        value = self._get(
            name, "number", lambda v: isinstance(v, (int, float)) and not isinstance(v, bool), None, False
        )
        if value is None:
            return default
        self._check_range(name, value, ge, le)
        return float(value)

    def _check_range(self, name: str, value: float, ge: float | None, le: float | None) -> None:
        if (ge is not None and not value >= ge) or (le is not None and not value <= le):
            allowed = [f"at least {ge}"] * (ge is not None) + [f"at most {le}"] * (le is not None)
            raise self.refuse(name, f"{show(value)} is out of range, {' and '.join(allowed)}")

    def array(
        self, name: str, *, required: bool = False, min_len: int = 0, max_len: int | None = None
    ) -> list[Any]:
        """Return an array field; absent is empty."""
        value: list[Any] = self._get(name, "array", lambda v: isinstance(v, list), [], required)
        if (required or self.has(name)) and len(value) < min_len:
            raise self.refuse(name, f"{len(value)} items, at least {min_len} needed")
        if max_len is not None and len(value) > max_len:
            raise self.refuse(name, f"{len(value)} items, at most {max_len} are allowed")
        return value

    def object(self, name: str, *, required: bool = False) -> Fields | None:
        """Return an object field, ready to be read itself."""
        value = self._get(name, "object", lambda v: isinstance(v, dict), None, required)
        return None if value is None else Fields(value, self.at(name))

    def objects(self, name: str, *, min_len: int = 0, max_len: int | None = None) -> Iterator[Fields]:
        """Yield the objects of an array field."""
        for number, item in enumerate(self.array(name, min_len=min_len, max_len=max_len)):
            yield Fields(item, f"{self.at(name)}[{number}]")
