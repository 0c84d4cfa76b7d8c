"""The gateway's process under a crowd: what it holds for each client, and how it ends."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import openai
import pytest

from tests.gateway.fake_workers import Script, ScriptedWorker
from tests.gateway.gateway_process import gateway_process
from tests.patience import PATIENCE_S
from transom.messages import Abort, KVHandoff, PrefillJob, TokenChunk, TokenLogprob
from transom.tokenizer import Tokenizer

pytestmark = pytest.mark.process

CHAT = "/v1/chat/completions"
IDLE, ACTIVE = 1000, 200
ANSWER = "it has been worth the wait"


def body(words: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": words}], "stream": True, **fields}


def text_of(stream: bytes) -> str:
    """Return the text of a complete event stream."""
    events = [line[6:] for line in stream.split(b"\n") if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]", stream[-300:]
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert choices[-1]["finish_reason"] == "stop"
    return "".join(choice["delta"].get("content", "") for choice in choices)


async def test_a_thousand_idle_streams_and_two_hundred_active_ones(tokenizer: Tokenizer) -> None:
    async with gateway_process(tokenizer, "--max-inflight", "1500", "--keepalive-s", "1") as fleet:
        # One token comes at once, so that the stream begins; the rest when the test lets it.
        hold = asyncio.Event()
        fleet.script = Script(answer=lambda job: ANSWER, hold=hold, held=lambda job: job.priority == 1)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout()
        ) as session:

            async def active() -> str:
                async with session.post(fleet.url + CHAT, json=body("now")) as response:
                    return text_of(await response.read())

            assert await active() == ANSWER
            before = await fleet.metrics()
            idle = []
            for _ in range(IDLE // 50):
                asking = (session.post(fleet.url + CHAT, json=body("later", priority=1)) for _ in range(50))
                idle += await asyncio.gather(*asking)
            assert {response.status for response in idle} == {200}
            crowded = await fleet.metrics()
            assert crowded["transom_gateway_choices"] == IDLE
            grown_bytes = crowded["process_resident_memory_bytes"] - before["process_resident_memory_bytes"]
            assert grown_bytes < IDLE * 64 * 1024, f"{grown_bytes / IDLE:.0f} bytes for each idle stream"
            assert crowded["process_open_fds"] <= before["process_open_fds"] + IDLE + 8

            answers = await asyncio.gather(*(active() for _ in range(ACTIVE)))
            assert answers == [ANSWER] * ACTIVE
            seen = await asyncio.gather(
                *(response.content.readuntil(b": keep-alive\n\n") for response in idle)
            )
            hold.set()
            rest = await asyncio.gather(*(response.read() for response in idle))
            assert {text_of(first + last) for first, last in zip(seen, rest, strict=True)} == {ANSWER}
        after = await fleet.until_idle()
        assert after['transom_requests_total{endpoint="chat",status="200"}'] == IDLE + ACTIVE + 1
        async with asyncio.timeout(PATIENCE_S):  # it hears of closed connections one after the other
            while (await fleet.metrics())["process_open_fds"] > before["process_open_fds"] + 8:
                pass


async def test_slow_readers_do_not_grow_memory(tokenizer: Tokenizer) -> None:
    """Clients ask for much and read nothing, while the engine goes on and on."""
    slow = 10
    async with gateway_process(tokenizer, "--max-unread-kb", "256") as fleet, AsyncExitStack() as stack:
        entries = [TokenLogprob(7, -0.5, [(other, -9.0) for other in range(20)])] * 8
        decode = fleet.decodes[0]
        # In step with the gateway: what piles up while its process stands still is in no queue of its own.
        turns = asyncio.Condition()

        async def flood(received: Any) -> None:
            handoff = received.message
            if not isinstance(handoff, KVHandoff):
                return
            index = 1
            while handoff.request_id not in decode.aborted() and index < 30_000:
                async with turns:
                    await turns.wait()
                for _ in range(3):
                    chunk = TokenChunk(
                        request_id=handoff.request_id, index=index, token_ids=[7] * 8, logprobs=entries
                    )
                    await decode.transport.send_wait(handoff.gateway, chunk)
                    index += 8

        decode.on_message = flood
        before = await fleet.metrics()
        asked = json.dumps(body("go on", max_tokens=3000, logprobs=True, top_logprobs=20)).encode()
        head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        host, port = fleet.url.removeprefix("http://").split(":")
        for _ in range(slow):
            narrow = stack.enter_context(socket.socket())
            narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            narrow.connect((host, int(port)))
            narrow.sendall(head % (CHAT.encode(), len(asked)) + asked)
        cut = 'transom_aborts_total{cause="client"}'
        peak = 0.0
        async with asyncio.timeout(PATIENCE_S):
            while (now := await fleet.metrics()).get(cut, 0) < slow:
                peak = max(peak, now["process_resident_memory_bytes"])
                async with turns:
                    turns.notify_all()
        grown_bytes = peak - before["process_resident_memory_bytes"]
        # 256 KiB of waiting output each and what it takes to handle any; all of it would be 80 MiB.
        assert grown_bytes < 40 * 1024 * 1024, f"{grown_bytes / slow:.0f} bytes for each slow reader"
        await fleet.until_idle()
        await decode.wait_for(Abort, slow)
        assert len(decode.aborted()) == slow


def test_a_low_soft_limit_of_open_files_is_raised() -> None:
    code = (
        "import resource as r; _, hard = r.getrlimit(r.RLIMIT_NOFILE);"
        "r.setrlimit(r.RLIMIT_NOFILE, (64, hard));"
        "from transom.gateway.server import raise_open_files; raise_open_files();"
        "assert r.getrlimit(r.RLIMIT_NOFILE) == (hard, hard)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr


async def test_sigterm_lets_running_answers_end_and_takes_no_new_ones(tokenizer: Tokenizer) -> None:
    async with gateway_process(tokenizer, "--drain-timeout-s", "600") as fleet:
        hold = asyncio.Event()
        fleet.script = Script(answer=lambda job: ANSWER, hold=hold)
        async with aiohttp.ClientSession() as session:
            running = await session.post(fleet.url + CHAT, json=body("finish this"))
            first = await running.content.readuntil(b"\n\n")
            fleet.process.send_signal(signal.SIGTERM)
            await fleet.until_ready_says(503)
            async with session.post(fleet.url + CHAT, json=body("too late")) as response:
                assert response.status == 503
                assert int(response.headers["Retry-After"]) >= 1
                assert (await response.json())["error"]["code"] == "unavailable"
            hold.set()
            assert text_of(first + await running.read()) == ANSWER
        async with asyncio.timeout(PATIENCE_S):  # and not as long as it may drain
            assert await fleet.process.wait() == 0
        assert len(await fleet.prefills[0].wait_for(PrefillJob)) == 1


async def test_a_poison_request_reaches_one_worker_only(tokenizer: Tokenizer) -> None:
    """Every worker that gets it dies. The SDK would repeat it by itself after a 502."""
    async with gateway_process(tokenizer, prefills=3) as fleet:
        killed: list[ScriptedWorker] = []
        ends: list[asyncio.Task[None]] = []
        answers = [worker.on_message for worker in fleet.prefills]

        def deadly(worker: ScriptedWorker, answer: Any) -> Any:
            async def handle(received: Any) -> None:
                if isinstance(received.message, PrefillJob) and "poison" in fleet.prompt_text(
                    received.message
                ):
                    killed.append(worker)
                    ends.append(asyncio.create_task(worker.stop()))
                else:
                    await answer(received)

            return handle

        for worker, answer in zip(fleet.prefills, answers, strict=True):
            worker.on_message = deadly(worker, answer)
        async with openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=3) as sdk:
            poison: Any = [{"role": "user", "content": "poison"}]
            with pytest.raises(openai.InternalServerError) as failed:
                await sdk.chat.completions.create(model="mimo-nano", messages=poison)
            assert failed.value.status_code == 502
            assert failed.value.code == "stage_lost"
            for _ in range(6):
                fine: Any = [{"role": "user", "content": "fine"}]
                reply = await sdk.chat.completions.create(model="mimo-nano", messages=fine)
                assert reply.choices[0].message.content == "hello there"
        assert len(killed) == 1
        await asyncio.gather(*ends)
        fleet.prefills.remove(killed[0])
