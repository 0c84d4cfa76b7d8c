"""The plain way to serve a checkpoint: transformers' generate over static batches (a baseline, own process).

`python -m transom.bench.static_batch FOLDER` speaks /v1/models and /v1/completions over token ids. A batch
is whatever waits when the one before has ended, padded on the left; it ends when its longest answer ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import orjson
import torch
from aiohttp import web
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria, StoppingCriteriaList

_GATHER_S = 0.02


@dataclass(eq=False)
class _Waiting:
    """`tokens` gets each new token, then None."""

    prompt: list[int]
    max_tokens: int
    tokens: asyncio.Queue[int | None] = field(default_factory=asyncio.Queue)


class _Tell(StoppingCriteria):
    """Called by generate after each token: passes it on and never stops the batch."""

    def __init__(self, batch: list[_Waiting], loop: asyncio.AbstractEventLoop) -> None:
        self._batch, self._loop, self._count = batch, loop, 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self._count += 1
        for one, token in zip(self._batch, input_ids[:, -1].tolist(), strict=True):
            if self._count <= one.max_tokens:
                self._loop.call_soon_threadsafe(one.tokens.put_nowait, token)
            if self._count == one.max_tokens:
                self._loop.call_soon_threadsafe(one.tokens.put_nowait, None)
        return torch.zeros(len(self._batch), dtype=torch.bool)


class StaticBatches:
    """One model; batches of at most `size` prompts run one after the other in a thread."""

    def __init__(self, folder: str, size: int) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)  # in eval mode
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._size = size
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue()

    async def run(self) -> None:
        """Serve batches until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            batch = [await self._queue.get()]
            await asyncio.sleep(_GATHER_S)  # requests of one moment make one batch
            while len(batch) < self._size and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            await asyncio.to_thread(self._generate, batch, loop)

    def _generate(self, batch: list[_Waiting], loop: asyncio.AbstractEventLoop) -> None:
        width = max(len(one.prompt) for one in batch)
        pad = self._tokenizer.pad_token_id or 0
        ids = torch.tensor([[pad] * (width - len(one.prompt)) + one.prompt for one in batch])
        mask = torch.tensor([[0] * (width - len(one.prompt)) + [1] * len(one.prompt) for one in batch])
        steps = max(one.max_tokens for one in batch)
        self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=steps,
            max_new_tokens=steps,
            pad_token_id=pad,
            stopping_criteria=StoppingCriteriaList([_Tell(batch, loop)]),
        )

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models."""
        return web.json_response({"object": "list", "data": [{"id": "static", "object": "model"}]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions with `prompt` as token ids, streamed."""
        body = orjson.loads(await request.read())
        one = _Waiting(list(body["prompt"]), int(body["max_tokens"]))
        self._queue.put_nowait(one)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        count = 0
        async for token in _drain(one.tokens):
            count += 1
            text = self._tokenizer.decode([token]) or " "
            await _event(response, {"choices": [{"index": 0, "text": text}]})
        usage = {"prompt_tokens": len(one.prompt), "completion_tokens": count}
        await _event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response


async def _drain(tokens: asyncio.Queue[int | None]) -> AsyncIterator[int]:
    while (token := await tokens.get()) is not None:
        yield token


async def _event(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + orjson.dumps(event) + b"\n\n")


async def _serve(args: argparse.Namespace) -> None:
    batches = await asyncio.to_thread(StaticBatches, args.folder, args.batch)
    app = web.Application()
    app.add_routes([web.get("/v1/models", batches.models), web.post("/v1/completions", batches.completions)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", args.port)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    sys.stdout.write(orjson.dumps({"ready": True, "url": f"http://127.0.0.1:{port}"}).decode() + "\n")
    sys.stdout.flush()
    with contextlib.suppress(asyncio.CancelledError):
        await batches.run()
    await runner.cleanup()


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(prog="python -m transom.bench.static_batch", description=__doc__)
    parser.add_argument("folder", help="checkpoint that transformers reads")
    parser.add_argument("--port", type=int, default=0, help="0: any free one (default)")
    parser.add_argument("--batch", type=int, default=16, help="prompts at a time (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    asyncio.run(_serve(args))


if __name__ == "__main__":
    main()
