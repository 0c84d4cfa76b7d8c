"""How requests end badly: every client gets a clear error and every worker is told."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import aiohttp
import openai
import pytest

from tests.gateway.conftest import FleetFactory
from tests.gateway.fake_workers import ROWS, Script, ScriptedFleet, ScriptedWorker
from tests.gateway.test_chat import PIXEL, user
from tests.patience import PATIENCE_S
from transom.errors import DeadlineError, ErrorInfo, OverloadedError
from transom.gateway.requests import LiveRequest
from transom.messages import Abort, EncodeJob, KVHandoff, MediaSize, PrefillJob, TokenChunk, TokenLogprob

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
WITH_IMAGE: dict[str, Any] = {"messages": user([{"type": "image_url", "image_url": {"url": PIXEL}}])}


async def until_idle(fleet: ScriptedFleet) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await fleet.stage._table.wait_idle()
    assert fleet.stage.load()["choices"] == 0
    assert len(fleet.stage._table) == 0
    assert fleet.stage._fleet is not None
    fleet.stage._fleet.check_integrity()
    assert all(worker.own_requests == 0 for worker in fleet.stage._fleet.workers())


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_frees_all_workers(fleet: ScriptedFleet, stream: bool) -> None:
    fleet.script = Script(hold=asyncio.Event())
    async with aiohttp.ClientSession() as session:
        asking = asyncio.create_task(
            session.post(f"{fleet.url}/v1/chat/completions", json=BODY | {"stream": stream})
        )
        await fleet.decodes[0].wait_for(KVHandoff)
        if stream:  # the headers are out with the first token
            (await asking).close()
        else:
            asking.cancel()
        for worker in (*fleet.prefills, *fleet.decodes):
            (abort,) = await worker.wait_for(Abort)
            assert abort.request_id in fleet._jobs
    await until_idle(fleet)


async def test_a_client_that_goes_away_during_encoding_frees_the_encoder(fleet: ScriptedFleet) -> None:
    fleet.encoders[0].on_message = None  # never answers
    async with aiohttp.ClientSession() as session:
        asking = asyncio.create_task(session.post(f"{fleet.url}/v1/chat/completions", json=WITH_IMAGE))
        (job,) = await fleet.encoders[0].wait_for(EncodeJob)
        asking.cancel()
        for worker in fleet.workers:
            (abort,) = await worker.wait_for(Abort)
            assert abort.request_id == job.request_id
    await until_idle(fleet)


async def test_nothing_is_aborted_after_a_normal_end(
    fleet: ScriptedFleet, client: openai.AsyncOpenAI
) -> None:
    for _ in range(3):
        await client.chat.completions.create(model="mimo-nano", messages=WITH_IMAGE["messages"])
    await until_idle(fleet)
    assert [worker.aborted() for worker in fleet.workers] == [set(), set(), set()]


async def test_a_gateway_stop_string_aborts_the_engine(
    fleet: ScriptedFleet, client: openai.AsyncOpenAI
) -> None:
    hold = asyncio.Event()
    fleet.script = Script(answer=lambda job: "one two three")

    async def endless(received: Any) -> None:
        handoff = received.message
        if isinstance(handoff, KVHandoff):
            ids = fleet.tokenizer.encode(" and STOP on")
            chunk = TokenChunk(request_id=handoff.request_id, index=1, token_ids=ids)
            fleet.decodes[0].transport.send(handoff.gateway, chunk)
            await hold.wait()

    fleet.decodes[0].on_message = endless
    reply = await client.chat.completions.create(model="mimo-nano", messages=user("hi"), stop="STOP")
    assert (reply.choices[0].message.content or "").endswith(" and ")
    (abort,) = await fleet.decodes[0].wait_for(Abort)
    assert abort.reason == "stop"


@pytest.mark.parametrize("stage", ["encoder", "prefill", "decode"])
async def test_a_lost_worker_fails_its_requests_and_nothing_else(
    start_fleet: FleetFactory, stage: str
) -> None:
    fleet = await start_fleet(encoders=2, prefills=2, decodes=2)
    fleet.script = Script(hold=asyncio.Event())
    if stage == "encoder":
        for worker in fleet.encoders:
            worker.on_message = None
    workers = {"encoder": fleet.encoders, "prefill": fleet.prefills, "decode": fleet.decodes}[stage]
    async with aiohttp.ClientSession() as session:
        asking = asyncio.create_task(session.post(f"{fleet.url}/v1/chat/completions", json=WITH_IMAGE))
        waits = [
            asyncio.create_task(one.wait_for(EncodeJob if stage == "encoder" else PrefillJob
                                             if stage == "prefill" else KVHandoff))
            for one in workers
        ]  # fmt: skip
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        victim = workers[[task.done() for task in waits].index(True)]
        for task in waits:
            task.cancel()
        await victim.stop()
        async with await asking as response:
            error = (await response.json())["error"]
            assert response.status == 502
        assert error["code"] == "stage_lost"
        assert response.headers["X-Request-Id"].startswith("chatcmpl-")
        assert error["type"] == "server_error"
        assert stage in error["message"]
        # Nobody else got the request, and the fleet goes on without the lost worker.
        others = [one for one in workers if one is not victim]
        assert not any(isinstance(one.message, (PrefillJob, EncodeJob, KVHandoff)) for one in others[0].seen)
        fleet.script.hold = None
        fleet.wire()
        await until_idle(fleet)
        async with session.post(f"{fleet.url}/v1/chat/completions", json=WITH_IMAGE) as response:
            assert response.status == 200, await response.text()
    fleet.encoders, fleet.prefills, fleet.decodes = (
        [one for one in group if one is not victim]
        for group in (fleet.encoders, fleet.prefills, fleet.decodes)
    )


async def test_a_restarted_worker_fails_what_its_predecessor_held(fleet: ScriptedFleet) -> None:
    fleet.script = Script(hold=asyncio.Event())
    async with aiohttp.ClientSession() as session:
        asking = asyncio.create_task(session.post(f"{fleet.url}/v1/chat/completions", json=BODY))
        await fleet.decodes[0].wait_for(KVHandoff)
        fleet.decodes[0].incarnation = "second"
        async with await asking as response:
            assert response.status == 502
            assert "restarted" in (await response.json())["error"]["message"]
    await until_idle(fleet)


async def test_a_silent_worker_counts_as_lost(start_fleet: FleetFactory) -> None:
    fleet = await start_fleet(worker_timeout_s=600)
    fleet.script = Script(hold=asyncio.Event())
    assert fleet.stage._fleet is not None
    (silent,) = fleet.stage._fleet.workers("decode")
    async with aiohttp.ClientSession() as session:
        asking = asyncio.create_task(session.post(f"{fleet.url}/v1/chat/completions", json=BODY))
        await fleet.decodes[0].wait_for(KVHandoff)
        fleet.decodes[0].answer_pings = False
        # Its last answer lies long back, and no other worker's does, however slow this machine is.
        while not asking.done():
            silent.last_heard_s = time.monotonic() - 601
            await asyncio.sleep(0.01)
        async with await asking as response:
            assert response.status == 502
        async with session.get(f"{fleet.url}/ready") as response:
            assert response.status == 503
            assert (await response.json())["reason"] == "no ready decode"
        async with session.post(f"{fleet.url}/v1/chat/completions", json=BODY) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
            assert (await response.json())["error"]["code"] == "unavailable"


async def test_the_deadline_ends_a_request_everywhere(start_fleet: FleetFactory) -> None:
    fleet = await start_fleet(request_timeout_s=0.3)
    fleet.script = Script(hold=asyncio.Event())
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{fleet.url}/v1/chat/completions", json=BODY) as response:
            assert response.status == 504
            assert (await response.json())["error"]["code"] == "deadline_exceeded"
        (abort,) = await fleet.decodes[0].wait_for(Abort)
        assert abort.reason == "deadline"
        async with session.post(f"{fleet.url}/v1/chat/completions", json=BODY | {"timeout": 9}) as response:
            assert (await response.json())["error"]["param"] == "timeout"
        # A worker may notice first; its clock runs since the part came to it, which tells a client nothing.
        fleet.script = Script(prefill_error=DeadlineError("the deadline passed 0.0 s ago").info())
        async with session.post(f"{fleet.url}/v1/chat/completions", json=BODY) as response:
            said = (await response.json())["error"]["message"]
            assert (response.status, said) == (504, "the answer was not complete after 0.3 s")
    await until_idle(fleet)


@pytest.mark.parametrize("stream", [False, True])
async def test_visual_tokens_are_counted_over_all_items(start_fleet: FleetFactory, stream: bool) -> None:
    """Each item keeps to its encoder's limits; together they keep to the gateway's. Sounds don't count."""
    fleet = await start_fleet(max_request_visual_tokens=2 * ROWS)
    image = {"type": "image_url", "image_url": {"url": PIXEL}}
    sound = {"type": "audio_url", "audio_url": {"url": "https://host/a.wav"}}

    async def ask(*parts: Any) -> tuple[int, Any]:
        body = {"messages": user([*parts]), "stream": stream}
        async with session.post(f"{fleet.url}/v1/chat/completions", json=body) as response:
            return response.status, None if response.status == 200 else (await response.json())["error"]

    async with aiohttp.ClientSession() as session:
        assert (await ask(image, sound, sound, image))[0] == 200
        status, error = await ask(image, sound, image, image)
    assert (status, error["code"]) == (400, "invalid_media")
    assert error["param"].startswith("messages")
    assert error["message"].startswith(f"{error['param']}: with this {3 * ROWS} visual tokens")
    assert f"at most {2 * ROWS} are allowed in all" in error["message"]
    await until_idle(fleet)


async def until_answered(fleet: ScriptedFleet) -> None:
    """Return when the gateway has got a first token of any request."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if any(isinstance(one, LiveRequest) and one.stats for one in fleet.stage._table._live.values()):
                return
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pixels", [500, 501])
async def test_no_token_goes_out_before_all_items_are_known_to_be_allowed(
    start_fleet: FleetFactory, stream: bool, tokens: int, pixels: int
) -> None:
    """An encoder's last word may come after the answer: over another connection, from its cache in one go."""
    fleet = await start_fleet(max_request_pixels=1000)
    fleet.script = Script(size=MediaSize(pixels=pixels), done_when=asyncio.Event())
    picture = {"type": "image_url", "image_url": {"url": PIXEL}}
    body = {"messages": user([picture, picture]), "stream": stream, "max_tokens": tokens}
    async with aiohttp.ClientSession() as session:
        asking = asyncio.create_task(session.post(f"{fleet.url}/v1/chat/completions", json=body))
        await until_answered(fleet)
        assert not asking.done()
        fleet.script.done_when.set()
        async with await asking as response:
            text = await response.text()
    if pixels == 500:
        assert response.status == 200
        assert '"content":"h' in text
    else:
        assert response.status == 400
        assert (
            "with this 1002 pixels, at most 1000 are allowed in all" in json.loads(text)["error"]["message"]
        )
    await until_idle(fleet)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_encoders_full_queue_tells_the_client_when_to_come_back(
    fleet: ScriptedFleet, stream: bool
) -> None:
    full = OverloadedError("encoder queue is full (4 items)", retry_after_s=1)
    fleet.script = Script(encode_error=full.info())
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{fleet.url}/v1/chat/completions", json=WITH_IMAGE | {"stream": stream}) as response,
    ):
        assert (response.status, response.headers["Retry-After"]) == (429, "1")
        error = (await response.json())["error"]
        assert (error["type"], error["message"]) == ("rate_limit_error", full.message)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_workers_error_reaches_the_client(fleet: ScriptedFleet, stream: bool) -> None:
    param = "messages[0].content[0].image_url.url"
    fleet.script = Script(
        encode_error=ErrorInfo(status=400, code="invalid_media", message="not an image", param=param)
    )
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{fleet.url}/v1/chat/completions", json=WITH_IMAGE | {"stream": stream}) as response,
    ):
        assert response.status == 400
        assert await response.json() == {
            "error": {
                "message": "not an image",
                "type": "invalid_request_error",
                "param": param,
                "code": "invalid_media",
            }
        }
    await fleet.prefills[0].wait_for(Abort)
    await until_idle(fleet)


async def test_an_error_inside_a_stream_is_an_event(fleet: ScriptedFleet, client: openai.AsyncOpenAI) -> None:
    fleet.script = Script(hold=asyncio.Event())
    stream = await client.chat.completions.create(model="mimo-nano", messages=user("hi"), stream=True)
    assert (await anext(aiter(stream))).choices
    fleet.decodes[0].incarnation = "second"
    with pytest.raises(openai.APIError, match="decode worker"):
        [chunk async for chunk in stream]
    await until_idle(fleet)


@pytest.mark.parametrize("end", ["deadline", "loss"])
async def test_a_stream_that_breaks_off_tells_its_usage_first(start_fleet: FleetFactory, end: str) -> None:
    fleet = await start_fleet()
    # The first token of each choice comes from prefill, then decode holds.
    fleet.script = Script(hold=asyncio.Event())
    body = WITH_IMAGE | {"stream": True, "n": 2, "stream_options": {"include_usage": True}}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{fleet.url}/v1/chat/completions", json=body) as response,
    ):
        events = []
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            events.append(line.removeprefix(b"data: "))
            if sum(b'"content":"h' in event for event in events) == 2 and b"DONE" not in line:
                if end == "loss":
                    fleet.decodes[0].incarnation = "second"
                else:
                    for live in fleet.stage._table._live.values():
                        live.wake.__self__.deadline_s = 0.0  # type: ignore[attr-defined]
                        live.wake()  # type: ignore[attr-defined]
    usage, error = (json.loads(one) for one in events[-3:-1])
    assert events[-1].strip() == b"[DONE]"
    assert error["error"]["code"] == ("deadline_exceeded" if end == "deadline" else "stage_lost")
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 2
    assert usage["usage"]["prompt_tokens_details"]["image_tokens"] == ROWS  # of one prompt
    await until_idle(fleet)


async def test_a_quiet_stream_is_kept_alive(start_fleet: FleetFactory) -> None:
    fleet = await start_fleet(keepalive_s=0.05)
    hold = asyncio.Event()
    fleet.script = Script(hold=hold)
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{fleet.url}/v1/chat/completions", json=BODY | {"stream": True}) as response,
    ):
        lines = []
        async for line in response.content:
            lines.append(line)
            if line.startswith(b": keep-alive"):
                hold.set()
    assert any(line.startswith(b": keep-alive") for line in lines)
    assert lines[-2:] == [b"data: [DONE]\n", b"\n"]
    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


async def test_a_reader_that_stalls_is_given_up(start_fleet: FleetFactory) -> None:
    fleet = await start_fleet(write_timeout_s=0.2)
    ids = fleet.tokenizer.encode("a long answer with all its alternatives")
    logprobs = [TokenLogprob(id, -0.5, [(other, -9.0) for other in range(20)]) for id in ids] * 20

    async def flood(received: Any) -> None:
        handoff = received.message
        if not isinstance(handoff, KVHandoff):
            return
        index = 1
        while handoff.request_id not in fleet.decodes[0].aborted():
            chunk = TokenChunk(
                request_id=handoff.request_id, index=index, token_ids=ids * 20, logprobs=logprobs
            )
            fleet.decodes[0].transport.send(handoff.gateway, chunk)
            index += len(chunk.token_ids)
            await asyncio.sleep(0.001)

    fleet.decodes[0].on_message = flood
    host, port = fleet.url.removeprefix("http://").split(":")
    narrow = socket.socket()
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    narrow.setblocking(False)
    await asyncio.get_running_loop().sock_connect(narrow, (host, int(port)))
    _reader, writer = await asyncio.open_connection(sock=narrow, limit=1024)
    body = json.dumps(
        BODY | {"stream": True, "max_tokens": 10_000, "logprobs": True, "top_logprobs": 20}
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await writer.drain()
    (abort,) = await fleet.decodes[0].wait_for(Abort)  # and we never read
    assert abort.request_id in fleet._jobs
    await until_idle(fleet)
    writer.close()


async def test_what_a_stranger_sends_is_not_taken(fleet: ScriptedFleet, client: openai.AsyncOpenAI) -> None:
    """A worker that has no part in a request can't put words into its answer."""
    stranger = ScriptedWorker("decode")
    await stranger.start()
    fleet.script = Script(hold=asyncio.Event())
    asking = asyncio.create_task(client.chat.completions.create(model="mimo-nano", messages=user("hi")))
    (handoff,) = await fleet.decodes[0].wait_for(KVHandoff)
    fake = TokenChunk(request_id=handoff.request_id, index=1, token_ids=[1], finish_reason="stop")
    for number in range(20):
        stranger.transport.send(
            handoff.gateway, TokenChunk(request_id=f"no-{number}", index=0, token_ids=[1])
        )
    stranger.transport.send(handoff.gateway, fake)
    await stranger.transport.flush(5)
    fleet.script.hold.set()  # type: ignore[union-attr]
    assert (await asking).choices[0].message.content == "hello there"
    await stranger.stop()


async def test_too_much_at_once_is_refused_with_a_time_to_come_back(start_fleet: FleetFactory) -> None:
    fleet = await start_fleet(max_inflight=2, max_waiting=0)
    hold = asyncio.Event()
    fleet.script = Script(hold=hold)
    url = f"{fleet.url}/v1/chat/completions"
    async with aiohttp.ClientSession() as session:
        first = [asyncio.create_task(session.post(url, json=BODY)) for _ in range(2)]
        await fleet.decodes[0].wait_for(KVHandoff, 2)
        async with session.post(url, json=BODY) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "1"
            error = (await response.json())["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
        hold.set()
        assert [(await one).status for one in first] == [200, 200]
    await until_idle(fleet)


@pytest.mark.parametrize("stage", ["encoder", "prefill", "decode"])
async def test_a_worker_that_lost_the_gateway_ends_its_requests_at_once(
    fleet: ScriptedFleet, stage: str
) -> None:
    """The worker lives and answers pings, but what it said to this gateway may be lost for ever."""
    worker = next(one for one in fleet.workers if one.stage == stage)
    fleet.script = Script(done_when=asyncio.Event()) if stage == "encoder" else Script(hold=asyncio.Event())
    if stage == "prefill":
        worker.on_message = None
    async with aiohttp.ClientSession() as session:
        asking = asyncio.create_task(session.post(f"{fleet.url}/v1/chat/completions", json=WITH_IMAGE))
        await worker.wait_for({"encoder": EncodeJob, "prefill": PrefillJob, "decode": KVHandoff}[stage])
        worker.breaks = 1
        async with await asking as response:
            assert response.status == 502
            error = (await response.json())["error"]
        assert error["code"] == "stage_lost"
        assert (
            f"the {stage} worker of this request was lost: its connection to the gateway" in error["message"]
        )
        await worker.wait_for(Abort)  # it may have come after the break
        await until_idle(fleet)
        fleet.script = Script()
        fleet.wire()
        async with session.post(f"{fleet.url}/v1/chat/completions", json=WITH_IMAGE) as response:
            assert response.status == 200


async def test_draining_finishes_what_runs_and_refuses_the_rest(start_fleet: FleetFactory) -> None:
    fleet = await start_fleet(drain_timeout_s=600)
    hold = asyncio.Event()
    fleet.script = Script(hold=hold)
    url = f"{fleet.url}/v1/chat/completions"
    async with aiohttp.ClientSession() as session:
        running = asyncio.create_task(session.post(url, json=BODY))
        await fleet.decodes[0].wait_for(KVHandoff)
        assert fleet.runner is not None
        fleet.runner._stop.set()
        async with asyncio.timeout(PATIENCE_S):
            while (await session.get(f"{fleet.url}/ready")).status != 503:
                pass
        async with session.post(url, json=BODY) as response:
            assert response.status == 503
        hold.set()
        async with await running as response:
            assert (await response.json())["choices"][0]["message"]["content"] == "hello there"


async def test_disconnects_at_random_times_leave_nothing(fleet: ScriptedFleet) -> None:
    fleet.script = Script(answer=lambda job: "a b c d e f g h i j k l m n o p")
    async with aiohttp.ClientSession() as session:

        async def ask(number: int) -> None:
            try:
                async with asyncio.timeout(0.001 * (number % 30)):
                    body = (WITH_IMAGE if number % 2 else BODY) | {"stream": number % 3 == 0}
                    async with session.post(f"{fleet.url}/v1/chat/completions", json=body) as response:
                        await response.read()
            except TimeoutError:
                pass

        await asyncio.gather(*(ask(number) for number in range(150)))
    await until_idle(fleet)
