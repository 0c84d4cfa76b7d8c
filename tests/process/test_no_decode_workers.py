"""`transom up --decodes 0`: prefill workers decode themselves, and nobody who asks can tell."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import media
import pytest
from test_disconnects import until_nothing_is_held

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def alone(media_folder: Any) -> Any:
    from conftest import Pipeline

    running = Pipeline("--prefills", "2", "--decodes", "0")
    yield running
    running.stop()
    assert not running.leaks(), running.log()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as one:
        yield one


def body(number: int, **more: Any) -> dict[str, Any]:
    """One of several requests, some with media, with answers of different lengths."""
    content: list[dict[str, Any]] = [{"type": "text", "text": f"What is this? ({number})"}]
    if number % 3 == 0:
        url = media.data_url(media.picture(("red", "blue", "green")[number % 4 % 3], "circle"), "image/png")
        content.insert(0, {"type": "image_url", "image_url": {"url": url}})
    return {
        "messages": [{"role": "user", "content": content}],
        "temperature": 0.7 if number % 4 == 1 else 0,
        "seed": number,
        "max_tokens": 1 if number == 5 else 10 + 9 * number,
        "ignore_eos": True,
        **more,
    }


async def ask(session: aiohttp.ClientSession, url: str, asked: dict[str, Any]) -> Any:
    async with session.post(f"{url}/v1/chat/completions", json=asked) as response:
        reply = await response.json()
        assert response.status == 200, reply
    return reply


async def test_answers_are_those_of_separate_workers(
    session: aiohttp.ClientSession, base_url: str, alone: Any
) -> None:
    asked = [body(number) for number in range(12)]
    apart = await asyncio.gather(*(ask(session, base_url, one) for one in asked))
    together = await asyncio.gather(*(ask(session, alone.url, one) for one in asked))
    for one, other in zip(apart, together, strict=True):
        assert one["choices"] == other["choices"]
        for count in ("prompt_tokens", "completion_tokens"):
            assert one["usage"][count] == other["usage"][count]


async def test_the_next_turn_computes_no_answer_anew(session: aiohttp.ClientSession, alone: Any) -> None:
    first = {"role": "user", "content": "What can you do?"}
    begun = {"messages": [first], "temperature": 0, "max_tokens": 80}
    reply = await ask(session, alone.url, begun)
    answer = reply["choices"][0]["message"]["content"]
    assert reply["usage"]["completion_tokens"] > 20
    turns = [first, {"role": "assistant", "content": answer}, {"role": "user", "content": "Thanks!"}]
    # With nothing in work the two workers take turns: one of them has computed the answer.
    usages = []
    for _ in range(2):
        await until_nothing_is_held(session, alone.url)
        usages.append((await ask(session, alone.url, {**begun, "messages": turns}))["usage"])
    hits = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert max(hits) > reply["usage"]["prompt_tokens"]


async def test_a_client_that_leaves_frees_the_worker(session: aiohttp.ClientSession, alone: Any) -> None:
    asked = body(2, max_tokens=2000, stream=True)
    async with session.post(f"{alone.url}/v1/chat/completions", json=asked) as response:
        request_id = response.headers["x-request-id"]
        await response.content.readuntil(b"\n\n")
        await response.content.readuntil(b"\n\n")
    await until_nothing_is_held(session, alone.url)
    async with session.get(f"{alone.url}/v1/requests/{request_id}/trace") as response:
        spans = (await response.json())["spans"]
    workers = {span["worker"] for span in spans if span["stage"] in ("prefill", "decode")}
    assert len(workers) == 1
    assert workers.pop().startswith("prefill-")


async def test_its_death_ends_answers_in_decoding(session: aiohttp.ClientSession, alone: Any) -> None:
    asked = body(2, max_tokens=4000, stream=True)
    async with session.post(f"{alone.url}/v1/chat/completions", json=asked) as response:
        # The role, then the first text. No more: all of the text may come at once, and the rest of
        # the tokens are the end mark over and over, which is never sent.
        for _ in range(2):
            await response.content.readuntil(b"\n\n")
        for pid in alone.stage_pids("prefill"):
            os.kill(pid, signal.SIGKILL)
        rest = await response.content.read()
    assert b"prefill worker of this request was lost" in rest
    async with session.get(f"{alone.url}/v1/fleet") as response:
        assert (await response.json())["gateway"]["choices"] == 0
