"""The grammars of answers: what they let through is right, by independent judges of schemas and of calls."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from tests.grammar_walk import matcher_of, random_answer
from transom.errors import RequestError
from transom.gateway.config import GatewayConfig
from transom.gateway.grammar import answer_grammar
from transom.gateway.json_schema import MAX_DEPTH, check_schema, inline_json, levels
from transom.gateway.output import ChoiceOutput, Delta
from transom.gateway.parse import parse_chat
from transom.gateway.prepare import Model, chat_output
from transom.gateway.prompt import Prompt
from transom.gateway.reasoning_parser import ReasoningParser
from transom.gateway.responses import join_calls
from transom.gateway.schema import ChatRequest
from transom.gateway.tool_grammar import ToolGrammar
from transom.gateway.tool_values import parameter_types
from transom.grammar import grammar_tokenizer
from transom.messages import Grammar, TokenChunk

MODEL = Model.load(GatewayConfig())
TOKENIZER = MODEL.tokenizer
TALKS = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return grammar_tokenizer(TOKENIZER, TOKENIZER.eos_ids)


def chat(**fields: Any) -> ChatRequest:
    return parse_chat(json.dumps({"messages": TALKS, **fields}).encode(), MODEL.limits)


def grammar_of(request: ChatRequest) -> tuple[Grammar, Prompt]:
    prompt = MODEL.builder.chat(request)
    grammar = answer_grammar(request, prompt, TOKENIZER)
    assert grammar is not None
    return grammar, prompt


def read(request: ChatRequest, prompt: Prompt, ids: list[int], finish: str = "stop") -> tuple[Any, Delta]:
    """Return the parsed answer to these tokens, as the gateway reads it."""
    output: ChoiceOutput = chat_output(TOKENIZER, request, ReasoningParser(), prompt.forced)
    delta = output.push(TokenChunk(request_id="r", index=0, token_ids=ids))
    delta.add(output.push(TokenChunk(request_id="r", index=len(ids), token_ids=[], finish_reason=finish)))
    return output, delta


# JSON schemas.

TEXTS = st.text('abé<>/"\\ \n{}', max_size=6)
SCALARS = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
              st.integers(-50, 50), st.integers(0, 500)),
    st.builds(lambda low: {"type": "number", "exclusiveMinimum": low}, st.integers(-5, 5)),
    st.builds(lambda step: {"type": "integer", "multipleOf": step, "minimum": -40, "maximum": 400},
              st.integers(1, 12)),
    st.builds(lambda low, span: {"type": "string", "minLength": low, "maxLength": low + span},
              st.integers(0, 3), st.integers(0, 4)),
    st.sampled_from(["^[a-c]{2,4}$", "x+y", "^(on|off)"]).map(lambda p: {"type": "string", "pattern": p}),
    st.sampled_from(["uuid", "ipv4"]).map(lambda f: {"type": "string", "format": f}),
    st.lists(st.one_of(TEXTS, st.integers(-9, 9), st.none(), st.booleans()), min_size=1, max_size=3).map(
        lambda values: {"enum": values}
    ),
    TEXTS.map(lambda value: {"const": value}),
)  # fmt: skip


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(
        lambda properties, needed, more: {
            "type": "object",
            "properties": properties,
            "required": sorted(properties)[:needed],
            "additionalProperties": more,
        },
        st.dictionaries(st.sampled_from(["a", "b b", "ç", 'q"', "z\n"]), inner, min_size=1, max_size=3),
        st.integers(0, 3),
        st.sampled_from([False, {"type": "integer"}]),
    )


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        objects(inner),
        st.builds(
            lambda item, low, span: {"type": "array", "items": item, "minItems": low, "maxItems": low + span},
            inner, st.integers(0, 2), st.integers(0, 2),
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options}),
    )  # fmt: skip


SCHEMAS = st.recursive(SCALARS, nested, max_leaves=5)


@settings(max_examples=50, deadline=None)
@given(schema=objects(SCHEMAS), seed=st.integers(0, 1 << 30))
def test_whatever_the_grammar_lets_through_is_valid(
    vocabulary: LLTokenizer, schema: dict[str, Any], seed: int
) -> None:
    request = chat(response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}})
    grammar, prompt = grammar_of(request)
    ids = random_answer(matcher_of(grammar.text, vocabulary), TOKENIZER, random.Random(seed))
    output, delta = read(request, prompt, ids)
    assert output.finish_reason == "stop"
    value = json.loads(delta.content)
    jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_json_object_mode_gives_objects(vocabulary: LLTokenizer, seed: int) -> None:
    request = chat(response_format={"type": "json_object"})
    grammar, prompt = grammar_of(request)
    ids = random_answer(matcher_of(grammar.text, vocabulary), TOKENIZER, random.Random(seed))
    assert isinstance(json.loads(read(request, prompt, ids)[1].content), dict)


@pytest.mark.parametrize("schema", [
    {"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {
        "v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "required": ["v", "next"], "additionalProperties": False}}},
    {"type": "object", "properties": {"a": {"allOf": [{"type": "string"}, {"minLength": 2}]}}},
    {"type": ["object", "null"], "title": "ignored", "x-guidance": {"lenient": True}, "default": None},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"const": "x"}], "items": False, "minItems": 2},
    {"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1},
    {"type": "integer", "exclusiveMinimum": -1e300, "exclusiveMaximum": -(2**53) + 2},
    {"type": "number", "minimum": -1e300, "maximum": 1e300},
    {"enum": [2**53, -(2**53), 0.5]},
])  # fmt: skip
def test_references_unions_and_annotations(vocabulary: LLTokenizer, schema: dict[str, Any]) -> None:
    grammar = '%llguidance {"no_forcing": true}\nstart: json\njson: ' + inline_json(check_schema(schema, "s"))
    for seed in range(8):
        ids = random_answer(matcher_of(grammar, vocabulary), TOKENIZER, random.Random(seed))
        jsonschema.validate(json.loads(TOKENIZER.decode(ids)), schema)


INDENTED: list[tuple[dict[str, Any], Any, int]] = [
    ({"type": "integer"}, 5, 0),
    ({"type": "object"}, {"a": {"b": 1}}, 2),
    ({"type": "array", "items": {"enum": [{"a": {"b": {}}}, 1]}}, [1, 1], 1),
    ({"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}}, {"a": [1]}, 2),
    ({"anyOf": [{"type": "null"}, {"type": "array", "prefixItems": [{"type": "object"}]}]}, [{"a": [2]}], 3),
    ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}}},
     {"n": {"n": {"n": {}}}}, 8),
    ({}, {"a": [1]}, 2),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "value", "expected"), INDENTED)
@pytest.mark.parametrize("indent", [None, 1, 2, 4, "\t"])
def test_indented_answers_may_be_written_and_no_blanks_beyond(
    vocabulary: LLTokenizer, schema: dict[str, Any], value: Any, expected: int, indent: Any
) -> None:
    checked = check_schema(schema, "s")
    assert levels(checked) == expected
    grammar = '%llguidance {"no_forcing": true}\nstart: json\njson: ' + inline_json(checked)
    jsonschema.validate(value, schema)

    def taken(text: str) -> bool:
        matcher = matcher_of(grammar, vocabulary)
        return matcher.consume_tokens(TOKENIZER.encode(text)) and matcher.is_accepting()

    text = json.dumps(value, indent=indent)
    assert taken(text)
    first = text.find("\n") + 1
    if first:
        assert not taken(text[:first] + " " * (4 * expected + 1) + text[first:].lstrip())


def nested_arrays(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


BAD_SCHEMAS: list[tuple[Any, str, str]] = [
    ("{}", "", "expected an object, got a string"),
    ({"type": "objekt"}, ".type", "'objekt' is not one of array"),
    ({"properties": {"a": 1}}, ".properties.a", "expected a schema, got an integer"),
    ({"properties": []}, ".properties", "expected an object of schemas"),
    ({"properties": {"a": {"not": {}}}}, ".properties.a.not", "not supported"),
    ({"items": {"uniqueItems": True}}, ".items.uniqueItems", "except as false"),
    ({"anyOf": [{}, {"if": {}}]}, ".anyOf[1].if", "not supported"),
    ({"anyOf": []}, ".anyOf", "not empty"),
    ({"$ref": "http://example.org/a"}, ".$ref", "does not point into the schema itself"),
    ({"$ref": "#/$defs/none"}, ".$ref", "points at nothing"),
    ({"$ref": "#"}, ".$ref", "from reference to reference, more than 32 times"),
    (
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        ".$defs.a.$ref",
        "from reference to reference",
    ),
    ({"format": "binary"}, ".format", "'binary' is not one of date"),
    ({"pattern": 3}, ".pattern", "expected a string"),
    ({"minLength": -1}, ".minLength", "out of range"),
    ({"type": "integer", "minimum": 1e300}, ".minimum", "out of range, at most 9007199254740992 is allowed"),
    ({"maximum": -(2**60)}, ".maximum", "out of range, at least -9007199254740992 is allowed"),
    ({"const": {"a": [-1e300]}}, ".const", "out of range, -9007199254740992 to 9007199254740992"),
    ({"enum": ["a", 2**53 + 1]}, ".enum", "out of range, -9007199254740992 to 9007199254740992"),
    ({"maxItems": "3"}, ".maxItems", "expected an integer"),
    ({"minimum": "3"}, ".minimum", "expected a number"),
    ({"multipleOf": 1_000_003}, ".multipleOf", "too large a step"),
    ({"multipleOf": 0}, ".multipleOf", "above 0"),
    ({"required": [1]}, ".required", "array of strings"),
    ({"enum": []}, ".enum", "not empty"),
    ({"enum": ["x" * 70_000]}, "", "at most 65536 are allowed"),
    ({"properties": {f"p{n}": {} for n in range(501)}}, ".properties", "501 properties, at most 500"),
    (nested_arrays(MAX_DEPTH), ".items" * MAX_DEPTH, f"nests deeper than {MAX_DEPTH} levels"),
]


@pytest.mark.parametrize(("schema", "at", "words"), BAD_SCHEMAS)
def test_a_bad_schema_names_its_fault(schema: Any, at: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_schema(schema, "response_format.json_schema.schema")
    assert caught.value.param == "response_format.json_schema.schema" + at
    assert words in caught.value.message


KEYWORDS = st.sampled_from([
    "type", "properties", "items", "anyOf", "$ref", "enum", "minimum", "required", "not", "multipleOf",
    "pattern", "maxLength", "const", "$defs", "format", "additionalProperties",
])  # fmt: skip
JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(),
        st.integers(-(2**63), 2**64 - 1), st.integers(-3, 3),
        st.floats(allow_nan=False, allow_infinity=False),
        st.sampled_from(["object", "string", "#", "#/$defs/a", "(", "date"]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYWORDS, inner, max_size=4)),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(schema=st.dictionaries(KEYWORDS, JSON, max_size=4))
def test_any_json_for_a_schema_is_taken_or_refused(vocabulary: LLTokenizer, schema: dict[str, Any]) -> None:
    fault = None
    try:
        checked = check_schema(schema, "s")
    except RequestError as error:
        fault = error
    if fault is not None:
        assert (fault.param or "").startswith("s")
        return
    grammar = LLMatcher.grammar_from_lark("start: j\nj: " + inline_json(checked))
    matcher = LLMatcher(vocabulary, grammar, log_level=0)
    assert matcher.is_error() or not matcher.is_stopped()


# Tool calls.

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"type": "string", "enum": ["C", "F", "\nK"]},
        "code": {"type": ["string", "null"]},
        "where": {"$ref": "#/$defs/place"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
        "short": {"type": "string", "minLength": 2, "maxLength": 4, "pattern": "^[a-z\n]"},
        "day": {"type": "string", "format": "ipv4"},
        "kind": {"anyOf": [{"type": "number"}, {"type": "string", "maxLength": 3}]},
    },
    "$defs": {
        "place": {"type": "object", "properties": {"lat": {"type": "number"}, "name": {"type": "string"}},
                  "required": ["lat", "name"], "additionalProperties": False},
    },
    "required": ["days", "unit", "where", "short"],
    "additionalProperties": False,
}  # fmt: skip


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    given = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, **given, **more}}


TOOLS = [tool("weather", WEATHER, strict=True), tool("look"), tool("note", {"type": "object"})]
NAMED = {"type": "function", "function": {"name": "weather"}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 30), choice=st.sampled_from(["required", "auto", NAMED]),
       parallel=st.booleans())  # fmt: skip
def test_calls_are_well_formed_and_strict_ones_match(
    vocabulary: LLTokenizer, seed: int, choice: Any, parallel: bool
) -> None:
    request = chat(tools=TOOLS, tool_choice=choice, parallel_tool_calls=parallel)
    grammar, prompt = grammar_of(request)
    ids = random_answer(matcher_of(grammar.text, vocabulary), TOKENIZER, random.Random(seed), free=60)
    output, delta = read(request, prompt, ids)
    calls = join_calls(delta.tool_calls)
    if choice != "auto":
        assert delta.content == ""
        assert calls
    for call in calls:
        function = call["function"]
        assert function["name"] in ("weather", "look", "note")
        arguments = json.loads(function["arguments"])
        if function["name"] == "weather":
            jsonschema.validate(arguments, WEATHER, format_checker=jsonschema.FormatChecker())
        elif function["name"] == "look":
            assert arguments == {}
    if not parallel or choice == NAMED:
        assert len(calls) <= 1
    expected = "tool_calls" if calls and choice != NAMED else "stop"
    assert output.finish_reason == expected


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("names", [("note",), ("look", "weather"), ("look", "look")])
def test_only_allowed_tools_can_be_called(vocabulary: LLTokenizer, mode: str, names: tuple[str, ...]) -> None:
    request = chat(tools=TOOLS, tool_choice=allowed(mode, *names))
    grammar, prompt = grammar_of(request)
    for name in ("weather", "look", "note"):
        matcher = matcher_of(grammar.text, vocabulary)
        start = TOKENIZER.encode(f"{name}>" if mode == "required" else f"<tool_call>\n<function={name}>")
        assert (matcher.try_consume_tokens(start) == len(start)) == (name in names)
    called = set()
    for seed in range(12):
        ids = random_answer(matcher_of(grammar.text, vocabulary), TOKENIZER, random.Random(seed), free=60)
        output, delta = read(request, prompt, ids)
        calls = join_calls(delta.tool_calls)
        assert output.finish_reason == ("tool_calls" if calls else "stop")
        assert calls or mode == "auto"
        called |= {call["function"]["name"] for call in calls}
    assert called <= set(names)


def test_with_allowed_tools_the_model_is_shown_all_of_them() -> None:
    free, limited = chat(tools=TOOLS), chat(tools=TOOLS, tool_choice=allowed("auto", "look"))
    assert MODEL.builder.chat(free).parts == MODEL.builder.chat(limited).parts


def test_an_answer_with_schema_and_tools_is_one_or_the_other(vocabulary: LLTokenizer) -> None:
    request = chat(tools=TOOLS, response_format={"type": "json_object"})
    grammar, prompt = grammar_of(request)
    kinds = set()
    for seed in range(12):
        matcher = matcher_of(grammar.text, vocabulary)
        start = TOKENIZER.encode("{" if seed % 2 else "<tool_call>")
        assert matcher.consume_tokens(start)
        ids = start + random_answer(matcher, TOKENIZER, random.Random(seed))
        _, delta = read(request, prompt, ids)
        kinds.add(bool(delta.tool_calls))
        if not delta.tool_calls:
            assert isinstance(json.loads(delta.content), dict)
        else:
            assert delta.content == ""
    assert kinds == {True, False}


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_forced_call_that_is_cut_off_leaks_no_markup(cut: int) -> None:
    request = chat(tools=[tool("weather", WEATHER)], tool_choice="required")
    _, prompt = grammar_of(request)
    text = "weather>\n<parameter=city>Paris</parameter>\n<parameter=days>3</parameter></function></tool_call>"
    output, delta = read(request, prompt, TOKENIZER.encode(text)[:cut], "length")
    assert delta.content == ""
    assert output.finish_reason in ("length", "tool_calls")


def test_a_json_parameter_may_hold_the_text_of_an_end_tag() -> None:
    request = chat(tools=[tool("weather", WEATHER)], tool_choice="required")
    _, prompt = grammar_of(request)
    place = {"lat": 1.5, "name": 'a</parameter>\\"</function></tool_call>b'}
    text = f"weather><parameter=where>{json.dumps(place)}</parameter></function></tool_call>"
    _, delta = read(request, prompt, TOKENIZER.encode(text, special=False))
    [call] = join_calls(delta.tool_calls)
    assert json.loads(call["function"]["arguments"]) == {"where": place}


def test_an_unclosed_quote_ends_at_the_first_end_tag_all_the_same() -> None:
    request = chat(tools=[tool("weather", WEATHER)], tool_choice="required")
    _, prompt = grammar_of(request)
    text = 'weather><parameter=days>"3</parameter><parameter=city>Rome</parameter></function></tool_call>'
    _, delta = read(request, prompt, TOKENIZER.encode(text))
    [call] = join_calls(delta.tool_calls)
    assert json.loads(call["function"]["arguments"]) == {"days": '"3', "city": "Rome"}


BAD_TOOLS: list[tuple[Any, str, str]] = [
    ({"type": "object", "properties": {"a": {"contains": {}}}}, ".properties.a.contains", "not supported"),
    ({"type": "array"}, ".type", "parameters are of type object"),
    ({"type": "object", "properties": {"a>b": {"type": "string"}}}, ".properties", "can't be written"),
    ({"type": "object", "properties": {"a": {"minimum": 3}}}, ".properties.a", "needs a type"),
    (
        {"type": "object", "properties": {"a": {"type": "array", "items": {"$ref": "#/properties/a"}}}},
        ".properties.a.items.$ref",
        "may refer to #/$defs/ only",
    ),
    (
        {"type": "object", "properties": {"a": {"type": "string", "format": "uri"}}},
        ".properties.a.format",
        "uri",
    ),
    (
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a|b$"}}},
        ".properties.a.pattern",
        "at the ends only",
    ),
    *(
        (
            {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a"], name: value},
            f".{name}",
            "together",
        )
        for name, value in [
            ("anyOf", [{"required": ["a"]}]),
            ("allOf", [{"required": ["b"]}]),
            ("oneOf", [{"required": ["b"]}]),
            ("const", {"a": 1}),
            ("enum", [{"a": 1}]),
            ("$ref", "#/properties/a"),
            ("patternProperties", {"a": {}}),
            ("minProperties", 2),
            ("maxProperties", 1),
        ]
    ),
    *(
        ({"type": "object", "required": ["z"], **rest}, ".required", "'z' is not among the properties")
        for rest in [
            {"additionalProperties": False},
            {"additionalProperties": {"type": "integer"}},
            {"properties": {"z": False}},
        ]
    ),
    (
        {"type": "object", "properties": {"a": {"enum": ["x</parameter>"]}}},
        ".properties.a",
        "can't be written",
    ),
]


def test_what_strict_parameters_may_say_together(vocabulary: LLTokenizer) -> None:
    rest: dict[str, Any]
    for rest in ({"additionalProperties": {"type": "integer"}}, {"minProperties": 1, "maxProperties": 2},
                 {"additionalProperties": False}, {"required": ["a", "z"]}):  # fmt: skip
        schema = {
            "type": "object",
            "properties": {"a": {"type": "string"}, "b": {"type": "null"}},
            "required": ["a"],
        } | rest
        request = chat(tools=[tool("f", schema, strict=True)], tool_choice="required")
        grammar, prompt = grammar_of(request)
        for seed in range(4):
            ids = random_answer(matcher_of(grammar.text, vocabulary), TOKENIZER, random.Random(seed))
            for call in join_calls(read(request, prompt, ids)[1].tool_calls):
                jsonschema.validate(json.loads(call["function"]["arguments"]), schema)


@pytest.mark.parametrize(("parameters", "at", "words"), BAD_TOOLS)
def test_strict_parameters_that_cannot_be_held_to_are_refused(parameters: Any, at: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        grammar_of(chat(tools=[tool("look"), tool("f", parameters, strict=True)]))
    assert caught.value.param == "tools[1].function.parameters" + at
    assert words in caught.value.message


def branching(levels: int, options: int) -> dict[str, Any]:
    """A schema of few bytes in which the ways from the first part to the last are options ** levels."""
    defs: dict[str, Any] = {
        f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * options} for n in range(levels)
    }
    defs[f"d{levels}"] = {"type": ["integer", "null"]}
    return {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}, "b": {}}, "$defs": defs}


def test_the_types_of_a_parameter_are_found_in_the_size_of_its_schema() -> None:
    assert parameter_types({"parameters": branching(300, 9)}) == {"a": {"integer", "null"}}
    loop = {
        "properties": {
            "a": {"$ref": "#/properties/b"},
            "b": {"oneOf": [{"$ref": "#/properties/a"}, {"const": 1}]},
        }
    }
    assert parameter_types({"parameters": loop}) == {key: {"integer", "number"} for key in "ab"}


def test_too_many_parts_of_parameters_are_not_looked_at() -> None:
    """Parameters beyond are taken as text: a request is never refused for it, and holds nobody up."""
    part = {"anyOf": [{"enum": [None] * 1000}] * 9 + [{"type": "boolean"}]}
    schema = {"properties": {f"p{n}": {"$ref": "#/part"} for n in range(5000)}, "part": part}
    seen = parameter_types({"parameters": schema})
    assert list(seen) == [f"p{n}" for n in range(len(seen))]
    assert 1 <= len(seen) < 50
    assert seen["p0"] == {"null", "boolean"}


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [("^(a|b)$", True), ("^[a|b]$", True), (r"^a\|b$", True), ("a|b", True), ("^" + "[" * 60_000, False),
     ("^(a)|(b)$", False), ("^a|b", False), ("^[(]|[)]$", False), ("a)(b", False), ("a)|(b", False),
     ("\\", False), ("(", False), (r"\(", True), (r"[\[]", True), ("[](]", True), ("[^](]", True),
     ("[^^(]", True), ("^[a$^]$", True), (r"a\$b", True), ("a$b", False), ("[[:alpha:](]", True)],
)  # fmt: skip
def test_patterns_that_would_become_others_within_a_call_are_refused(pattern: str, fits: bool) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}}
    request = chat(tools=[tool("f", parameters, strict=True)], tool_choice="required")
    tools = [{"type": "function", "function": {"name": "f"}}]
    if fits:
        assert ToolGrammar(tools, request.strict_tools, TOKENIZER).rules
        return
    with pytest.raises(RequestError) as caught:
        ToolGrammar(tools, request.strict_tools, TOKENIZER)
    assert caught.value.param == "tools[0].function.parameters.properties.a.pattern"
    assert len(caught.value.message) < 300


def test_strict_parameters_that_become_too_large_a_grammar_are_refused_before_it_is_made() -> None:
    parameters = {
        "type": "object",
        "properties": {f"p{n}": {"type": "object", "$ref": "#/$defs/x"} for n in range(300)},
        "$defs": {"x": {"type": "object", "properties": {f"q{n}": {"type": "null"} for n in range(400)}}},
    }
    request = chat(tools=[tool(f"f{n}", parameters, strict=True) for n in range(3)])
    with pytest.raises(RequestError, match="the grammar of their calls is over 1048576 bytes") as caught:
        ToolGrammar(request.tools, request.strict_tools, TOKENIZER)
    assert caught.value.param == "tools"


def test_tools_that_are_not_strict_are_never_refused_for_their_schema(vocabulary: LLTokenizer) -> None:
    odd = [parameters for parameters, _, _ in BAD_TOOLS]
    request = chat(tools=[tool(f"f{n}", one) for n, one in enumerate(odd)], tool_choice="required")
    grammar, prompt = grammar_of(request)
    for seed in range(10):
        ids = random_answer(matcher_of(grammar.text, vocabulary), TOKENIZER, random.Random(seed))
        calls = join_calls(read(request, prompt, ids)[1].tool_calls)
        assert calls
        assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in calls)


def test_free_answers_have_no_grammar() -> None:
    for fields in ({}, {"response_format": {"type": "text"}}, {"tools": [tool("look")]},
                   {"tools": TOOLS, "tool_choice": "none"}):  # fmt: skip
        request = chat(**fields)
        assert answer_grammar(request, MODEL.builder.chat(request), TOKENIZER) is None


@pytest.mark.parametrize(("thinking", "starts"), [(True, True), (False, False), (None, False)])
def test_an_answer_may_think_first_only_where_the_template_lets_it(thinking: Any, starts: bool) -> None:
    kwargs = {} if thinking is None else {"chat_template_kwargs": {"enable_thinking": thinking}}
    grammar, _ = grammar_of(chat(response_format={"type": "json_object"}, **kwargs))
    assert (grammar.think_open is not None) == starts
    assert not grammar.thinking
