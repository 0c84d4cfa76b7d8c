"""Parsers of generated text give the same whatever the stream is cut into, even character by character."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from transom.gateway.output import ChoiceOutput, Delta
from transom.gateway.prepare import Model
from transom.gateway.reasoning_parser import ReasoningParser, split_reasoning
from transom.gateway.responses import join_calls
from transom.gateway.stop import StopMatcher
from transom.gateway.tool_parser import ToolDelta, ToolParser
from transom.messages import TokenChunk

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "wind": {"type": "number"},
        "where": {"type": "object"},
        "tags": {"type": "array"},
        "deep": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]


def cut(text: str, places: Sequence[int]) -> list[str]:
    borders = sorted({place % (len(text) + 1) for place in places})
    return [text[a:b] for a, b in itertools.pairwise([0, *borders, len(text)])]


def read_tools(pieces: Sequence[str], *, truncated: bool = False) -> tuple[str, list[dict[str, Any]]]:
    numbers = itertools.count()
    parser = ToolParser(TOOLS, new_id=lambda: f"call_{next(numbers)}")
    content, deltas = "", list[ToolDelta]()
    for piece in pieces:
        split = parser.push(piece)
        content += split.content
        deltas += split.calls
    split = parser.finish(truncated=truncated)
    return content + split.content, join_calls([*deltas, *split.calls])


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Read an object; fail when a name comes twice, which Python's parser would not mind."""
    read = dict(pairs)
    assert len(read) == len(pairs), pairs
    return read


def arguments(calls: Sequence[dict[str, Any]]) -> list[Any]:
    return [json.loads(call["function"]["arguments"], object_pairs_hook=once) for call in calls]


CALL = (
    '<tool_call>\n<function=weather>\n<parameter=city>Köln "am" Rhein\\n</parameter>\n'
    "<parameter=days>3</parameter><parameter=wind>\n2.5\n</parameter>\n"
    '<parameter=where>{"lat": [1, 2]}</parameter>\n<parameter=deep>True</parameter>'
    "<parameter=note>null</parameter>\n<parameter=unknown>7</parameter></function>\n</tool_call>"
)
WANTED = {
    "city": 'Köln "am" Rhein\\n',
    "days": 3,
    "wind": 2.5,
    "where": {"lat": [1, 2]},
    "deep": True,
    "note": None,
    "unknown": "7",
}


def test_a_tool_call_is_read_with_the_types_of_its_schema() -> None:
    content, calls = read_tools(["Let me look.\n" + CALL])
    assert content == "Let me look."
    assert calls[0]["function"]["name"] == "weather"
    assert calls[0]["id"] == "call_0"
    assert arguments(calls) == [WANTED]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("wind", "1e999"),
        ("wind", "-1e999"),
        ("tags", "[1, [1e999]]"),
        ("tags", r'["\ud800"]'),
        ("tags", r'["\ud83d\ude00"]'),
        ("where", r'{"\udfff": 1}'),
    ],
)
def test_what_json_can_say_and_python_can_not_write_stays_json(key: str, value: str) -> None:
    call = f"<tool_call>\n<function=weather>\n<parameter={key}>{value}</parameter>\n</function></tool_call>"
    _, calls = read_tools([call])
    written = calls[0]["function"]["arguments"]
    orjson.dumps(written)  # it can go out
    assert "Infinity" not in written
    assert json.loads(written) == {key: json.loads(value)}


TEXTS = [
    CALL,
    "before " + CALL + "\n" + CALL + " after",
    "no call, but a < b and <tool_cal> and <tool_call",
    "<tool_call>just words</tool_call> more",
    "<tool_call>\n<function=weather>\n</function>\n</tool_call>",
    "<tool_call><function=weather><parameter=city></parameter></function></tool_call>",
    "<tool_call><function=weather><parameter=city>\nline 1\nline <2>\n\n</parameter></function></tool_call>",
    "<tool_call><function=weather><parameter=city>a</param b</parameter></function></tool_call>",
    "<tool_call><function=weather><parameter=city>never closed</function>\n</tool_call> text",
    "<tool_call><function=weather><parameter=city>never closed</tool_call> text",
    "<tool_call><function=weather><parameter=city>never ends",
    "<tool_call><function=weather><parameter=days>12",
    "<tool_call><function=weather><parameter=city>half an end</param",
    "<tool_call><function=weather> noise <b>x</b> <parameter=days>four</parameter></tool_call>",
    "<tool_call><function=weather>\n<tool_call>\n<function=weather></function></tool_call>",
    "<tool_call><function=weather></function> tail without an end",
    "<tool_call><function=>x</function></tool_call>",
    "<tool_call>\n<function=a\nb></tool_call>",
    "<tool_call><function=weather><parameter=city>a</parameter><parameter=city>b</parameter></function>",
    "<tool_call><function=weather><parameter=days>1</parameter><parameter=days>2</parameter></tool_call>",
    "<tool_call><function=weather><parameter=days>3</parameter><parameter=days>never closed",
    "  \n ",
    "text \n\n" + CALL + "\n\n",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_cut_at_every_place_changes_nothing(text: str) -> None:
    whole = read_tools([text])
    assert read_tools(list(text)) == whole
    for place in range(len(text)):
        assert read_tools([text[:place], text[place:]]) == whole
    assert all(isinstance(value, dict) for value in arguments(whole[1]))


REPEATED = (
    "<tool_call><function=weather><parameter=city>Rome</parameter><parameter=days>3</parameter>"
    '<parameter=city>Oslo "</parameter>\n<parameter=days>\n4\n</parameter><parameter=where>{}</parameter>'
    '<parameter=where>{"lat": "</parameter>"}</parameter><parameter=new>a</parameter></function></tool_call>'
)


def test_a_parameter_that_is_written_twice_keeps_its_first_value() -> None:
    first = {"city": "Rome", "days": 3, "where": {}, "new": "a"}
    for text in (REPEATED, REPEATED + REPEATED):
        content, calls = read_tools(list(text))
        assert content == ""
        assert arguments(calls) == [first] * text.count("<tool_call>")


FRAGMENTS = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", "<function=weather>", "</function>", "<parameter=city>",
         "<parameter=days>", "</parameter>", "\n", " ", "<", "12", "ü\"\\", "word", "</", "<tool", ">"]
    ),
    max_size=14,
).map("".join)  # fmt: skip


@given(text=FRAGMENTS, places=st.lists(st.integers(0, 200), max_size=8), truncated=st.booleans())
@example(text="<tool_call><function=weather><parameter=city>\n\n</parameter>", places=[45], truncated=False)
def test_broken_calls_never_raise_and_never_depend_on_the_cut(
    text: str, places: list[int], truncated: bool
) -> None:
    whole = read_tools([text], truncated=truncated)
    assert read_tools(cut(text, places), truncated=truncated) == whole
    assert read_tools(list(text), truncated=truncated) == whole
    if not truncated:
        assert all(isinstance(value, dict) for value in arguments(whole[1]))


def test_a_truncated_call_can_not_be_run() -> None:
    _, calls = read_tools(["<tool_call><function=weather><parameter=city>rm -rf /tmp"], truncated=True)
    with pytest.raises(json.JSONDecodeError):
        json.loads(calls[0]["function"]["arguments"])


def read_reasoning(pieces: Sequence[str], *, inside: bool = False) -> tuple[str, str]:
    parser = ReasoningParser(inside=inside)
    splits = [*map(parser.push, pieces), parser.finish()]
    return "".join(one.reasoning for one in splits), "".join(one.content for one in splits)


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("<think>why</think>so", False, "why", "so"),
        ("\n<think>why\n</think>\n\nso", False, "why\n", "\n\nso"),
        ("why</think>so", True, "why", "so"),
        ("<think></think>so", False, "", "so"),
        ("<think>cut off", False, "cut off", ""),
        ("plain <think>not at the start</think>", False, "", "plain <think>not at the start</think>"),
        ("<thin", False, "", "<thin"),
        ("<think>a </thin b</think>c</think>", False, "a </thin b", "c</think>"),
    ],
)
def test_thinking_is_split_from_the_answer(text: str, inside: bool, reasoning: str, content: str) -> None:
    assert read_reasoning([text], inside=inside) == (reasoning, content)
    assert read_reasoning(list(text), inside=inside) == (reasoning, content)


def test_unfinished_thinking_in_history_stays_content() -> None:
    assert split_reasoning("<think>half") == (None, "<think>half")


@given(
    text=st.lists(st.sampled_from(["<think>", "</think>", "<", "x", "\n", "</th", "ink>"]), max_size=9).map(
        "".join
    ),
    places=st.lists(st.integers(0, 60), max_size=6),
    inside=st.booleans(),
)
def test_thinking_does_not_depend_on_the_cut(text: str, places: list[int], inside: bool) -> None:
    assert read_reasoning(cut(text, places), inside=inside) == read_reasoning([text], inside=inside)


def read_stop(pieces: Sequence[str], stops: Sequence[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    out = "".join(map(matcher.push, pieces))
    if matcher.hit is None:
        out += matcher.finish()
    return out, matcher.hit


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    places=st.lists(st.integers(0, 60), max_size=6),
)
def test_stop_strings_do_not_depend_on_the_cut(text: str, stops: list[str], places: list[int]) -> None:
    out, hit = read_stop(cut(text, places), stops)
    assert (out, hit) == read_stop([text], stops)
    assert text.startswith(out)
    if hit is None:
        assert out == text
        assert not any(stop in text for stop in stops)
    else:
        assert text[len(out) :].startswith(hit)
        assert not any(stop in text[: len(out) + len(hit) - 1] for stop in stops)


def run_output(
    model: Model, ids: list[int], sizes: Sequence[int], **options: Any
) -> tuple[Delta, ChoiceOutput]:
    """Push tokens in chunks of the given sizes."""
    output = ChoiceOutput(
        model.tokenizer, reasoning=ReasoningParser(), tools=ToolParser(TOOLS, new_id=lambda: "id"), **options
    )
    total, at = Delta(), 0
    for size in itertools.chain(sizes, itertools.repeat(1)):
        if at >= len(ids) or output.ended():
            break
        total.add(output.push(TokenChunk(request_id="r", index=at, token_ids=ids[at : at + size])))
        at += size
    total.add(output.push(TokenChunk(request_id="r", index=at, token_ids=[], finish_reason="stop")))
    return total, output


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(1, 9), max_size=20), stop=st.sampled_from([(), ("END",), ("zz", "D n")]))
def test_an_answer_does_not_depend_on_how_tokens_come(
    model: Model, sizes: list[int], stop: tuple[str, ...]
) -> None:
    ids = model.tokenizer.encode(f"<think>日本 hm</think>Fine. {CALL} END now 🎈")
    total, output = run_output(model, ids, sizes, stop=stop)
    whole, reference = run_output(model, ids, [len(ids)], stop=stop)
    assert (total.content, total.reasoning) == (whole.content, whole.reasoning)
    assert join_calls(total.tool_calls) == join_calls(whole.tool_calls)
    assert total.reasoning == "日本 hm"
    assert output.finish_reason == reference.finish_reason == "tool_calls"
    assert output.reasoning_tokens == reference.reasoning_tokens > 0
    if not stop:
        assert output.completion_tokens == len(ids) + 1


@pytest.mark.parametrize("least", [0, 1, 4, 9, 10, 40])
def test_stop_strings_are_not_looked_for_before_min_tokens(model: Model, least: int) -> None:
    ids = model.tokenizer.encode("one END two END three END four")
    total, output = run_output(model, ids, [3, 1, 2], stop=("END",), min_tokens=least)
    text = model.tokenizer.decode(ids)
    # The text of the first tokens passes; from the last of them on it counts.
    passed = model.tokenizer.decode(ids[: max(least - 1, 0)])
    at = text.find("END", len(passed))
    assert total.content == (text if at < 0 else text[:at])
    assert output.by_gateway == (at >= 0)
    assert output.completion_tokens >= min(least, len(ids))
