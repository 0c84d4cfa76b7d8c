"""Constrained answers of the real pipeline through the OpenAI SDK: always valid, whatever the model wants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from enum import StrEnum
from typing import Annotated, Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

pytestmark = pytest.mark.process

ASK: list[Any] = [{"role": "user", "content": "Say something about a red circle as JSON."}]


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Thing(BaseModel):
    model_config = ConfigDict(extra="forbid")

    colour: Colour
    size: int = Field(ge=0, le=9)
    tags: list[Annotated[str, Field(max_length=6)]] = Field(max_length=2)


SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "corners": {"type": "integer", "minimum": 0, "maximum": 4},
        "note": {"type": "string", "maxLength": 12},
    },
    "required": ["colour", "corners", "note"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA}}
TOOL: Any = {
    "type": "function",
    "function": {"name": "paint", "parameters": SCHEMA, "strict": True, "description": "Paint a shape."},
}


@pytest.fixture
async def client(base_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


async def ask(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    settings = {"model": "mimo-nano", "messages": ASK, "max_tokens": 200, **fields}
    return await client.chat.completions.create(**settings)


async def test_choices_match_the_schema(client: openai.AsyncOpenAI) -> None:
    reply = await ask(
        client, response_format=FORMAT, n=4, temperature=0.7, seed=3, logprobs=True, top_logprobs=2
    )
    assert len(reply.choices) == 4
    for choice in reply.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
        spelt = b"".join(bytes(token.bytes) for token in choice.logprobs.content)
        assert spelt.decode() == choice.message.content
    tokens = sum(len(choice.logprobs.content) + 1 for choice in reply.choices)
    assert reply.usage.completion_tokens == tokens


async def test_a_stream_gives_the_same_json(client: openai.AsyncOpenAI) -> None:
    whole = await ask(client, response_format=FORMAT, temperature=0)
    pieces = []
    async for chunk in await ask(client, response_format=FORMAT, temperature=0, stream=True):
        pieces.append(chunk.choices[0].delta.content or "")
    assert "".join(pieces) == whole.choices[0].message.content
    jsonschema.validate(json.loads("".join(pieces)), SCHEMA)


async def test_the_sdk_parses_into_a_pydantic_model(client: openai.AsyncOpenAI) -> None:
    reply = await client.chat.completions.parse(
        model="mimo-nano", messages=ASK, response_format=Thing, max_tokens=300, temperature=0
    )
    parsed = reply.choices[0].message.parsed
    assert isinstance(parsed, Thing)
    assert 0 <= parsed.size <= 9


async def test_json_object_mode_and_its_ends(client: openai.AsyncOpenAI) -> None:
    form = {"type": "json_object"}
    cut = await ask(client, response_format=form, max_tokens=2, temperature=0)
    assert cut.choices[0].finish_reason == "length"
    assert cut.choices[0].message.content.lstrip()[:1] in ("", "{")  # blanks may come first
    stopped = await ask(client, response_format=FORMAT, stop=[":"], temperature=0)
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].message.content.split() == ["{", '"colour"'] or (
        stopped.choices[0].message.content.strip() == '{"colour"'
    )


async def test_thinking_comes_first_and_is_free(client: openai.AsyncOpenAI) -> None:
    reply = await ask(
        client,
        response_format=FORMAT,
        temperature=0,
        max_tokens=400,
        extra_body={"chat_template_kwargs": {"enable_thinking": True}},
    )
    choice = reply.choices[0]
    if choice.finish_reason == "stop":
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    else:  # a weak model may think until its tokens are used up
        assert reply.usage.completion_tokens == 400


ONLY = {"mode": "required", "tools": [{"type": "function", "function": {"name": "stop"}}]}


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "function": {"name": "paint"}},
        {"type": "allowed_tools", "allowed_tools": ONLY},
    ],
)
async def test_a_forced_call_is_well_formed_and_matches(client: openai.AsyncOpenAI, choice: Any) -> None:
    other = {
        "type": "function",
        "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}},
    }
    for seed in range(3):
        reply = await ask(
            client,
            tools=[TOOL, other],
            tool_choice=choice,
            temperature=1.2,
            seed=seed,
            parallel_tool_calls=False,
        )
        message = reply.choices[0].message
        assert not message.content
        [call] = message.tool_calls
        arguments = json.loads(call.function.arguments)
        if call.function.name == "paint":
            assert choice == "required" or choice["type"] == "function"
            jsonschema.validate(arguments, SCHEMA)
        else:
            assert call.function.name == "stop"
            assert choice == "required" or choice["type"] == "allowed_tools"
            assert arguments == {}


async def test_free_neighbours_answer_as_they_do_alone(client: openai.AsyncOpenAI) -> None:
    free = {"messages": [{"role": "user", "content": "Who are you?"}], "temperature": 0}
    alone = (await ask(client, **free)).choices[0].message.content
    mixed = await asyncio.gather(
        *(ask(client, **free) for _ in range(4)),
        *(ask(client, response_format=FORMAT, temperature=1.0, seed=seed) for seed in range(4)),
    )
    assert [reply.choices[0].message.content for reply in mixed[:4]] == [alone] * 4
    for reply in mixed[4:]:
        jsonschema.validate(json.loads(reply.choices[0].message.content), SCHEMA)


@pytest.mark.parametrize(
    ("schema", "param"),
    [
        ({"type": "object", "properties": {"a": {"not": {}}}}, ".properties.a.not"),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}, ""),
        ({"oneOf": [{"type": "object"}, {"minProperties": 1}]}, ""),
    ],
)
async def test_what_cannot_be_held_to_is_a_400_that_names_it(
    client: openai.AsyncOpenAI, schema: Any, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(
            client, response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        )
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["param"] == "response_format.json_schema.schema" + param
