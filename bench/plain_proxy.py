"""The least that an aiohttp proxy can be: what `transom bench gateway` compares with. Own process.

Sends a request's body on and the answer's bytes back as they come; it reads neither.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress

import aiohttp
import orjson
import uvloop
from aiohttp import web


async def serve(upstream: str) -> None:
    """Print one JSON line with the URL, then serve until stdin closes."""
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(), auto_decompress=False
    )

    async def forward(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {"Content-Type": request.headers.get("Content-Type", "")}
        async with session.post(upstream + request.path, data=body, headers=headers) as answer:
            kind = {"Content-Type": answer.headers.get("Content-Type", "")}
            if answer.content_length is not None:
                return web.Response(body=await answer.read(), status=answer.status, headers=kind)
            response = web.StreamResponse(status=answer.status, headers=kind)
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response

    app = web.Application()
    app.router.add_post("/{path:.*}", forward)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    line = {"event": "ready", "http": f"http://127.0.0.1:{runner.addresses[0][1]}"}
    sys.stdout.write(orjson.dumps(line).decode() + "\n")
    sys.stdout.flush()
    with suppress(OSError):
        await asyncio.to_thread(os.read, sys.stdin.fileno(), 1)
    await runner.cleanup()
    await session.close()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
