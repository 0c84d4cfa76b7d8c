"""The values of tool parameters: which JSON types a schema allows, and what a text means as one of them.

Pure; gateway process. The parser of tool calls and the grammar that forces them agree through this module.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_MAX_LOOKS = 20_000  # at parts of the schemas of one tool's parameters
# A parameter of these types alone may stand as bare text; any other is JSON, whose strings may hold end tags.
BARE_TYPES = frozenset({"string", "null", "boolean"})


def to_json(value: Any) -> str:
    """Return the JSON text of a value, non-ASCII characters as they are."""
    return json.dumps(value, ensure_ascii=False)


def parameter_types(function: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the JSON types that each parameter may have; a parameter that says none is left out.

    So are those after which all of them together are too much to look at.
    """
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    found: dict[str, set[str]] = {}
    looks = 0
    for key, schema in properties.items() if isinstance(properties, Mapping) else ():
        types, cost = _named_types(schema, parameters)
        looks += cost
        if looks > _MAX_LOOKS:
            break
        if types:
            found[key] = types
    return found


def _named_types(schema: Any, root: Any) -> tuple[set[str], int]:
    """Return the types that a schema names itself, in its alternatives or behind local references.

    And at how many parts and values this looked. At each once: the ways to a part may be without number.
    """
    types: set[str] = set()
    seen: set[int] = set()
    stack = [schema]
    cost = 0
    while stack:
        one = stack.pop()
        cost += 1
        if not isinstance(one, Mapping) or id(one) in seen:
            continue
        seen.add(id(one))
        kind = one.get("type")
        if isinstance(kind, (str, list)):
            types |= {kind} if isinstance(kind, str) else {item for item in kind if isinstance(item, str)}
            continue
        values = one["enum"] if isinstance(one.get("enum"), list) else []
        cost += len(values)
        types = types.union(*(json_types(value) for value in (*values, *_const(one))))
        if isinstance(one.get("$ref"), str):
            stack.append(resolve(root, one["$ref"]))
        for name in ("anyOf", "oneOf", "allOf"):
            options = one.get(name)
            if isinstance(options, list):
                stack += options
    return types, cost


def _const(schema: Mapping[str, Any]) -> Iterator[Any]:
    if "const" in schema:
        yield schema["const"]


def resolve(root: Any, ref: str) -> Any:
    """Return what a local reference such as #/$defs/Colour points at; None when there is nothing."""
    if not ref.startswith("#/"):
        return root if ref == "#" else None
    found = root
    for step in ref[2:].split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def typed_json(text: str, types: set[str]) -> str:
    """Return the JSON text of a value that is not, or not only, a string; fall back to a string."""
    stripped = text.strip()
    value: Any
    if stripped in _PYTHON_WORDS:
        value = _PYTHON_WORDS[stripped]
    else:
        try:
            value = json.loads(stripped, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            return to_json(text)
    if types and not json_types(value) & types:
        return to_json(text)
    try:
        shown = json.dumps(value, ensure_ascii=False, allow_nan=False)
        shown.encode()
    except ValueError:
        # 1e999, or half a surrogate pair: JSON that Python reads, but writes as what is none.
        return stripped
    return shown


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)


class JsonQuotes:
    """Follows JSON text and tells whether it ends inside a string."""

    def __init__(self) -> None:
        self.open = False
        self._escaped = False

    def feed(self, text: str) -> None:
        """Take more text."""
        for char in text:
            if self._escaped:
                self._escaped = False
            elif char == '"':
                self.open = not self.open
            else:
                self._escaped = self.open and char == "\\"


def json_types(value: Any) -> set[str]:
    """Return the names that JSON Schema has for the type of a value."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number", "integer"} if value.is_integer() else {"number"}
    return {"string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"}
