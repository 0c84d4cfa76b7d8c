"""What the API refuses: always an OpenAI-shaped 4xx that names the field, never a crash."""

from __future__ import annotations

import base64
import json
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from transom.errors import RequestError
from transom.gateway.media import decode_data_url
from transom.gateway.parse import parse_chat, parse_completion
from transom.gateway.schema import Limits

LIMITS = Limits(
    vocab_size=1491, default_max_tokens=64, max_choices=4, max_media_items=3, max_media_bytes=3000
)
PNG = "data:image/png;base64," + base64.b64encode(b"bytes").decode()


def body(**changes: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], **changes}


def with_part(part: Any) -> dict[str, Any]:
    return body(messages=[{"role": "user", "content": [{"type": "text", "text": "see"}, part]}])


def image(url: Any, **more: Any) -> dict[str, Any]:
    return with_part({"type": "image_url", "image_url": {"url": url, **more}})


def refused(value: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_chat(value if isinstance(value, bytes) else json.dumps(value).encode(), LIMITS)
    assert caught.value.status == 400
    return caught.value


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
URL = "messages[0].content[1].image_url.url"


def allowed(*names: str, mode: str | None = "auto") -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"allowed_tools": {"mode": mode, "tools": tools}}


CASES: list[tuple[Any, str | None, str]] = [
    (b"{", None, "not valid JSON"),
    (b'{"messages": NaN}', None, "not valid JSON"),
    (b'{"messages": "\\ud800"}', None, "not valid JSON"),
    (b"\xff\xfe", None, "not valid JSON"),
    (b"[]", None, "expected an object"),
    (b"[" * 500 + b"]" * 500, None, "expected an object"),
    (b"[" * 100_000, None, "nests deeper than 64"),
    (b'{"messages": ' + b"[" * 64 + b"]" * 64 + b"}", "messages", "nests deeper than 64"),
    (b'{"stop": ' + b"[" * 63 + b"]" * 63 + b"}", "stop[0]", "expected a string"),
    ({"model": "m"}, "messages", "missing"),
    (body(messages=[]), "messages", "at least 1"),
    (body(messages="hi"), "messages", "expected an array, got a string"),
    (body(messages=[1]), "messages[0]", "expected an object"),
    (body(messages=[{"content": "x"}]), "messages[0].role", "missing"),
    (body(messages=[{"role": "root", "content": "x"}]), "messages[0].role", "'root' is not one of"),
    (body(messages=[{"role": "user"}]), "messages[0].content", "missing"),
    (body(messages=[{"role": "user", "content": 3}]), "messages[0].content", "expected a string or"),
    (body(messages=[{"role": "user", "content": []}]), "messages[0].content", "at least 1"),
    (body(messages=[{"role": "tool", "content": "x"}]), "messages[0].tool_call_id", "missing"),
    (body(messages=[{"role": "assistant"}]), "messages[0].content", "required unless"),
    (with_part("x"), "messages[0].content[1]", "expected an object"),
    (with_part({"type": "pdf"}), "messages[0].content[1].type", "'pdf' is not one of"),
    (with_part({"type": "text"}), "messages[0].content[1].text", "missing"),
    (with_part({"type": "image_url"}), "messages[0].content[1].image_url", "missing"),
    (with_part({"type": "image_url", "image_url": "x"}), "messages[0].content[1].image_url", "an object"),
    (image(5), URL, "expected a string"),
    (image(""), URL, "empty"),
    (image("gopher://host/x"), URL, "'gopher' is not allowed"),
    (image("FTP://host/x"), URL, "'ftp' is not allowed"),
    (image("http:///x"), URL, "no host"),
    (image("http://host:99999/"), URL, "not a valid URL"),
    (image("http://[::1/"), URL, "not a valid URL"),
    (image("http://me:secret@host/"), URL, "user names and passwords"),
    (image("http://host/a b"), URL, "space or control"),
    (image("http://host/" + "a" * 9000), URL, "at most 8192"),
    (image("data:image/png,abc"), URL, "not marked ';base64'"),
    (image("data:image/png;base64"), URL, "a comma"),
    (image("data:image/png;base64,@@@@"), URL, "outside the alphabet"),
    (image("data:image/png;base64,YQ"), URL, "not valid base64"),
    (image("data:image/png;base64,YQ==YQ=="), URL, "not valid base64"),
    (image("data:image/png;base64,Y Q="), URL, "white space"),
    (image("data:image/png;base64,-_-_"), URL, "URL-safe"),
    (image("data:image/png;base64,"), URL, "no data"),
    (image("data:image/png;base64,é"), URL, "not valid base64"),
    (image("data:text/html;base64,YQ=="), URL, "'text/html' is not image"),
    (image("data:image/png;base64," + "A" * 4100), URL, "at most 3000"),
    (image(PNG, detail="ultra"), "messages[0].content[1].image_url.detail", "'ultra'"),
    (image(PNG, min_pixels=9, max_pixels=4), "messages[0].content[1].image_url.min_pixels", "more than"),
    (image(PNG, max_pixels=0), "messages[0].content[1].image_url.max_pixels", "at least 1"),
    (
        with_part({"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,YQ==,YQ=="}}),
        "messages[0].content[1].video_url.url",
        "lists of JPEG",
    ),
    (
        with_part({"type": "video_url", "video_url": {"url": "http://h/v", "fps": 0}}),
        "messages[0].content[1].video_url.fps",
        "out of range",
    ),
    (
        with_part({"type": "input_audio", "input_audio": {"data": "YQ==", "format": "exe"}}),
        "messages[0].content[1].input_audio.format",
        "'exe'",
    ),
    (
        body(messages=[{"role": "system", "content": [{"type": "image_url", "image_url": {"url": PNG}}]}]),
        "messages[0].content[0].type",
        "not allowed in a message of role system",
    ),
    (
        body(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PNG}}] * 4}]),
        "messages[0].content[3].type",
        "media item 4 of the request, at most 3 are allowed",
    ),
    (body(n=0), "n", "at least 1"),
    (body(n=10**30), "n", "at most 4"),
    (b'{"messages": [{"role": "user", "content": "x"}], "n": 1e999}', None, "infinity"),
    (b"", None, "the body is empty"),
    ('{"messages": "\xe9"}'.encode("latin-1"), None, "not UTF-8 (byte 14)"),
    (body(max_tokens=1e308), "max_tokens", "(309 characters) is out of range"),
    (body(n=1.5), "n", "expected an integer"),
    (body(n=True), "n", "expected an integer, got a boolean"),
    (body(temperature=3), "temperature", "at most 2"),
    (body(repetition_penalty=0), "repetition_penalty", "at least 0.001 and at most 2"),
    (body(temperature="hot"), "temperature", "expected a number"),
    (body(top_p=-0.1), "top_p", "at least 0"),
    (body(max_tokens=0), "max_tokens", "at least 1"),
    (body(max_tokens=4, max_completion_tokens=5), "max_tokens", "contradicts"),
    (body(max_tokens=4, min_tokens=5), "min_tokens", "5 is more than max_tokens (4)"),
    (body(min_tokens=-1), "min_tokens", "at least 0"),
    (body(stop=["a"] * 17), "stop", "at most 16"),
    (body(stop=[""]), "stop[0]", "expected a string of 1"),
    (body(stop=7), "stop", "expected a string or an array"),
    (body(logit_bias={"x": 1}), "logit_bias", "no token id"),
    (body(logit_bias={"5": 101}), "logit_bias.5", "at most 100"),
    (body(top_logprobs=3), "top_logprobs", "together with logprobs"),
    (body(logprobs=True, top_logprobs=21), "top_logprobs", "at most 20"),
    (body(stream="yes"), "stream", "expected a boolean"),
    (body(stream_options={"include_usage": True}), "stream_options", "together with stream"),
    (body(response_format={"type": "xml"}), "response_format.type", "'xml' is not one of json_object"),
    (body(response_format={"type": "json_schema"}), "response_format.json_schema", "is missing"),
    (
        body(response_format={"type": "json_schema", "json_schema": {"schema": {}}}),
        "response_format.json_schema.name",
        "is missing",
    ),
    (
        body(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": []}}),
        "response_format.json_schema.schema",
        "expected an object, got an array",
    ),
    (
        body(
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "a", "strict": True, "schema": {"type": "array"}},
            }
        ),
        "response_format.json_schema.schema.type",
        "'array': the root of a strict schema",
    ),
    (body(tools=[TOOL, TOOL]), "tools[1].function.name", "'look' is the name of an earlier tool"),
    (body(functions=[{"name": "f"}]), "functions", "not supported"),
    (body(length_penalty=True), "length_penalty", "not supported"),
    (body(use_beam_search=0), "use_beam_search", "not supported"),
    (body(modalities=["text", "audio"]), "modalities", "only text"),
    (body(guided_json={}), "guided_json", "not supported"),
    (body(length_penalty=True), "length_penalty", "not supported"),
    (body(use_beam_search=0), "use_beam_search", "not supported"),
    (body(chat_template="{{ 7 }}"), "chat_template", "not supported"),
    (body(chat_template_kwargs={"messages": []}), "chat_template_kwargs.messages", "not supported"),
    (body(reasoning_effort="huge"), "reasoning_effort", "'huge'"),
    (body(tools=[{"type": "web"}]), "tools[0].type", "'web'"),
    (body(tools=[{"type": "function", "function": {"name": "<x>"}}]), "tools[0].function.name", "'<x>'"),
    (body(tool_choice="required"), "tool_choice", "no tools"),
    (
        body(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "other"}}),
        "tool_choice.function.name",
        "'other' is not the name",
    ),
    *(
        (body(tools=[TOOL], tool_choice={"type": "allowed_tools", **rest}), f"tool_choice{param}", words)
        for rest, param, words in [
            ({}, ".allowed_tools", "is missing"),
            ({"allowed_tools": []}, ".allowed_tools", "expected an object"),
            (allowed("look", mode=None), ".allowed_tools.mode", "is missing"),
            (allowed("look", mode="none"), ".allowed_tools.mode", "'none' is not one of auto, required"),
            (allowed(), ".allowed_tools.tools", "at least 1"),
            ({"allowed_tools": {"mode": "auto"}}, ".allowed_tools.tools", "is missing"),
            (allowed("look", "other"), ".allowed_tools.tools[1].function.name", "'other' is not the name"),
            (
                {"allowed_tools": {"mode": "auto", "tools": [{"type": "mcp"}]}},
                ".allowed_tools.tools[0].type",
                "'mcp'",
            ),
            (
                {"allowed_tools": {"mode": "auto", "tools": [{"type": "function", "name": "look"}]}},
                ".allowed_tools.tools[0].function",
                "is missing",
            ),
        ]
    ),
    (body(tools=[TOOL], tool_choice={"type": "custom"}), "tool_choice.type", "'custom' is not one of"),
    (body(tools=[TOOL], tool_choice=["auto"]), "tool_choice", "expected an object"),
    (body(tool_choice={"type": "allowed_tools", **allowed("look")}), "tool_choice", "no tools"),
    (
        body(
            messages=[
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{oops"}}]}
            ]
        ),
        "messages[0].tool_calls[0].function.arguments",
        "not the JSON text",
    ),
    *(
        (
            body(messages=[{"role": "assistant", "tool_calls": [{"function": {
                "name": "f", "arguments": '{"a": ' + "[" * depth + "]" * depth + "}"}}]}]),
            "messages[0].tool_calls[0].function.arguments",
            "the JSON text nests deeper than 64 levels",
        )
        for depth in (64, 5000)
    ),
]  # fmt: skip


@pytest.mark.parametrize(("value", "param", "words"), CASES)
def test_a_bad_request_names_its_fault(value: Any, param: str | None, words: str) -> None:
    error = refused(value)
    assert error.param == param
    assert words in error.message
    assert len(error.message) < 400


def test_an_error_never_repeats_a_payload() -> None:
    secret = base64.b64encode(b"private picture" * 20).decode()
    for url in (f"data:image/png;base64,{secret[:-4]}*{secret}", f"data:image/png;base64,{secret}" * 20):
        error = refused(image(url))
        assert secret[:12] not in error.message
    assert "secret" not in refused(image("http://me:secret@host/")).message


def test_frames_in_one_url_are_refused_by_name() -> None:
    """Another server's way to send a video: JPEGs side by side. Guessing at their times would be worse."""
    frame = base64.b64encode(b"\xff\xd8frame\xff\xd9").decode()
    for frames in (f"{frame},{frame}", f"{frame},{frame},{frame}"):
        url = f"data:video/jpeg;base64,{frames}"
        error = refused(with_part({"type": "video_url", "video_url": {"url": url}}))
        assert error.param == "messages[0].content[1].video_url.url"
        assert error.message
        assert frame not in error.message


@pytest.mark.parametrize(
    "media_type", ["image/png", "IMAGE/PNG", "Image/Jpeg; charset=x", "", "application/octet-stream"]
)
@pytest.mark.parametrize("scheme", ["data", "DATA", "Data"])
def test_data_urls_are_read_whatever_their_case(media_type: str, scheme: str) -> None:
    url = f"{scheme}:{media_type};BASE64,{base64.b64encode(b'abc').decode()}"
    request = parse_chat(orjson.dumps(image(url)), LIMITS)
    assert request.media[0].data == b"abc"


@given(data=st.binary(min_size=1, max_size=2000))
def test_base64_comes_back(data: bytes) -> None:
    url = "data:audio/wav;base64," + base64.b64encode(data).decode()
    assert decode_data_url(url, "audio", "p", 2000) == data


def test_base64_longer_than_one_piece() -> None:
    data = bytes(range(256)) * 8192 + b"x"
    url = "data:video/mp4;base64," + base64.b64encode(data).decode()
    assert decode_data_url(url, "video", "p", len(data)) == data
    with pytest.raises(RequestError, match=f"at most {len(data) - 1}"):
        decode_data_url(url, "video", "p", len(data) - 1)


def test_harmless_and_unknown_fields_are_ignored() -> None:
    request = parse_chat(
        orjson.dumps(
            body(
                user="u", metadata={"a": "b"}, store=True, service_tier="auto", functions=[], best_of=1,
                response_format={"type": "text"}, frequency_penalty=None, unheard_of=1, top_k=-1,
                stream_options=None,
            )
        ),
        LIMITS,
    )  # fmt: skip
    assert request.generation.sampling.top_k == 0
    assert request.generation.sampling.max_tokens == 64


@pytest.mark.parametrize(
    ("fields", "least", "most"),
    [({}, 0, 64), ({"min_tokens": 9}, 9, 64), ({"min_tokens": 900}, 900, 900), ({"min_tokens": None}, 0, 64)],
)
def test_min_tokens_raise_the_default_limit(fields: dict[str, Any], least: int, most: int) -> None:
    limits = Limits(vocab_size=100, default_max_tokens=64)
    sampling = parse_chat(orjson.dumps(body(**fields)), limits).generation.sampling
    assert (sampling.min_tokens, sampling.max_tokens) == (least, most)


def test_a_seed_repeats_and_none_is_random() -> None:
    seeds = {parse_chat(orjson.dumps(body()), LIMITS).generation.sampling.seed for _ in range(5)}
    assert len(seeds) == 5
    assert parse_chat(orjson.dumps(body(seed=-7)), LIMITS).generation.sampling.seed >= 0
    assert parse_chat(orjson.dumps(body(top_p=0)), LIMITS).generation.sampling.top_k == 1


def test_an_assistant_turn_comes_back_as_clients_send_it() -> None:
    """The SDK's own message object, dumped with all its nulls, is taken; thinking is split off."""
    turn = {
        "role": "assistant", "content": "<think>hm</think>yes", "refusal": None, "audio": None,
        "function_call": None, "tool_calls": None, "annotations": [],
    }  # fmt: skip
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": [1]}'}}
    messages = [
        {"role": "user", "content": "hi"},
        turn,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "seen"}]},
    ]
    request = parse_chat(orjson.dumps(body(messages=messages)), LIMITS)
    assert request.messages[1] == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    assert request.messages[2]["tool_calls"][0]["function"]["arguments"] == {"at": [1]}
    assert request.messages[3]["content"] == "seen"


def test_a_developer_speaks_as_the_system() -> None:
    request = parse_chat(
        orjson.dumps(
            body(messages=[{"role": "developer", "content": [{"type": "text", "text": "be brief"}]}])
        ),
        LIMITS,
    )
    assert request.messages == [{"role": "system", "content": "be brief"}]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    | st.sampled_from(["user", "assistant", "text", "image_url", "data:image/png;base64,YQ==", "auto"]),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(
        st.sampled_from(
            ["type", "text", "image_url", "url", "video_url", "input_audio", "data", "format", "role",
             "content", "function", "name", "arguments", "tool_calls", "fps", "detail"]
        ),
        inner,
        max_size=5,
    ),
    max_leaves=12,
)  # fmt: skip
FIELDS = [
    "messages", "tools", "tool_choice", "stop", "n", "logit_bias", "stream", "stream_options", "temperature",
    "top_k", "max_tokens", "seed", "logprobs", "top_logprobs", "response_format", "chat_template_kwargs",
    "modalities", "stop_token_ids", "cache_salt", "priority", "timeout", "model", "prompt", "echo",
]  # fmt: skip


def _taken_or_refused(parse: Any, data: bytes) -> None:
    try:
        parse(data, LIMITS)
    except RequestError as error:
        refusal = error
    else:
        return
    assert 400 <= refusal.status < 500
    assert len(refusal.message) < 1000


@given(content=JSON)
@example(content=[{"type": "image_url", "image_url": {"url": "http://[1"}}])
def test_any_content_is_taken_or_refused(content: Any) -> None:
    value = body(messages=[{"role": "user", "content": content}])
    _taken_or_refused(parse_chat, json.dumps(value).encode())


@settings(max_examples=60)
@given(changes=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4))
def test_any_field_is_taken_or_refused(changes: dict[str, Any]) -> None:
    _taken_or_refused(parse_chat, json.dumps(body(**changes)).encode())
    _taken_or_refused(parse_completion, json.dumps({"prompt": "x", **changes}).encode())


@given(data=st.binary(max_size=40))
def test_any_bytes_are_taken_or_refused(data: bytes) -> None:
    _taken_or_refused(parse_chat, data)
