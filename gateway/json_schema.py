"""Checks a client's JSON Schema and returns what of it constrains an answer.

Every refusal names the path of the keyword. What remains is bounded in size, depth and cost; whether it can
be compiled is for the grammar library to say. Pure; gateway process.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import orjson

from transom.gateway.fields import kind_of, refuse, show
from transom.gateway.tool_values import resolve

# Between tokens may stand a space, or a new line and so many blanks for each level: what models write. A weak
# one that may put more blanks there puts as many as it may, at any temperature.
_BLANKS_A_LEVEL = 4
_MAX_LEVELS = 8
_OPEN_LEVELS = 2  # of a value that the schema leaves free
MAX_DEPTH = 24
MAX_SCHEMA_BYTES = 64 * 1024
_MAX_PROPERTIES = 500  # of one object: each one that may be left out makes every step dearer
_MAX_STEPS = 10_000  # of all multipleOf: an automaton has as many states
_MAX_COUNT = 1_000_000
# The grammar library counts by way of floats: beyond, answers would be wrong; far beyond, the process ends.
_MAX_NUMBER = 2**53
_MAX_HOPS = 32

TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
FORMATS = (
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid",
)  # fmt: skip
# They would change which answers are right, and the grammar can't hold to them.
UNSUPPORTED = (
    "$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired", "dependentSchemas",
    "else", "if", "maxContains", "minContains", "not", "propertyNames", "then", "unevaluatedItems",
    "unevaluatedProperties",
)  # fmt: skip
_ONE = ("additionalProperties", "items", "additionalItems")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_DEFS = ("$defs", "definitions")
_MAPS = ("$defs", "definitions", "patternProperties", "properties")
_COUNTS = ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties")
_LOWER, _UPPER = ("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")


def check_schema(schema: Any, path: str) -> dict[str, Any]:
    """Return the constraining part of the schema at `path`; raise RequestError that names what is wrong."""
    if not isinstance(schema, dict):
        raise refuse(path, f"expected an object, got {kind_of(schema)}")
    size = len(orjson.dumps(schema))
    if size > MAX_SCHEMA_BYTES:
        raise refuse(path, f"a schema of {size} bytes, at most {MAX_SCHEMA_BYTES} are allowed")
    checked: dict[str, Any] = _Checker(schema, path).schema(schema, path, 1)
    return checked


class _Checker:
    def __init__(self, root: dict[str, Any], path: str) -> None:
        self._root = root
        self._root_path = path
        self._steps = Fraction(0)
        self._keywords: dict[str, Callable[[Any, str, int], Any]] = {
            **dict.fromkeys(_ONE, self._one),
            **dict.fromkeys(_LISTS, self._list),
            **dict.fromkeys(_MAPS, self._map),
            **dict.fromkeys(_COUNTS, _count),
            **dict.fromkeys(_LOWER, partial(_bound, side=1)),
            **dict.fromkeys(_UPPER, partial(_bound, side=-1)),
            "$ref": self._ref,
            "const": _any,
            "enum": _enum,
            "format": _format,
            "multipleOf": self._multiple,
            "pattern": _text,
            "required": _names,
            "type": _type,
        }

    def schema(self, schema: Any, path: str, depth: int) -> Any:
        """Keep the keywords that count, in their order: it is the order of the answer's properties."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise refuse(path, f"expected a schema, got {kind_of(schema)}")
        if depth > MAX_DEPTH:
            raise refuse(path, f"the schema nests deeper than {MAX_DEPTH} levels")
        kept: dict[str, Any] = {}
        for name, value in schema.items():
            at = f"{path}.{name[:100]}"
            if name in UNSUPPORTED:
                raise refuse(at, "this keyword is not supported in a schema for answers")
            if name == "uniqueItems" and value is not False:
                raise refuse(at, "this keyword is not supported in a schema for answers, except as false")
            check = self._keywords.get(name)
            # Whatever else there is describes, and as JSON Schema has it changes nothing.
            if check is not None:
                kept[name] = check(value, at, depth)
        if len(kept.get("properties", ())) > _MAX_PROPERTIES:
            count = len(kept["properties"])
            raise refuse(f"{path}.properties", f"{count} properties, at most {_MAX_PROPERTIES} are allowed")
        return kept

    def _one(self, value: Any, path: str, depth: int) -> Any:
        return (
            self._list(value, path, depth) if isinstance(value, list) else self.schema(value, path, depth + 1)
        )

    def _list(self, value: Any, path: str, depth: int) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise refuse(path, f"expected an array of schemas that is not empty, got {show(value)}")
        return [self.schema(item, f"{path}[{number}]", depth + 1) for number, item in enumerate(value)]

    def _map(self, value: Any, path: str, depth: int) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise refuse(path, f"expected an object of schemas, got {kind_of(value)}")
        return {name: self.schema(item, f"{path}.{name[:100]}", depth + 1) for name, item in value.items()}

    def _ref(self, value: Any, path: str, depth: int) -> str:
        if not isinstance(value, str) or not value.startswith("#"):
            raise refuse(path, f"{show(value)} does not point into the schema itself")
        target = resolve(self._root, value)
        if not isinstance(target, (dict, bool)):
            raise refuse(path, f"{show(value)} points at nothing in {self._root_path}")
        for _ in range(_MAX_HOPS):
            further = target.get("$ref") if isinstance(target, dict) else None
            if not isinstance(further, str):
                return value
            target = resolve(self._root, further)
        raise refuse(path, f"{show(value)} leads from reference to reference, more than {_MAX_HOPS} times")

    def _multiple(self, value: Any, path: str, depth: int) -> Any:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise refuse(path, f"expected a number above 0, got {show(value)}")
        step = Fraction(str(value))
        self._steps += step.numerator
        if self._steps > _MAX_STEPS:
            raise refuse(
                path, f"{show(value)} is too large a step; all of a schema may be {_MAX_STEPS} together"
            )
        return value


def _any(value: Any, path: str, depth: int) -> Any:
    stack = [value]
    while stack:
        one = stack.pop()
        if isinstance(one, (dict, list)):
            stack.extend(one.values() if isinstance(one, dict) else one)
        elif isinstance(one, (int, float)) and abs(one) > _MAX_NUMBER:
            raise refuse(path, f"{show(one)} is out of range, -{_MAX_NUMBER} to {_MAX_NUMBER}")
    return value


def _enum(value: Any, path: str, depth: int) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise refuse(path, f"expected an array that is not empty, got {show(value)}")
    return [_any(item, path, depth) for item in value]


def _count(value: Any, path: str, depth: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
        raise refuse(path, f"expected an integer, got {show(value)}")
    if not 0 <= value <= _MAX_COUNT:
        raise refuse(path, f"{show(value)} is out of range, 0 to {_MAX_COUNT}")
    return int(value)


def _bound(value: Any, path: str, depth: int, *, side: int) -> Any:
    """Return a lower (`side` 1) or an upper bound (-1), drawn in to what the grammar library can count."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise refuse(path, f"expected a number, got {show(value)}")
    if value * side > _MAX_NUMBER:
        raise refuse(path, f"{show(value)} is out of range, at {'most' if side > 0 else 'least'}"
                           f" {side * _MAX_NUMBER} is allowed")  # fmt: skip
    return value if abs(value) <= _MAX_NUMBER else -side * _MAX_NUMBER


def _format(value: Any, path: str, depth: int) -> str:
    if value not in FORMATS:
        raise refuse(path, f"{show(value)} is not one of {', '.join(FORMATS)}")
    return str(value)


def _text(value: Any, path: str, depth: int) -> str:
    if not isinstance(value, str):
        raise refuse(path, f"expected a string, got {kind_of(value)}")
    return value


def _names(value: Any, path: str, depth: int) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise refuse(path, f"expected an array of strings, got {show(value)}")
    return list(dict.fromkeys(value))


def _type(value: Any, path: str, depth: int) -> Any:
    names = value if isinstance(value, list) else [value]
    for name in names or [value]:
        if name not in TYPES:
            raise refuse(path, f"{show(name)} is not one of {', '.join(TYPES)}")
    return value


def inline_json(schema: dict[str, Any]) -> str:
    """Return the body of a grammar rule for the JSON texts that match a checked schema."""
    most = _BLANKS_A_LEVEL * min(levels(schema), _MAX_LEVELS)
    blanks = rf" |\r?\n[ \t]{{0,{most}}}"
    return "%json " + json.dumps({"x-guidance": {"whitespace_pattern": blanks}, **schema})


def levels(schema: Any) -> int:
    """Return how deep the answers to a checked schema nest, about: only their indentation depends on it."""
    if not isinstance(schema, dict):
        return _OPEN_LEVELS if schema is True else 0
    if "$ref" in schema:
        return _MAX_LEVELS
    if "enum" in schema or "const" in schema:
        return 0
    inner = [one for name in _MAPS if name not in _DEFS for one in schema.get(name, {}).values()]
    for name in _ONE:
        value = schema.get(name, ())
        inner += value if isinstance(value, list) else [value] if value != () else []
    inner += schema.get("prefixItems", ())
    options = [levels(one) for name in ("allOf", "anyOf", "oneOf") for one in schema.get(name, ())]
    types = schema.get("type", () if options else ("object", "array"))
    own = 1 if inner else 0
    if not inner and not {"object", "array"}.isdisjoint([types] if isinstance(types, str) else types):
        own = _OPEN_LEVELS
    return max([own + max(map(levels, inner), default=0), *options])
