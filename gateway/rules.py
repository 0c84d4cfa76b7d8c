"""Bounds, choices and defaults of the API's fields, read from the msgspec types that describe them.

Pure; used by the gateway's parser. The same types make the OpenAPI document, so that neither can say
something that the other doesn't.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect


@dataclass(frozen=True, slots=True)
class Rule:
    """What a type says of one field. `inner` are the types of the objects in it, `values` those of a map."""

    ge: float | None = None
    le: float | None = None
    min_len: int = 0
    max_len: int | None = None
    max_chars: int | None = None
    choices: tuple[str, ...] = ()
    default: Any = None
    inner: tuple[type[msgspec.Struct], ...] = ()
    values: Rule | None = None


class Spec:
    """The rules of an object that may be any of several structs."""

    def __init__(self, rules: Mapping[str, Rule], values: Rule | None = None) -> None:
        self._rules = rules
        self._values = values

    def __getitem__(self, name: str) -> Rule:
        rule = self._rules.get(name, self._values)
        assert rule is not None, f"{name!r} is read, but no type in api_requests.py has it"
        return rule


@cache
def spec_of(*structs: type[msgspec.Struct]) -> Spec:
    """Return the rules for objects of these types; where they differ, what any of them allows."""
    merged: dict[str, Rule] = {}
    for struct in structs:
        info = inspect.type_info(struct)
        assert isinstance(info, inspect.StructType)
        if info.tag_field is not None:
            merged.setdefault(info.tag_field, Rule())
        for field in info.fields:
            rule = _rule(field.type)
            if field.default is not msgspec.NODEFAULT:
                rule = replace(rule, default=field.default)
            known = merged.get(field.name)
            if known is not None:
                rule = replace(rule, inner=tuple(dict.fromkeys((*known.inner, *rule.inner))))
            merged[field.name] = rule
    return Spec(merged)


@cache
def spec_of_rule(rule: Rule) -> Spec | None:
    """Return the rules of the objects inside a field; None where a type leaves them open."""
    if rule.values is not None:
        return Spec({}, rule.values)
    return spec_of(*rule.inner) if rule.inner else None


def _rule(type_: inspect.Type) -> Rule:
    rule = Rule()
    for one, extra in _alternatives(type_, {}):
        if isinstance(one, (inspect.IntType, inspect.FloatType)):
            low, high = extra.get("minimum", one.ge), extra.get("maximum", one.le)
            rule = replace(rule, ge=low, le=high)
        elif isinstance(one, inspect.StrType):
            rule = replace(rule, max_chars=one.max_length)
        elif isinstance(one, inspect.LiteralType):
            rule = replace(rule, choices=tuple(value for value in one.values if isinstance(value, str)))
        elif isinstance(one, inspect.StructType):
            rule = replace(rule, inner=(*rule.inner, one.cls))
        elif isinstance(one, inspect.DictType):
            rule = replace(rule, values=_map_values(one), max_len=one.max_length)
        elif isinstance(one, inspect.ListType):
            rule = replace(
                rule, min_len=one.min_length or 0, max_len=one.max_length, inner=_rule(one.item_type).inner
            )
    return rule


def _map_values(type_: inspect.DictType) -> Rule | None:
    return None if isinstance(type_.value_type, inspect.AnyType) else _rule(type_.value_type)


def _alternatives(
    type_: inspect.Type, extra: Mapping[str, Any]
) -> Iterator[tuple[inspect.Type, Mapping[str, Any]]]:
    if isinstance(type_, inspect.Metadata):
        yield from _alternatives(type_.type, {**extra, **(type_.extra_json_schema or {})})
    elif isinstance(type_, inspect.UnionType):
        for one in type_.types:
            yield from _alternatives(one, extra)
    else:
        yield type_, extra
