"""A pretended model for `transom bench gateway`, over the fleet's wire and over plain HTTP: own process.

Its wire side stands for encoder, prefill and decode behind a gateway, its HTTP side for the server behind
any other proxy. Both give one token a step and note, on the machine's monotonic clock, when a request came
and when each token left. It computes nothing, so that what remains of a request's time is the path to it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import orjson
import uvloop
from aiohttp import web

from transom.hub import resolve_model
from transom.messages import Abort, Ping, Pong, PrefillJob, PromptStats, TextPart, TokenChunk
from transom.tokenizer import Tokenizer
from transom.transport import Transport

TEXT = "a"  # every token of every answer
STAGES = ("encoder", "prefill", "decode")


class Pace:
    """Calls back once a step for all running answers together, as the batch of an engine would."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._running: dict[str, Callable[[], bool]] = {}
        self._ticking = False

    def run(self, id: str, step: Callable[[], bool]) -> None:
        """Call `step` until it says that it was the last time; without a pace, at once."""
        if not self._step_s:
            while step():
                pass
            return
        self._running[id] = step
        if not self._ticking:
            self._ticking = True
            loop = asyncio.get_running_loop()
            loop.call_later(self._step_s, self._tick, loop.time() + self._step_s)

    def drop(self, id: str) -> None:
        """Forget an answer that nobody waits for."""
        self._running.pop(id, None)

    def _tick(self, due_s: float) -> None:
        for id, step in list(self._running.items()):
            if not step():
                self.drop(id)
        self._ticking = bool(self._running)
        if self._ticking:
            loop = asyncio.get_running_loop()
            due_s = max(due_s + self._step_s, loop.time())
            loop.call_at(due_s, self._tick, due_s)


class MockFleet:
    """`times` holds, by request id, when the request came and when each token left, in nanoseconds."""

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id
        self._ids = itertools.count()
        self._workers = {stage: Transport() for stage in STAGES}
        self._tasks: set[asyncio.Task[None]] = set()
        self.pace = Pace(0.0)
        self.times: dict[str, list[int]] = {}

    async def start(self) -> dict[str, str]:
        """Open the workers' inboxes; return their addresses by stage."""
        addresses = {stage: await worker.start() for stage, worker in self._workers.items()}
        for stage, worker in self._workers.items():
            self._spawn(self._serve(stage, worker))
        return addresses

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, stage: str, worker: Transport) -> None:
        while True:
            message = (await worker.recv()).message
            if isinstance(message, Ping):
                pong = Pong(nonce=message.nonce, stage=stage, incarnation="mock", ready=True, load={})
                worker.send(message.reply_to, pong)
            elif isinstance(message, PrefillJob):
                self._answer(message)
            elif isinstance(message, Abort):
                self.pace.drop(message.request_id)

    def _answer(self, job: PrefillJob) -> None:
        times = self.times[job.request_id] = [time.monotonic_ns()]
        prompt_len = sum(len(part.token_ids) for part in job.parts if isinstance(part, TextPart))
        count = job.sampling.max_tokens

        def step() -> bool:
            index = len(times) - 1
            chunk = TokenChunk(
                request_id=job.request_id,
                index=index,
                token_ids=[self._token_id],
                finish_reason="length" if index + 1 == count else None,
                prompt=None if index else PromptStats(prompt_tokens=prompt_len),
            )
            times.append(time.monotonic_ns())
            self._workers["decode" if index else "prefill"].send(job.gateway, chunk)
            return index + 1 < count

        step()  # the first token comes from prefill, without waiting for decode's next step
        if count > 1:
            self.pace.run(job.request_id, step)

    # HTTP

    def routes(self) -> list[web.RouteDef]:
        """Return what a proxy asks of a server, and the bench of this one."""
        return [
            web.post("/v1/chat/completions", self._chat),
            web.get("/v1/models", self._models),
            web.get("/health", self._ok),
            web.get("/health_generate", self._ok),
            web.get("/get_server_info", self._info),
            web.get("/server_info", self._info),
            web.get("/get_model_info", self._info),
            web.get("/model_info", self._info),
            web.post("/bench/pace", self._set_pace),
            web.post("/bench/times", self._take_times),
        ]

    async def _ok(self, request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _models(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [{"id": "mock", "object": "model", "owned_by": "bench"}]})

    async def _info(self, request: web.Request) -> web.Response:
        return _json({"model_path": "mock", "served_model_name": "mock", "is_generation": True, "tp_size": 1})

    async def _set_pace(self, request: web.Request) -> web.Response:
        self.pace = Pace(float(await request.text()))
        return _json({})

    async def _take_times(self, request: web.Request) -> web.Response:
        times, self.times = self.times, {}
        return _json(times)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        came_ns = time.monotonic_ns()
        body = orjson.loads(await request.read())
        id = f"chatcmpl-{next(self._ids)}"
        times = self.times[id] = [came_ns]
        count = int(body.get("max_completion_tokens") or body["max_tokens"])  # SGLang's router renames it
        head = {"id": id, "created": int(time.time()), "model": str(body["model"])}
        if not body.get("stream"):
            times += [time.monotonic_ns()] * count
            message = {"role": "assistant", "content": TEXT * count}
            choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
            usage = {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": count + 1}
            return _json(head | {"object": "chat.completion", "choices": [choice], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self._stream(response, head, count, times)
        await response.write_eof()
        return response

    async def _stream(
        self, response: web.StreamResponse, head: dict[str, Any], count: int, times: list[int]
    ) -> None:
        due = asyncio.Semaphore(1)
        left = count - 1

        def step() -> bool:
            nonlocal left
            left -= 1
            due.release()
            return left > 0

        if count > 1:
            self.pace.run(head["id"], step)
        for index in range(count):
            await due.acquire()
            last = index + 1 == count
            delta = {"content": TEXT} if index else {"role": "assistant", "content": TEXT}
            choice = {
                "index": 0,
                "delta": delta,
                "logprobs": None,
                "finish_reason": "length" if last else None,
            }
            event = orjson.dumps(head | {"object": "chat.completion.chunk", "choices": [choice]})
            times.append(time.monotonic_ns())
            await response.write(b"data: " + event + (b"\n\ndata: [DONE]\n\n" if last else b"\n\n"))
        self.pace.drop(head["id"])


def _json(body: Any) -> web.Response:
    return web.Response(body=orjson.dumps(body), content_type="application/json")


async def serve(model: str) -> None:
    """Print one JSON line with the addresses, then serve until stdin closes."""
    token_id = Tokenizer.from_folder(resolve_model(model)).encode(TEXT)[0]
    fleet = MockFleet(token_id)
    addresses = await fleet.start()
    app = web.Application()
    app.add_routes(fleet.routes())
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    line = addresses | {"event": "ready", "http": f"http://127.0.0.1:{runner.addresses[0][1]}"}
    sys.stdout.write(orjson.dumps(line).decode() + "\n")
    sys.stdout.flush()
    with suppress(OSError):
        await asyncio.to_thread(os.read, sys.stdin.fileno(), 1)
    await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="mimo-nano")
    uvloop.run(serve(parser.parse_args().model))


if __name__ == "__main__":
    main()
