"""The HTTP side: limits before buffering, keys, CORS, the smaller endpoints, and what the log says."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from tests.gateway.conftest import FleetFactory
from tests.gateway.fake_workers import Script, ScriptedFleet
from tests.gateway.test_chat import user
from tests.gateway.test_streams import CALL, TOOLS, WANTED
from tests.patience import PATIENCE_S
from transom.errors import ConfigError
from transom.gateway.config import GatewayConfig
from transom.gateway.server import GatewayStage
from transom.messages import KVHandoff, PrefillJob, TokenChunk

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as found:
        yield found


async def error_of(response: aiohttp.ClientResponse) -> dict[str, Any]:
    error: dict[str, Any] = (await response.json())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_the_gateway_loads_no_torch() -> None:
    code = "import sys, transom.gateway.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=PATIENCE_S).returncode == 0


async def test_a_body_that_is_too_large_is_refused_before_it_is_read(
    start_fleet: FleetFactory, session: aiohttp.ClientSession
) -> None:
    fleet = await start_fleet(max_body_mb=1)
    host, port = fleet.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: 999999999999\r\n\r\n"
    )
    assert (await asyncio.wait_for(reader.readline(), PATIENCE_S)).split()[1] == b"413"
    writer.close()
    await writer.wait_closed()

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 100_000

    async with session.post(
        fleet.url + CHAT, data=endless(), headers={"Content-Type": "application/json"}
    ) as response:
        assert response.status == 413
        assert (await error_of(response))["code"] == "payload_too_large"
    assert fleet.stage.load()["buffered_bytes"] == 0


async def test_a_body_that_never_ends_is_given_up(start_fleet: FleetFactory) -> None:
    fleet = await start_fleet(body_timeout_s=0.2)
    host, port = fleet.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: 50\r\n\r\n{"
    )
    assert (await asyncio.wait_for(reader.readline(), PATIENCE_S)).split()[1] == b"408"
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("Content-Type: application/json\r\nContent-Length: 999999999999", 413),
        ("Content-Type: text/plain\r\nContent-Length: 9", 415),
        ("Content-Type: application/json\r\nContent-Length: 9\r\nAuthorization: Bearer wrong", 401),
    ],
)
async def test_a_body_that_is_not_wanted_is_never_asked_for(
    start_fleet: FleetFactory, tmp_path: Path, headers: str, status: int
) -> None:
    """A client that waits for leave to send gets its refusal instead."""
    (tmp_path / "keys").write_text("good\n")
    fleet = await start_fleet(api_keys_file=str(tmp_path / "keys"))
    key = "" if "Authorization" in headers else "\r\nAuthorization: Bearer good"
    async with connected(fleet, f"POST {CHAT}", f"{headers}{key}\r\nExpect: 100-continue") as (reader, _):
        assert int((await reader.readline()).split()[1]) == status


async def test_a_body_that_is_wanted_is_asked_for(fleet: ScriptedFleet) -> None:
    body = json.dumps(BODY).encode()
    headers = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nExpect: 100-Continue"
    async with connected(fleet, f"POST {CHAT}", headers) as (reader, writer):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await reader.readline()).split()[1] == b"200"
    async with connected(fleet, f"POST {CHAT}", headers.replace("100-Continue", "a-pony")) as (reader, _):
        assert (await reader.readline()).split()[1] == b"417"
        assert b'"expectation_failed"' in await reader.readuntil(b"}}")


@asynccontextmanager
async def connected(
    fleet: ScriptedFleet, line: str, headers: str
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Send the head of a request over a connection of its own."""
    host, port = fleet.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"{line} HTTP/1.1\r\nHost: x\r\n{headers}\r\n\r\n".encode())
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield reader, writer
    finally:
        writer.close()
        await writer.wait_closed()


async def test_wrong_paths_methods_types_and_models_are_openai_errors(
    fleet: ScriptedFleet, session: aiohttp.ClientSession
) -> None:
    async with session.post(fleet.url + "/v1/nothing", json={}) as response:
        assert (response.status, (await error_of(response))["code"]) == (404, "not_found")
    async with session.get(fleet.url + "/x%0Aforged%20line") as response:
        assert "\n" not in (await error_of(response))["message"]
    async with session.get(fleet.url + CHAT) as response:
        assert (response.status, (await error_of(response))["type"]) == (405, "invalid_request_error")
        assert response.headers["Allow"] == "POST"
    async with session.post(fleet.url + CHAT, data=json.dumps(BODY)) as response:
        assert (response.status, (await error_of(response))["code"]) == (415, "unsupported_media_type")
    async with session.post(fleet.url + CHAT, json=BODY | {"model": "gpt-9"}) as response:
        assert (response.status, (await error_of(response))["param"]) == (404, "model")
    async with session.post(fleet.url + CHAT, json={"messages": []}) as response:
        assert (response.status, (await error_of(response))["param"]) == (400, "messages")
    assert not fleet.prefills[0].seen


async def test_a_prompt_longer_than_the_context_is_refused(
    start_fleet: FleetFactory, session: aiohttp.ClientSession
) -> None:
    fleet = await start_fleet(max_context=64)
    long = {"messages": [{"role": "user", "content": "word " * 100}]}
    async with session.post(fleet.url + CHAT, json=long) as response:
        error = await error_of(response)
        assert (response.status, error["code"]) == (400, "context_length_exceeded")
        assert "64 tokens" in error["message"]
    async with session.post(fleet.url + CHAT, json={"messages": user("x" * 100_000)}) as response:
        assert (await error_of(response))["code"] == "context_length_exceeded"
    for prompt in ("word " * 100, "x" * 100_000, ["hi", "word " * 100], [1] * 70):
        async with session.post(fleet.url + "/v1/completions", json={"prompt": prompt}) as response:
            error = await error_of(response)
            assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    async with session.post(fleet.url + CHAT, json=BODY | {"max_tokens": 64}) as response:
        error = await error_of(response)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    async with session.post(fleet.url + CHAT, json=BODY) as response:
        assert response.status == 200
    job = (await fleet.prefills[0].wait_for(PrefillJob))[0]
    assert sum(len(part.token_ids) for part in job.parts) + job.sampling.max_tokens == 64


async def test_models_are_listed(fleet: ScriptedFleet, client: openai.AsyncOpenAI) -> None:
    listed = (await client.models.list()).data
    assert [model.id for model in listed] == ["mimo-nano"]
    assert (await client.models.retrieve("mimo-nano")).to_dict()["max_model_len"] == 16384
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


async def test_a_served_name_may_hold_a_slash(start_fleet: FleetFactory) -> None:
    fleet = await start_fleet(served_model_name=("org/name", "short"))
    async with openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0) as client:
        assert (await client.models.retrieve("org/name")).id == "org/name"
        reply = await client.chat.completions.create(model="short", messages=user("hi"))
        assert reply.model == "short"


async def test_keys_are_asked_for_everywhere_but_on_probes(
    start_fleet: FleetFactory, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nalpha-key\n\n  beta-key  \n")
    fleet = await start_fleet(api_keys_file=str(keys))
    for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic alpha-key"}):
        async with session.post(fleet.url + CHAT, json=BODY, headers=header) as response:
            assert (response.status, (await error_of(response))["type"]) == (401, "authentication_error")
        async with session.get(fleet.url + "/v1/models", headers=header) as response:
            assert response.status == 401
    for key in ("alpha-key", "beta-key"):
        headers = {"Authorization": f"Bearer {key}"}
        async with session.post(fleet.url + CHAT, json=BODY, headers=headers) as response:
            assert response.status == 200
    for probe in ("/health", "/ready"):
        async with session.get(fleet.url + probe) as response:
            assert response.status == 200
    assert not fleet.encoders[0].seen


def test_a_key_file_without_keys_is_no_open_door(tmp_path: Path) -> None:
    empty = tmp_path / "keys"
    empty.write_text("\n# nothing\n")
    for path in (empty, tmp_path / "missing"):
        with pytest.raises(ConfigError):
            GatewayStage(GatewayConfig(api_keys_file=str(path)))


async def test_other_origins_are_shut_out_unless_named(
    start_fleet: FleetFactory, session: aiohttp.ClientSession
) -> None:
    closed = await start_fleet()
    preflight = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    async with session.options(closed.url + CHAT, headers=preflight) as response:
        assert response.status == 405
        assert "Access-Control-Allow-Origin" not in response.headers
    opened = await start_fleet(cors_origins=("https://page.example",))
    async with session.options(opened.url + CHAT, headers=preflight) as response:
        assert response.status == 204
        assert response.headers["Access-Control-Allow-Origin"] == "https://page.example"
    for stream in (False, True):
        body = BODY | {"stream": stream}
        async with session.post(opened.url + CHAT, json=body, headers=preflight) as response:
            assert response.headers["Access-Control-Allow-Origin"] == "https://page.example"
    async with session.options(opened.url + CHAT, headers=preflight | {"Origin": "https://evil"}) as response:
        assert "Access-Control-Allow-Origin" not in response.headers


async def test_plain_completions(fleet: ScriptedFleet, client: openai.AsyncOpenAI) -> None:
    fleet.script = Script(answer=lambda job: f"{fleet.prompt_text(job)}!", logprobs=True)
    reply = await client.completions.create(model="mimo-nano", prompt=["one", "two"], n=2, logprobs=1)
    assert [choice.text for choice in reply.choices] == ["one!", "one!", "two!", "two!"]
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == sum(len(fleet.tokenizer.encode(text)) for text in ("one", "two"))
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == "one!"
    assert (logprobs.text_offset or [])[0] == 0
    fleet.script = Script(answer=lambda job: f"{fleet.prompt_text(job)}!")
    ids = fleet.tokenizer.encode("by ids")
    echoed = await client.completions.create(model="mimo-nano", prompt=ids, echo=True, max_tokens=50)
    assert echoed.choices[0].text == "by idsby ids!"
    stream = await client.completions.create(model="mimo-nano", prompt="s", stream=True, echo=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "ss!"


async def test_tokens_go_there_and_back(fleet: ScriptedFleet, session: aiohttp.ClientSession) -> None:
    text = "héllo 🎈"
    async with session.post(fleet.url + "/tokenize", json={"prompt": text}) as response:
        tokenized = await response.json()
    assert tokenized["count"] == len(tokenized["tokens"])
    async with session.post(fleet.url + "/detokenize", json={"tokens": tokenized["tokens"]}) as response:
        assert await response.json() == {"prompt": text}
    picture = {"type": "image_url", "image_url": {"url": "https://host/x.png"}}
    async with session.post(fleet.url + "/tokenize", json={"messages": user([picture])}) as response:
        assert fleet.tokenizer.token_id("<|image_pad|>") in (await response.json())["tokens"]
    async with session.post(fleet.url + "/detokenize", json={"tokens": [10**9]}) as response:
        assert (await error_of(response))["param"] == "tokens[0]"


async def test_either_a_prompt_or_messages_are_tokenised(
    fleet: ScriptedFleet, session: aiohttp.ClientSession
) -> None:
    for body, problem in (
        ({"messages": user("a"), "prompt": "a"}, "only allowed without messages"),
        ({}, "a required string is missing"),
    ):
        async with session.post(fleet.url + "/tokenize", json=body) as response:
            error = await error_of(response)
            assert (response.status, error["param"]) == (400, "prompt")
            assert problem in error["message"]


async def test_texts_far_beyond_the_context_are_not_worked_on(
    start_fleet: FleetFactory, session: aiohttp.ClientSession
) -> None:
    """Turning megabytes into tokens takes a core for minutes; so many of them fit no prompt."""
    fleet = await start_fleet(max_context=64)
    for path, body, param in (
        ("/tokenize", {"prompt": "a " * 500_000}, "prompt"),
        ("/tokenize", {"messages": user("a " * 500_000)}, "messages"),
        ("/detokenize", {"tokens": [5] * 65}, "tokens"),
    ):
        async with session.post(fleet.url + path, json=body) as response:
            error = await error_of(response)
            assert (response.status, error["code"], error["param"]) == (400, "context_length_exceeded", param)
            assert "64" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls_and_thinking(
    fleet: ScriptedFleet, client: openai.AsyncOpenAI, stream: bool
) -> None:
    fleet.script = Script(answer=lambda job: f"<think>Weather? Ask.</think>One moment.\n{CALL}\n{CALL}")
    request: dict[str, Any] = {
        "model": "mimo-nano",
        "messages": user("weather?"),
        "tools": TOOLS,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": True}},
    }
    if stream:
        content = reasoning = ""
        calls: dict[int, list[str]] = {}
        finish = None
        written = await in_two_parts_each(fleet)
        async for chunk in await client.chat.completions.create(**request, stream=True):
            choice = chunk.choices[0]
            content += choice.delta.content or ""
            reasoning += choice.delta.to_dict().get("reasoning_content") or ""  # type: ignore[operator]
            for call in choice.delta.tool_calls or []:
                assert call.function is not None
                calls.setdefault(call.index, []).append(call.function.arguments or "")
                if call.function.arguments:
                    written[call.index].set()
            finish = choice.finish_reason or finish
        texts = ["".join(pieces) for pieces in calls.values()]
        assert all(len(pieces) > 1 for pieces in calls.values()), "arguments must come as they are written"
    else:
        reply = await client.chat.completions.create(**request)
        message = reply.choices[0].message
        content, finish = message.content or "", reply.choices[0].finish_reason
        reasoning = message.to_dict()["reasoning_content"]  # type: ignore[assignment]
        texts = [call.function.arguments for call in message.tool_calls or []]  # type: ignore[union-attr]
        assert len({call.id for call in message.tool_calls or []}) == 2
        assert reply.usage is not None
        assert reply.usage.completion_tokens_details is not None
        assert (reply.usage.completion_tokens_details.reasoning_tokens or 0) > 3
    assert (content, reasoning, finish) == ("One moment.", "Weather? Ask.", "tool_calls")
    assert [json.loads(text) for text in texts] == [WANTED, WANTED]


async def in_two_parts_each(fleet: ScriptedFleet) -> list[asyncio.Event]:
    """Let decode stop in the middle of each of two calls, until the test says that it has seen of it."""
    seen = [asyncio.Event(), asyncio.Event()]
    decode = fleet.decodes[0]

    async def write(received: Any) -> None:
        handoff = received.message
        if not isinstance(handoff, KVHandoff):
            return
        ids = fleet.answer_ids(fleet._jobs[handoff.request_id])
        middle = CALL.index("<parameter=deep>")
        text = fleet.tokenizer.decode(ids, skip_special=False)
        places = [text.index(CALL) + middle, text.rindex(CALL) + middle, len(text)]
        at = 1  # the first one came from prefill
        for place, event in zip(places, [*seen, None], strict=True):
            end = next(
                n
                for n in range(at, len(ids) + 1)
                if len(fleet.tokenizer.decode(ids[:n], skip_special=False)) >= place
            )
            last = event is None
            chunk = TokenChunk(
                request_id=handoff.request_id,
                index=at,
                token_ids=ids[at:end],
                finish_reason="stop" if last else None,
            )
            decode.transport.send(handoff.gateway, chunk)
            at = end
            if event is not None:
                async with asyncio.timeout(PATIENCE_S):
                    await event.wait()

    decode.on_message = write
    return seen


async def test_tool_choice_shapes_the_prompt(fleet: ScriptedFleet, client: openai.AsyncOpenAI) -> None:
    async def ask(choice: Any, answer: str) -> tuple[str, Any]:
        fleet.script = Script(answer=lambda job: answer)
        reply = await client.chat.completions.create(
            model="mimo-nano",
            messages=user("hi"),
            tools=TOOLS,
            tool_choice=choice,  # type: ignore[arg-type]
        )
        jobs = [one.message for one in fleet.prefills[0].seen if isinstance(one.message, PrefillJob)]
        return fleet.prompt_text(jobs[-1]), reply.choices[0]

    prompt, choice = await ask("none", "plain")
    assert "weather" not in prompt
    assert choice.finish_reason == "stop"
    prompt, choice = await ask(
        "required", "weather>\n<parameter=days>3</parameter>\n</function>\n</tool_call>"
    )
    assert prompt.endswith("<think></think><tool_call>\n<function=")
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"days": 3}
    assert choice.finish_reason == "tool_calls"
    named = {"type": "function", "function": {"name": "weather"}}
    prompt, choice = await ask(named, "\n<parameter=days>4</parameter></function></tool_call>" + CALL)
    assert prompt.endswith("<tool_call>\n<function=weather>")
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"]
    assert choice.finish_reason == "stop"


async def test_each_request_leaves_one_line_in_the_log(
    fleet: ScriptedFleet, client: openai.AsyncOpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    data = "data:image/png;base64," + base64.b64encode(b"private" * 10).decode()
    with caplog.at_level(logging.INFO):
        reply = await client.chat.completions.create(
            model="mimo-nano",
            messages=user(
                [{"type": "image_url", "image_url": {"url": data}}, {"type": "text", "text": "psst"}]
            ),
        )
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(
                model="mimo-nano", messages=user([{"type": "image_url", "image_url": {"url": data + "*"}}])
            )
    lines = [record for record in caplog.records if record.getMessage().startswith("chat ")]
    assert len(lines) == 1
    assert lines[0].request_id == reply.id  # type: ignore[attr-defined]
    for word in ("status=200", "finish=stop", "ttft_ms=", "total_ms=", "media0.total_ms=1.0", "prompt="):
        assert word in lines[0].getMessage()
    assert not any(
        "psst" in record.getMessage() or data[30:60] in record.getMessage() for record in caplog.records
    )
