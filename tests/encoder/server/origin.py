"""A media server of the tests' own, fetch workers to ask it with, a look at the memory they hand over."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.patience import PATIENCE_S
from transom.encoder.config import EncoderConfig
from transom.encoder.fetch import FetchLimits
from transom.encoder.fetch_pool import FetchPool

LIMITS = dataclasses.replace(
    FetchLimits.of(EncoderConfig()), allow_private=True, ports=(0,),
    connect_s=PATIENCE_S, read_s=PATIENCE_S, total_s=PATIENCE_S,
)  # fmt: skip
BODY = bytes(range(256)) * 8192  # 2 MiB: packed in a thread


class Origin:
    """Serves BODY with an ETag, below `/slow` once `release` is set; calls `killer` for `/poison`.

    `killer` gets the ports of the connection, the client's first.
    """

    def __init__(self) -> None:
        self.hits: Counter[str] = Counter()
        self.release = asyncio.Event()
        self.arrived = asyncio.Condition()
        self.gone: Counter[str] = Counter()
        self.killer: Callable[[tuple[int, int]], None] = lambda _: None
        self.base = ""

    async def answer(self, request: web.Request) -> web.Response:
        async with self.arrived:
            self.hits[request.path] += 1
            self.arrived.notify_all()
        if request.path.startswith("/poison"):
            assert request.transport is not None
            ends = (request.transport.get_extra_info(name)[1] for name in ("peername", "sockname"))
            self.killer((next(ends), next(ends)))
        if request.path.startswith(("/slow", "/poison")):
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                async with self.arrived:
                    self.gone[request.path] += 1
                    self.arrived.notify_all()
                raise
        headers = {"ETag": '"one"'}
        if request.headers.get("If-None-Match") == '"one"':
            return web.Response(status=304, headers=headers)
        return web.Response(body=b"" if request.path == "/empty" else BODY, headers=headers)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S), self.arrived:
            await self.arrived.wait_for(condition)


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Origin]:
    """Serve on loopback for the block."""
    own = Origin()
    app = web.Application()
    app.router.add_get("/{path:.*}", own.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    own.base = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield own
    own.release.set()
    await runner.cleanup()


async def memory_files() -> int:
    """Count the memory files that this process has open or mapped."""
    await asyncio.sleep(0)  # the loop lets go of what it woke us with
    return count_memory_files()


async def until_let_go(before: int) -> None:
    """Return when no more memory files are held than before: threads let go of theirs a little later."""
    async with asyncio.timeout(PATIENCE_S):
        while await memory_files() > before:
            pass


def count_memory_files() -> int:
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    opened = sum("memfd:transom" in os.readlink(link) for link in links if link.is_symlink())
    return opened + Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:transom")


@contextlib.asynccontextmanager
async def running(workers: int = 1, grace_s: float = 5.0, **changes: Any) -> AsyncIterator[FetchPool]:
    gc.collect()  # what earlier tests left must not go while memory files are counted
    pool = FetchPool(dataclasses.replace(LIMITS, **changes), workers=workers, grace_s=grace_s)
    await pool.start()
    try:
        yield pool
    finally:
        pids = pool.pids
        await pool.close()
        assert not set(map(str, pids)) & set(os.listdir("/proc"))
