"""How many values a JSON text would become, told before it is parsed: exactly, whatever its strings hold."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from transom.errors import RequestError
from transom.gateway import json_bounds
from transom.gateway.api_requests import ChatCompletionRequest
from transom.gateway.json_bounds import MAX_OBJECTS, MAX_VALUES, JsonBudget, count_outside_strings
from transom.gateway.parse import load_body, parse_chat
from transom.gateway.prepare import Model


def plainly(text: bytes) -> tuple[int, int]:
    """Count one sign after the other."""
    objects = commas = 0
    inside = escaped = False
    for sign in text.decode("latin-1"):
        was_escaped, escaped = escaped, False
        if was_escaped and sign in '"\\':
            continue
        if sign == "\\":
            escaped = True
        elif sign == '"':
            inside = not inside
        elif not inside:
            objects += sign in "[{:"
            commas += sign == ","
    return objects, commas


@settings(max_examples=400)
@example(text='"\\\\", ["\\"]"', piece_bytes=3)
@example(text="\\\\\\", piece_bytes=1)
@given(text=st.text('"\\\\[{:,a', max_size=60), piece_bytes=st.integers(1, 9))
def test_any_text_is_counted_as_sign_by_sign_however_it_is_cut(text: str, piece_bytes: int) -> None:
    raw = text.encode()
    assert count_outside_strings(np.frombuffer(raw, np.uint8), piece_bytes) == plainly(raw)


@given(
    st.recursive(st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))
)
def test_what_is_counted_is_what_would_be_made(value: Any) -> None:
    def objects(one: Any) -> int:
        if isinstance(one, dict):
            return 1 + len(one) + sum(map(objects, one.values()))
        return 1 + sum(map(objects, one)) if isinstance(one, list) else 0

    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        assert count_outside_strings(np.frombuffer(text.encode(), np.uint8), 8)[0] == objects(value)


def chat(content: str, *calls: str) -> bytes:
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    if calls:
        functions = [{"type": "function", "function": {"name": "f", "arguments": one}} for one in calls]
        messages.append({"role": "assistant", "tool_calls": functions})
    return json.dumps({"messages": messages}).encode()


def test_a_long_text_may_hold_any_number_of_signs(model: Model) -> None:
    pasted = json.dumps([{"a": number, 'b\\"': [1, 2, 3, 4, 5]} for number in range(310_000)], indent=1)
    assert pasted.count("{") > MAX_OBJECTS
    pasted += ",\\" * MAX_VALUES
    assert parse_chat(chat(pasted), model.limits).messages[0]["content"] == pasted


EVASIONS = {
    "space before the colon": b'{"messages": [' + b'{"a" \n:0},' * 150_001 + b"0]}",
    "behind an escaped quote": b'{"a\\"": [' + b"{}," * 300_001 + b"0]}",
    "behind escaped backslashes": b'{"a\\\\": "\\\\\\\\", "b": [' + b"{}," * 300_001 + b"0]}",
    "after a long string": b'{"a": "' + b"x" * 10_000_000 + b'", "b": [' + b"{}," * 300_001 + b"0]}",
    "before an unterminated string": b'{"a": [' + b"{}," * 300_001 + b'"',
    "before what is no JSON": b'{"a": [' + b"{}," * 300_001 + b'\\" nonsense "',
}


@pytest.mark.parametrize("case", EVASIONS)
def test_what_would_be_made_is_refused_however_it_is_spelt(case: str) -> None:
    with pytest.raises(RequestError, match=f"opening brackets and names of fields, at most {MAX_OBJECTS}"):
        load_body(EVASIONS[case], ChatCompletionRequest)


def test_arguments_of_tool_calls_are_counted_all_together(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are JSON inside of strings, and parsed too."""
    monkeypatch.setattr(json_bounds, "MAX_OBJECTS", 30_000)
    code = json.dumps({"text": "[{:" * 20_000})
    values = json.dumps({"list": [[]] * 9_000})
    assert len(parse_chat(chat("", code, values, values, values), model.limits).messages) == 2
    with pytest.raises(RequestError, match="arguments of all tool calls have 360") as refused:
        parse_chat(chat("", values, code, values, values, values), model.limits)
    assert refused.value.param == "messages"
    many = ['{"a": [%s[]]}' % ("[]," * 36)] * 1000  # each of them short
    with pytest.raises(RequestError, match=r"arguments of all tool calls have 300\d\d opening"):
        parse_chat(chat("", *many), model.limits)


def test_commas_have_a_bound_of_their_own() -> None:
    budget = JsonBudget("it has")
    budget.take(b"[" + b"0," * MAX_VALUES + b'", , "]')
    with pytest.raises(RequestError, match=f"it has {MAX_VALUES + 1} commas outside of strings, at most"):
        budget.take(b"[0,0]")
