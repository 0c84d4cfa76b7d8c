"""Writes the grammar of MiMo's tool calls, such that `tool_parser` reads each as whole arguments.

Parameters come in any order, each at most once, the required ones always. A strict tool's values match its
schema as `tool_parser` understands them: strings stand bare, everything else as JSON. Pure; gateway process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import regex_to_lark

from transom.gateway.fields import refuse, show
from transom.gateway.json_schema import inline_json
from transom.gateway.schema import AnswerSchema
from transom.gateway.tool_values import BARE_TYPES, json_types, parameter_types, resolve, to_json, typed_json
from transom.grammar import MAX_GRAMMAR_BYTES
from transom.tokenizer import Tokenizer

_MAX_ANY_ORDER = 60  # a parameter of a rule has 64 bits; beyond it parameters come in the schema's order
_KEY = re.compile(r"[^<>\n]{1,200}")
# What the parser takes for the end of a call, wherever it stands.
_ENDS = r"/(?s:.*)(<\/tool_call>|<\/function>[ \t\r\n]*<\/tool_call>)(?s:.*)/"
_CLOSE = '"</parameter>"'
_FORMATS = {
    "date": r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])",
    "time": r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)",
    "uuid": r"[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
    "ipv4": r"((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)",
    "email": r"[A-Za-z0-9_+\-]+(\.[A-Za-z0-9_+\-]+)*@[A-Za-z0-9\-]+(\.[A-Za-z0-9\-]+)+",
}
_FORMATS["date-time"] = f"{_FORMATS['date']}T{_FORMATS['time']}"
_DEFS = ("$defs", "definitions")
_WHOLE = ("$ref", "allOf", "anyOf", "const", "enum", "oneOf", "patternProperties")


class ToolGrammar:
    """The calls of one request. `rules` are what the returned rule bodies refer to."""

    def __init__(
        self, tools: Sequence[Mapping[str, Any]], strict: Mapping[str, AnswerSchema], tokenizer: Tokenizer
    ) -> None:
        opens, closes = tokenizer.token_id("<tool_call>"), tokenizer.token_id("</tool_call>")
        begin = '"<tool_call>"' if opens is None else f"<[{opens}]>"
        end = '"</tool_call>"' if closes is None else f"<[{closes}]>"
        self._begins_by_token = opens is not None
        self._names = {tool["function"]["name"]: number for number, tool in enumerate(tools)}
        self.rules = [
            "BLANKS: /[ \\n]{1,4}/",
            "any_text[lazy]: ANY_TEXT",
            f"ANY_TEXT: /(?s:.*)<\\/parameter>/ & ~{_ENDS}",
            f'call: {begin} BLANKS? "<function=" call_rest',
            "call_rest: " + " | ".join(f'"{name}>" tool_{n}' for name, n in self._names.items()),
            f'call_end: BLANKS? "</function>" BLANKS? {end}',
        ]
        size = 0
        for number, tool in enumerate(tools):
            function = tool["function"]
            rules = _Tool(f"tool_{number}", function, strict.get(function["name"])).rules()
            # Each strict parameter stands with all definitions of its schema: don't make much of it in vain.
            size += sum(map(len, rules))
            if size > MAX_GRAMMAR_BYTES:
                problem = f"the grammar of their calls is over {MAX_GRAMMAR_BYTES} bytes, the limit"
                raise refuse("tools", problem)
            self.rules += rules

    def forced(self, name: str | None, *, begun: bool, single: bool) -> str:
        """Return the body of one call or more; `begun`: the prompt ends within the first one."""
        first = f"tool_{self._names[name]}" if name is not None else "call_rest"
        if not begun:
            first = "BLANKS? call"
        return first if single else f"{first} (BLANKS? call)*"

    def calls(self, *, single: bool) -> str:
        """Return the body of an answer that only calls tools."""
        return self.forced(None, begun=False, single=single)

    def among_text(self, *, single: bool, param: str) -> str:
        """Return the body of free text with calls in it; `param` is what asks for it."""
        if not self._begins_by_token:
            raise refuse(param, "this model's calls can be held to that only where one is required")
        # The spelling of the token in ordinary ones would begin a call that nothing constrains.
        self.rules.append("TEXT: /(?s:.+)/ & ~/(?s:.*)<tool_call>(?s:.*)/")
        return "TEXT? call TEXT? | TEXT?" if single else "TEXT? (call TEXT?)*"


class _Tool:
    """The rules of one tool: `name` is the rule of everything after <function=NAME>."""

    def __init__(self, name: str, function: Mapping[str, Any], strict: AnswerSchema | None) -> None:
        self._name = name
        self._strict = strict
        self._root: Mapping[str, Any] = strict.schema if strict else function.get("parameters") or {}
        self._types = parameter_types({"parameters": self._root})
        self._more: list[str] = []

    def rules(self) -> list[str]:
        name = self._name
        properties = self._root.get("properties")
        known = properties if isinstance(properties, Mapping) else {}
        listed = self._root.get("required")
        required = {key for key in listed if isinstance(key, str)} if isinstance(listed, list) else set()
        if self._strict is not None:
            self._check_root(self._strict.param, known, required)
        keys = [
            key
            for key in dict.fromkeys((*known, *sorted(required)))
            if known.get(key) is not False and self._writable(key)
        ]
        undeclared = self._root and "properties" not in self._root
        if undeclared and not keys and self._strict is None:
            return [f'{name}: (BLANKS? "<parameter=" /[A-Za-z0-9_.\\-]{{1,64}}/ ">" any_text)* call_end']
        params = []
        for number, key in enumerate(keys):
            rule = f"{name}_v{number}"
            self._value(rule, key, known.get(key, {}))
            params.append(f"BLANKS? {to_json(f'<parameter={key}>')} {rule}")
        # The required ones come first: their bits are then one range.
        order = sorted(range(len(keys)), key=lambda number: keys[number] not in required)
        needed = sum(key in required for key in keys)
        return [*_in_any_order(name, [params[i] for i in order], needed), *self._more]

    def _check_root(self, path: str, known: Mapping[str, Any], required: set[str]) -> None:
        """Refuse what says more of strict parameters all together than which there are and must be."""
        most = len({*known, *required})
        unheld = [name for name in _WHOLE if name in self._root]
        unheld += ["minProperties"] * (self._root.get("minProperties", 0) > len(required))
        unheld += ["maxProperties"] * (self._root.get("maxProperties", most) < most)
        for name in unheld:
            raise refuse(f"{path}.{name}", "not supported for all of a tool's strict parameters together")
        more = self._root.get("additionalProperties", True)
        for key in sorted(required):
            if known.get(key) is False or (key not in known and more not in (True, {})):
                raise refuse(f"{path}.required", f"{show(key)} is not among the properties that may be there")

    def _writable(self, key: str) -> bool:
        fits = _KEY.fullmatch(key) is not None and key == key.strip()
        if not fits and self._strict is not None:
            at = f"{self._strict.param}.properties"
            raise refuse(at, f"the name {show(key)} can't be written in a call of this model")
        return fits

    def _value(self, rule: str, key: str, schema: Any) -> None:
        if self._strict is None:
            self._more += self._bare(rule, [])
            return
        path = f"{self._strict.param}.properties.{key[:100]}"
        types = self._types.get(key, set())
        facts = self._facts(schema)
        listed = facts.get("enum", [facts["const"]] if "const" in facts else None)
        if not types and facts:
            raise refuse(path, "a strict parameter needs a type")
        if listed is not None:
            self._more.append(f"{rule}: " + " | ".join(_literal(value, types, path) for value in listed))
        elif types == {"string"}:
            self._more += self._bare(rule, _text_patterns(facts, path))
        elif not types or (types <= BARE_TYPES and "string" in types and _plain(facts)):
            # Whatever is written here is read as a value of one of the types.
            self._more += self._bare(rule, [])
        else:
            defs = {name: self._root[name] for name in _DEFS if name in self._root}
            self._check_refs(facts, path)
            body = inline_json({**facts, **defs})
            self._more += [f"{rule}: BLANKS? {rule}_j BLANKS? {_CLOSE}", f"{rule}_j: {body}"]

    def _facts(self, schema: Any) -> dict[str, Any]:
        """Return the keywords of a schema, those behind one reference included."""
        for _ in range(8):
            if not isinstance(schema, Mapping) or "$ref" not in schema:
                break
            target = resolve(self._root, schema["$ref"])
            rest = {name: value for name, value in schema.items() if name != "$ref"}
            schema = {**target, **rest} if isinstance(target, Mapping) else rest
        return dict(schema) if isinstance(schema, Mapping) else {}

    def _check_refs(self, value: Any, path: str) -> None:
        """Refuse references that point outside the definitions: a value stands without the rest."""
        if isinstance(value, Mapping):
            ref = value.get("$ref")
            if isinstance(ref, str) and not ref.startswith(tuple(f"#/{name}/" for name in _DEFS)):
                raise refuse(f"{path}.$ref", f"{show(ref)}: strict parameters may refer to #/$defs/ only")
            for name, item in value.items():
                self._check_refs(item, f"{path}.{name}")
        elif isinstance(value, list):
            for number, item in enumerate(value):
                self._check_refs(item, f"{path}[{number}]")

    def _bare(self, rule: str, patterns: list[str]) -> list[str]:
        """Return the rules of a string as it stands, up to its end tag.

        The parser takes one newline off each end, so a value of a known form has none there or both.
        """
        token = rule.upper()
        if not patterns:
            return [f"{rule}: any_text"]
        return [
            f"{rule}[lazy]: {token}",
            f"{token}_B: " + " & ".join(patterns),
            f"{token}_U: {token}_B & ~/\\n(?s:.*)/ & ~/(?s:.*)\\n/",
            f'{token}_F: ("\\n" {token}_B "\\n" | {token}_U) {_CLOSE}',
            f"{token}: {token}_F & ~{_ENDS}",
        ]


def _in_any_order(name: str, params: Sequence[str], needed: int) -> list[str]:
    """Return the rules for each of `params` at most once, the first `needed` of them exactly once."""
    if not params:
        return [f"{name}: call_end"]
    if len(params) > _MAX_ANY_ORDER:
        listed = [f"({param})" if i < needed else f"({param})?" for i, param in enumerate(params)]
        return [f"{name}: {' '.join(listed)} call_end"]
    rest = f"{name}_p"
    done = f'"" %if is_ones([0:{needed}])' if needed else '""'
    options = [f"{param} {rest}::set_bit({i}) %if bit_clear({i})" for i, param in enumerate(params)]
    return [f"{name}: {rest}::0x0 call_end", f"{rest}::_: " + "\n  | ".join([done, *options])]


def _literal(value: Any, types: set[str], path: str) -> str:
    """Return the rule body of one listed value, spelt so that the parser reads just that."""
    bare = isinstance(value, str) and (types == {"string"} or typed_json(value, types) == to_json(value))
    text = value if bare else to_json(value)
    if not types & json_types(value) or (not bare and typed_json(text, types) != text):
        raise refuse(path, f"{show(value)} is not of the parameter's type")
    if "</" in text:
        raise refuse(path, f"{show(value)} can't be written in a call of this model")
    if text != text.strip("\n"):
        return f"{to_json(chr(10) + text + chr(10))} {_CLOSE}"
    return f'"\\n"? {to_json(text)} "\\n"? {_CLOSE}'


def _plain(facts: Mapping[str, Any]) -> bool:
    return not any(
        name in facts for name in ("maxLength", "minLength", "pattern", "format", "allOf")
    ) and all(
        not isinstance(option, Mapping) or set(option) <= {"type"}
        for name in ("anyOf", "oneOf")
        for option in facts.get(name, ())
    )


def _text_patterns(facts: Mapping[str, Any], path: str) -> list[str]:
    """Return the terminals that a bare string must match all of; none for any text."""
    for name in ("anyOf", "oneOf", "allOf"):
        if name in facts:
            raise refuse(f"{path}.{name}", "not supported for a strict parameter of type string")
    found = []
    if "minLength" in facts or "maxLength" in facts:
        found.append(f"/(?s:.{{{facts.get('minLength', 0)},{facts.get('maxLength', '')}}})/")
    if "pattern" in facts:
        found.append(f"/{_searched(facts['pattern'], f'{path}.pattern')}/")
    if "format" in facts:
        if facts["format"] not in _FORMATS:
            known = ", ".join(sorted(_FORMATS))
            raise refuse(f"{path}.format", f"{show(facts['format'])} is not one of {known}, for a parameter")
        found.append(f"/{regex_to_lark(_FORMATS[facts['format']], 'd')}/")
    return found


def _searched(pattern: str, path: str) -> str:
    """Return the regular expression of all texts in which `pattern` is found somewhere."""
    start, end = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[start : len(pattern) - end]
    signs = _signs(inner, path)
    if signs & {"^", "$"} or ((start or end) and "|" in signs):
        raise refuse(path, "^ and $ are supported at the ends only, and not beside |")
    head, tail = "" if start else "(?s:.*)", "" if end else "(?s:.*)"
    return f"{head}({regex_to_lark(inner, 'dw')}){tail}"


def _signs(pattern: str, path: str) -> set[str]:
    """Return which of ^ and $ stand in a regular expression outside of classes, and | outside of groups too.

    Raise RequestError where it ends groups that it has not begun, or begins what it doesn't end: within
    another expression it would become something else.
    """
    groups = classes = first = 0  # `first`: where a class takes even ] for a character
    found = set()
    escaped = False
    for at, char in enumerate(pattern):
        if escaped or char == "\\":
            escaped = not escaped
        elif char == "[":
            classes, first = classes + 1, at + 1 + pattern.startswith("^", at + 1)
        elif classes:
            classes -= char == "]" and at > first
        elif char in "()":
            groups += 1 if char == "(" else -1
            if groups < 0:
                break
        elif char in "^$" or (char == "|" and not groups):
            found.add(char)
    if groups or classes or escaped:
        raise refuse(path, f"{show(pattern)} is no regular expression")
    return found
