"""The official SDK in all the ways it can be called, and what load generators send."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import openai
import pytest

from tests import client_shapes
from tests.gateway.conftest import FleetFactory
from tests.gateway.fake_workers import Script, ScriptedFleet
from tests.gateway.test_chat import PIXEL
from tests.patience import PATIENCE_S
from transom.messages import PrefillJob

SHAPES = client_shapes.with_media(b"picture", b"clip", b"sound")
ANSWER = "I see a red circle on white."
MESSAGES: list[Any] = [
    {"role": "developer", "content": "Be brief.", "name": "dev"},
    {"role": "user", "name": "someone", "content": [{"type": "text", "text": "What is this?"}]},
]
# Of the SDK's own test of `create` with every parameter: those that this server honours or may ignore.
EVERYTHING: dict[str, Any] = {
    "frequency_penalty": -2,
    "logit_bias": {"7": -100},
    "logprobs": True,
    "max_completion_tokens": 20,
    "metadata": {"foo": "string"},
    "modalities": ["text"],
    "n": 1,
    "parallel_tool_calls": True,
    "prediction": {"content": "string", "type": "content"},
    "presence_penalty": -2,
    "prompt_cache_key": "prompt-cache-key-1234",
    "reasoning_effort": "none",
    "response_format": {"type": "text"},
    "safety_identifier": "safety-identifier-1234",
    "seed": -9007199254740991,
    "service_tier": "auto",
    "stop": "\n",
    "store": True,
    "temperature": 1,
    "tool_choice": "none",
    "tools": [client_shapes.TOOL],
    "top_logprobs": 0,
    "top_p": 1,
    "user": "user-1234",
    "verbosity": "low",
}


async def read_stream(url: str, body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, which must end as it should."""
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        assert response.status == 200, await response.text()
        lines = [line async for line in response.content]
    events = [line[6:].strip() for line in lines if line.startswith(b"data: ")]
    assert events.pop() == b"[DONE]"
    return [json.loads(event) for event in events]


@pytest.mark.parametrize("name", SHAPES)
async def test_load_generators_are_understood(fleet: ScriptedFleet, name: str) -> None:
    fleet.script = Script(answer=lambda job: ANSWER)
    events = await read_stream(fleet.url + client_shapes.CHAT, SHAPES[name])
    text = "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])
    assert text == fleet.tokenizer.decode(fleet.tokenizer.encode(ANSWER)[:8])
    (job,) = await fleet.prefills[0].wait_for(PrefillJob)
    assert job.sampling.max_tokens == 8
    assert job.sampling.ignore_eos or job.sampling.min_tokens == 8
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 8
    continuous = SHAPES[name]["stream_options"].get("continuous_usage_stats", False)
    counts = [event["usage"] and event["usage"]["completion_tokens"] for event in events]
    if continuous:
        assert counts == sorted(counts)
        assert counts[0] >= 1
        assert {event["usage"]["prompt_tokens"] for event in events} == {events[-1]["usage"]["prompt_tokens"]}
    else:
        assert set(counts[:-1]) == {None}


@pytest.mark.parametrize("stream", [True, False])
async def test_guidellms_plain_completions(fleet: ScriptedFleet, stream: bool) -> None:
    fleet.script = Script(answer=lambda job: ANSWER)
    body = client_shapes.guidellm_completion(stream=stream)
    url = fleet.url + client_shapes.COMPLETIONS
    if stream:
        events = await read_stream(url, body)
        text = "".join(choice["text"] for event in events for choice in event["choices"])
        usage = events[-1]["usage"]
        assert all(event["usage"]["completion_tokens"] for event in events)
    else:
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
            whole = await response.json()
        text, usage = whole["choices"][0]["text"], whole["usage"]
    assert text == fleet.tokenizer.decode(fleet.tokenizer.encode(ANSWER)[:8])
    assert usage["completion_tokens"] == 8


async def test_what_load_generators_ask_first(fleet: ScriptedFleet) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{fleet.url}/health") as response:
            assert response.status == 200
        async with session.get(f"{fleet.url}/v1/models") as response:
            assert (await response.json())["data"][0]["id"] == "mimo-nano"


async def test_continuous_usage_alone_asks_for_nothing(fleet: ScriptedFleet) -> None:
    """As in vLLM: it only widens include_usage."""
    options = {"stream_options": {"continuous_usage_stats": True}, "stream": True}
    events = await read_stream(
        fleet.url + client_shapes.CHAT, {"messages": [{"role": "user", "content": "hi"}], **options}
    )
    assert not any("usage" in event for event in events)


async def test_the_sdk_with_every_parameter(fleet: ScriptedFleet, client: openai.AsyncOpenAI) -> None:
    fleet.script = Script(answer=lambda job: ANSWER, logprobs=True)
    whole = await client.chat.completions.create(model="mimo-nano", messages=MESSAGES, **EVERYTHING)
    assert whole.choices[0].message.content == ANSWER
    assert whole.choices[0].logprobs is not None
    stream = await client.chat.completions.create(
        model="mimo-nano", messages=MESSAGES, stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False}, **EVERYTHING,
    )  # fmt: skip
    pieces = [chunk async for chunk in stream]
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == ANSWER
    assert pieces[-1].usage == whole.usage


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("audio", {"format": "wav", "voice": "string"}),
        ("functions", [{"name": "name"}]),
        ("modalities", ["text", "audio"]),
        ("web_search_options", {"search_context_size": "low"}),
    ],
)
async def test_what_the_sdk_can_ask_for_and_nobody_gives(
    fleet: ScriptedFleet, client: openai.AsyncOpenAI, param: str, value: Any
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model="mimo-nano", messages=MESSAGES, extra_body={param: value})
    assert refused.value.param == param


async def test_the_sdks_other_ways_to_call(fleet: ScriptedFleet, client: openai.AsyncOpenAI) -> None:
    fleet.script = Script(answer=lambda job: ANSWER)
    chats = client.chat.completions
    raw = await chats.with_raw_response.create(model="mimo-nano", messages=MESSAGES)
    assert raw.headers["X-Request-Id"] == raw.parse().id == raw.request_id
    async with chats.with_streaming_response.create(model="mimo-nano", messages=MESSAGES) as response:
        assert response.is_closed is False
        assert (await response.parse()).choices[0].message.content == ANSWER
    async with chats.stream(model="mimo-nano", messages=MESSAGES) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert kinds[0] == "chunk"
    assert kinds[-1] == "content.done"
    assert final.choices[0].message.content == ANSWER
    plain = await client.completions.create(model="mimo-nano", prompt=["one", "two"], max_tokens=4, echo=True)
    assert [choice.index for choice in plain.choices] == [0, 1]
    assert (await client.models.retrieve("mimo-nano")).id == "mimo-nano"
    assert [model.id async for model in client.models.list()] == ["mimo-nano"]
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt-4o")


async def test_the_blocking_sdk_and_a_closed_stream(start_fleet: FleetFactory) -> None:
    fleet = await start_fleet()
    fleet.script = Script(answer=lambda job: "many " * 50)

    def ask() -> str:
        with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0) as sdk:
            with sdk.chat.completions.create(model="mimo-nano", messages=MESSAGES, stream=True) as stream:
                first = next(piece for piece in stream if piece.choices[0].delta.content)
            image: Any = [{"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}}]
            reply = sdk.chat.completions.create(
                model="mimo-nano", messages=[{"role": "user", "content": image}], max_tokens=2
            )
            assert reply.choices[0].finish_reason == "length"
            return first.choices[0].delta.content or ""

    first = await asyncio.to_thread(ask)
    assert first
    assert ("many " * 50).startswith(first)
    async with asyncio.timeout(PATIENCE_S):
        await fleet.stage._table.wait_idle()
