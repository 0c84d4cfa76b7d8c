"""Chats through the real HTTP API and the real wire protocol, with the official SDK as the client."""

from __future__ import annotations

import asyncio
import base64
import threading
from typing import Any

import aiohttp
import openai
import pytest

from tests.gateway.conftest import FleetFactory
from tests.gateway.fake_workers import ROWS, Script, ScriptedFleet
from transom.gateway.responses import ChatRenderer
from transom.messages import EncodeJob, KVHandoff, PrefillJob

PIXEL = "data:image/png;base64," + base64.b64encode(b"not looked at by the gateway").decode()


def user(content: Any) -> list[Any]:
    return [{"role": "user", "content": content}]


async def test_an_answer_comes_back_whole(fleet: ScriptedFleet, client: openai.AsyncOpenAI) -> None:
    fleet.script = Script(answer=lambda job: "It is a red circle.")
    reply = await client.chat.completions.create(model="mimo-nano", messages=user("What is it?"))
    choice = reply.choices[0]
    assert choice.message.content == "It is a red circle."
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert reply.object == "chat.completion"
    assert reply.id.startswith("chatcmpl-")
    answer_len = len(fleet.tokenizer.encode("It is a red circle."))
    assert reply.usage is not None
    assert reply.usage.completion_tokens == answer_len + 1
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 3


async def test_what_encoders_remark_is_in_the_usage(fleet: ScriptedFleet, client: openai.AsyncOpenAI) -> None:
    picture = {"type": "image_url", "image_url": {"url": PIXEL}}
    content = [{"type": "text", "text": "Both?"}, picture, picture]
    for notes in ((), ("image is a sketch",)):
        fleet.script = Script(notes=notes)
        reply = await client.chat.completions.create(
            model="mimo-nano", messages=[{"role": "user", "content": content}]
        )
        assert reply.usage is not None
        said = (reply.usage.model_extra or {}).get("media_notes")
        assert said == ([{"item": item, "note": notes[0]} for item in (0, 1)] if notes else None)


async def test_a_stream_says_the_same_as_the_whole_answer(
    fleet: ScriptedFleet, client: openai.AsyncOpenAI
) -> None:
    fleet.script = Script(answer=lambda job: "eins zwei drei — café 日本 🎈", chunk=3)
    stream = await client.chat.completions.create(
        model="mimo-nano",
        messages=user("count"),
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "eins zwei drei — café 日本 🎈"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_tokens_that_overtake_each_other_come_out_in_order(
    fleet: ScriptedFleet, client: openai.AsyncOpenAI
) -> None:
    text = "one two three four five six seven"
    fleet.script = Script(answer=lambda job: text, reorder=True)
    reply = await client.chat.completions.create(model="mimo-nano", messages=user("count"))
    assert reply.choices[0].message.content == text
    assert reply.choices[0].finish_reason == "stop"


async def test_media_of_all_kinds_keep_their_order(fleet: ScriptedFleet, client: openai.AsyncOpenAI) -> None:
    sound = base64.b64encode(b"RIFF").decode()
    content = [
        {"type": "text", "text": "first "},
        {"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}},
        {"type": "text", "text": " then "},
        {"type": "video_url", "video_url": {"url": "https://example.org/a.mp4", "fps": 2, "max_frames": 16}},
        {"type": "input_audio", "input_audio": {"data": sound, "format": "wav"}},
        {"type": "text", "text": " end"},
    ]
    fleet.script = Script(answer=lambda job: fleet.prompt_text(job).split("user\n")[1].split("<|im_end|>")[0])
    reply = await client.chat.completions.create(model="mimo-nano", messages=user(content))
    assert reply.choices[0].message.content == "first <image> then <video><audio> end"
    assert reply.usage is not None
    details = reply.usage.prompt_tokens_details
    assert details is not None
    counts = details.to_dict()
    assert [counts[f"{kind}_tokens"] for kind in ("image", "video", "audio")] == [ROWS] * 3

    jobs = await fleet.encoders[0].wait_for(EncodeJob, 3)
    image, video, audio = sorted(jobs, key=lambda job: job.item_index)
    frames = {one.message.item_index: one.frames for one in fleet.encoders[0].seen}  # type: ignore[union-attr]
    assert image.param == "messages[0].content[1].image_url.url"
    assert image.options.max_pixels == 512 * 512
    assert bytes(frames[0][0]) == b"not looked at by the gateway"
    assert (video.url, video.options.fps, video.options.max_frames) == ("https://example.org/a.mp4", 2.0, 16)
    assert frames[1] == []
    assert bytes(frames[2][0]) == b"RIFF"
    assert audio.modality == "audio"
    assert {job.reply_to for job in jobs} == {fleet.prefills[0].transport.address}


async def test_sixteen_clients_get_their_own_answers(start_fleet: FleetFactory) -> None:
    fleet = await start_fleet(encoders=2, prefills=2, decodes=2)

    def answer(job: PrefillJob) -> str:
        return "echo " + fleet.prompt_text(job).split("user\n")[1].split("<|im_end|>")[0]

    fleet.script = Script(answer=answer)

    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        content: Any = f"question {number}"
        if number % 3 == 0:
            content = [{"type": "text", "text": content}, {"type": "image_url", "image_url": {"url": PIXEL}}]
        if number % 2:
            reply = await client.chat.completions.create(model="mimo-nano", messages=user(content))
            return reply.choices[0].message.content or ""
        stream = await client.chat.completions.create(model="mimo-nano", messages=user(content), stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async with openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0) as client:
        answers = await asyncio.gather(*(ask(client, number) for number in range(16)))
    expected = [f"echo question {n}" + ("<image>" if n % 3 == 0 else "") for n in range(16)]
    assert answers == expected
    for worker in (*fleet.prefills, *fleet.decodes):
        assert worker.seen, "a worker stood idle"
    assert fleet.stage.load()["choices"] == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_have_seeds_of_their_own(
    fleet: ScriptedFleet, client: openai.AsyncOpenAI, stream: bool
) -> None:
    fleet.script = Script(answer=lambda job: f"seed {job.sampling.seed}")
    request: dict[str, Any] = {"model": "mimo-nano", "messages": user("hi"), "n": 3, "seed": 40}
    if stream:
        texts = ["", "", ""]
        async for chunk in await client.chat.completions.create(**request, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    else:
        reply = await client.chat.completions.create(**request)
        texts = [choice.message.content or "" for choice in reply.choices]
        assert reply.usage is not None
        jobs = await fleet.prefills[0].wait_for(PrefillJob, 3)
        assert reply.usage.prompt_tokens == len(jobs[0].parts[0].token_ids)
    assert texts == ["seed 40", "seed 41", "seed 42"]


async def test_a_stop_string_across_tokens_ends_the_answer_everywhere(
    fleet: ScriptedFleet, client: openai.AsyncOpenAI
) -> None:
    fleet.script = Script(answer=lambda job: "one two STOP three four five six seven")
    reply = await client.chat.completions.create(
        model="mimo-nano", messages=user("count"), stop=["o STOP th", "never"]
    )
    assert reply.choices[0].message.content == "one tw"
    assert reply.choices[0].finish_reason == "stop"


async def test_max_tokens_ends_with_length(fleet: ScriptedFleet, client: openai.AsyncOpenAI) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        request: dict[str, Any] = {name: 1}
        reply = await client.chat.completions.create(model="mimo-nano", messages=user("hi"), **request)
        assert reply.choices[0].finish_reason == "length"
        assert reply.usage is not None
        assert reply.usage.completion_tokens == 1


async def test_logprobs(fleet: ScriptedFleet, client: openai.AsyncOpenAI) -> None:
    fleet.script = Script(answer=lambda job: "héllo you", logprobs=True)
    ids = fleet.tokenizer.encode("héllo you")
    reply = await client.chat.completions.create(
        model="mimo-nano", messages=user("hi"), logprobs=True, top_logprobs=2
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert bytes(b for one in logprobs.content for b in one.bytes or []).decode() == "héllo you"
    assert [one.logprob for one in logprobs.content] == [-0.5] * len(ids)
    assert len(logprobs.content[0].top_logprobs) == 2
    streamed = []
    async for chunk in await client.chat.completions.create(
        model="mimo-nano", messages=user("hi"), logprobs=True, stream=True
    ):
        found = chunk.choices[0].logprobs
        streamed += found.content or [] if found else []
    assert len(streamed) == len(ids)
    assert (await fleet.prefills[0].wait_for(PrefillJob))[0].sampling.top_logprobs == 2


async def test_many_logprobs_are_written_beside_everything_else(
    start_fleet: FleetFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty alternatives of each of thousands of tokens take seconds to write; their memory is bounded."""
    threads: list[str] = []
    whole = ChatRenderer.whole

    def watched(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return whole(*args)

    monkeypatch.setattr(ChatRenderer, "whole", watched)
    fleet = await start_fleet(max_buffered_mb=1)
    hold = asyncio.Event()
    fleet.script = Script(answer=lambda job: "word " * 2000, logprobs=True, chunk=40, hold=hold)

    async def ask(**fields: Any) -> tuple[int, Any]:
        body = {"messages": user("hi"), "max_tokens": 2500, **fields}
        async with session.post(f"{fleet.url}/v1/chat/completions", json=body) as response:
            return response.status, await response.json()

    async with aiohttp.ClientSession() as session:
        asking = [asyncio.create_task(ask(logprobs=True, top_logprobs=2)) for _ in range(2)]
        await fleet.decodes[0].wait_for(KVHandoff, 2)
        hold.set()
        answers = await asyncio.gather(*asking)
        (refused,) = (answer for status, answer in answers if status == 429)
        assert "of requests and answers are held, 1048576 are allowed" in refused["error"]["message"]
        (taken,) = (answer for status, answer in answers if status == 200)
        tokens = taken["choices"][0]["logprobs"]["content"]
        assert len(tokens) == len(fleet.tokenizer.encode("word " * 2000))
        assert tokens[7]["top_logprobs"][0] == {key: tokens[7][key] for key in ("token", "logprob", "bytes")}
        assert fleet.stage.load()["buffered_bytes"] == 0
        fleet.script = Script()
        assert (await ask())[0] == 200
    assert [name.partition("_")[0] for name in threads] == ["build", threading.current_thread().name]


async def test_an_answer_that_is_too_much_alone_ends_and_may_be_streamed(start_fleet: FleetFactory) -> None:
    fleet = await start_fleet(max_buffered_mb=1)
    fleet.script = Script(answer=lambda job: "word " * 2000, logprobs=True, chunk=40)
    body = {"messages": user("hi"), "max_tokens": 2000, "n": 2, "logprobs": True, "top_logprobs": 2}
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{fleet.url}/v1/chat/completions", json=body) as response:
            assert response.status == 413
            error = (await response.json())["error"]
        assert error["code"] == "payload_too_large"
        assert "alone takes more than 1048576 bytes" in error["message"]
        assert fleet.stage.load()["buffered_bytes"] == 0
        async with session.post(f"{fleet.url}/v1/chat/completions", json=body | {"stream": True}) as response:
            assert response.status == 200
            assert (await response.read()).endswith(b"data: [DONE]\n\n")


async def test_sampling_reaches_the_workers(fleet: ScriptedFleet, client: openai.AsyncOpenAI) -> None:
    await client.chat.completions.create(
        model="mimo-nano",
        messages=user("hi"),
        temperature=0.3,
        top_p=0.9,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"5": 10},
        extra_body={"top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "priority": 3,
                    "cache_salt": "mine", "stop_token_ids": [9]},
    )  # fmt: skip
    job = (await fleet.prefills[0].wait_for(PrefillJob))[0]
    sampling = job.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.3, 0.9, 7, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert (sampling.repetition_penalty, sampling.ignore_eos) == (1.1, True)
    assert (sampling.logit_bias, sampling.stop_token_ids) == ({5: 10.0}, (9,))
    assert (job.priority, job.cache_salt) == (3, "mine")
