"""Our own chat client and benchmark against real HTTP servers that behave in every way a server can."""

from __future__ import annotations

import asyncio
import base64
import json
import math
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from transom.bench import chat as bench
from transom.client import Answer, ChatClient, media_part
from transom.commands.chat import Chat
from transom.errors import ConfigError, RequestError, TransomError, UnavailableError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[[Handler], Awaitable[str]]


def piece(text: str, finish: str | None = None) -> bytes:
    event = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}
    return b"data: " + json.dumps(event).encode() + b"\n\n"


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts servers with one chat handler; returns their base URL."""
    runners: list[web.AppRunner] = []

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def start(handler: Handler) -> str:
        app = web.Application()
        app.add_routes([web.post("/v1/chat/completions", handler), web.get("/v1/models", models)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


def streaming(*writes: bytes, close: bool = True) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert body["stream"] is True
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for data in writes:
            await response.write(data)
        if not close and request.transport is not None:
            request.transport.abort()
        return response

    return handler


async def ask(url: str) -> tuple[list[str], Answer]:
    answer = Answer()
    async with ChatClient(url) as client:
        pieces = [piece async for piece in client.stream({"model": "m", "messages": []}, answer)]
    return pieces, answer


async def test_pieces_usage_and_times(serve: Serve) -> None:
    url = await serve(streaming(piece("Hel"), b": ping\n\n", piece("lo", "stop"), USAGE, DONE))
    pieces, answer = await ask(url)
    assert pieces == ["Hel", "lo"]
    assert (answer.text, answer.finish_reason) == ("Hello", "stop")
    assert answer.usage == {"prompt_tokens": 5, "completion_tokens": 2}
    assert answer.ttft_s is not None
    assert 0 < answer.ttft_s <= answer.e2e_s


async def test_events_may_be_cut_anywhere(serve: Serve) -> None:
    stream = piece("é€") + piece("\n\ndata: x", "length") + DONE
    url = await serve(streaming(*(stream[i : i + 1] for i in range(len(stream)))))
    assert (await ask(url))[1].text == "é€\n\ndata: x"


async def test_one_event_of_a_megabyte(serve: Serve) -> None:
    url = await serve(streaming(piece("x" * 900_000), DONE))
    assert len((await ask(url))[1].text) == 900_000


@pytest.mark.parametrize("close", [True, False])
async def test_a_stream_that_breaks_off_is_an_error(serve: Serve, close: bool) -> None:
    url = await serve(streaming(piece("half"), close=close))
    with pytest.raises(UnavailableError):
        await ask(url)


async def test_an_error_in_the_stream_is_raised(serve: Serve) -> None:
    url = await serve(streaming(piece("x"), b'data: {"error": {"message": "the worker died"}}\n\n'))
    with pytest.raises(TransomError, match="the worker died"):
        await ask(url)


async def test_refusals_carry_message_and_parameter(serve: Serve) -> None:
    async def handler(request: web.Request) -> web.Response:
        body = {"error": {"message": "too long", "code": "context_length_exceeded", "param": "messages"}}
        return web.json_response(body, status=400)

    with pytest.raises(RequestError, match="HTTP 400: too long") as caught:
        await ask(await serve(handler))
    assert (caught.value.status, caught.value.param) == (400, "messages")


async def test_a_server_of_another_kind_is_told_apart(serve: Serve) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(text="<html>proxy</html>", status=502)

    with pytest.raises(UnavailableError, match="HTTP 502, not JSON: '<html>proxy"):
        await ask(await serve(handler))


def test_media_files_become_data_urls(tmp_path: Path) -> None:
    path = tmp_path / "Clip.MP4"
    path.write_bytes(b"\0\1")
    part = media_part(path, "video")
    url = f"data:video/mp4;base64,{base64.b64encode(bytes([0, 1])).decode()}"
    assert part == {"type": "video_url", "video_url": {"url": url}}
    with pytest.raises(ConfigError, match="Is a directory"):
        media_part(tmp_path, "image")


class Conversation:
    """What a terminal chat sends, recorded by a server that answers with the count of messages."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        return await streaming(piece(f"answer {len(self.bodies)}", "stop"), USAGE, DONE)(request)


@pytest.fixture
def chat_args() -> Namespace:
    return Namespace(
        url="", model="", system="Be kind.", max_tokens=9, temperature=0.0, seed=3, stats=True, media=None
    )


async def test_chat_sends_media_and_remembers_turns(
    serve: Serve, chat_args: Namespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = Conversation()
    chat_args.url = await serve(conversation.handle)
    picture = tmp_path / "p.png"
    picture.write_bytes(b"png")
    chat = Chat(chat_args)
    await asyncio.to_thread(chat.ask, "What is this?", [("image", str(picture))])
    await asyncio.to_thread(chat.ask, "And now?", [])
    first, second = conversation.bodies
    assert first["model"] == "m"
    assert (first["max_tokens"], first["temperature"], first["seed"]) == (9, 0.0, 3)
    assert first["messages"][0] == {"role": "system", "content": "Be kind."}
    kinds = [part["type"] for part in first["messages"][1]["content"]]
    assert kinds == ["image_url", "text"]
    assert second["messages"] == [
        *first["messages"],
        {"role": "assistant", "content": "answer 1"},
        {"role": "user", "content": "And now?"},
    ]
    out = capsys.readouterr().out
    assert "answer 1\n" in out
    assert "5 tokens in, 2 out" in out


# transom bench chat


def bench_args(url: str, **changes: Any) -> Namespace:
    settings: dict[str, Any] = {
        "url": url, "model": "", "requests": 10, "concurrency": 3, "mix": "text=1,image=1,audio=1",
        "max_tokens": 4, "distinct": 0, "warmup": 2, "seed": 0, "out": "", "json": True,
    }  # fmt: skip
    return Namespace(**{**settings, **changes})


async def test_load_is_closed_loop_and_counts_failures(serve: Serve, tmp_path: Path, capsys: Any) -> None:
    running, most, contents = 0, 0, []

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal running, most
        running += 1
        most = max(most, running)
        contents.append(json.dumps((await request.json())["messages"]))
        try:
            if len(contents) == 7:
                return web.json_response({"error": {"message": "no"}}, status=400)
            return await streaming(piece("a"), piece("b", "stop"), USAGE, DONE)(request)
        finally:
            running -= 1

    out = tmp_path / "rows.jsonl"
    args = bench_args(await serve(handler), out=str(out))
    code = await asyncio.to_thread(bench.run, args)
    summary = json.loads(capsys.readouterr().out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert code == 1
    assert len(contents) == 12
    assert most <= 3
    assert (summary["requests"], summary["failed"], summary["errors"]) == (10, 1, ["HTTP 400: no"])
    assert [row["number"] for row in rows] == list(range(10))
    assert sum(row["error"] is None for row in rows) == 9
    media = [text for text in contents if "base64" in text]
    assert len(set(media)) == len(media), "no two requests share a media item"
    assert summary["e2e_ms"]["p50"] <= summary["e2e_ms"]["p99"] <= summary["e2e_ms"]["max"]


async def test_load_is_the_same_for_the_same_seed(serve: Serve, capsys: Any) -> None:
    seen: list[set[str]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen[-1].add(await request.text())
        return await streaming(piece("a", "stop"), USAGE, DONE)(request)

    url = await serve(handler)
    for seed in (1, 1, 2):
        seen.append(set())
        args = bench_args(url, seed=seed, mix="video=1,audio=1,image=1", requests=4, warmup=0)
        assert await asyncio.to_thread(bench.run, args) == 0
    assert seen[0] == seen[1]
    assert not seen[0] & seen[2]
    capsys.readouterr()


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1))
def test_percentiles_are_nearest_rank(values: list[float], share: float) -> None:
    value = bench.percentile(values, share)
    assert value in values
    assert sum(item <= value for item in values) >= share * len(values)
    assert sum(item < value for item in values) < share * len(values)


def test_percentile_of_nothing() -> None:
    assert math.isnan(bench.percentile([], 0.5))


def test_mixes() -> None:
    assert bench.parse_mix("text=2, image=0.5") == {"text": 2.0, "image": 0.5}
    assert bench.parse_mix("audio") == {"audio": 1.0}
