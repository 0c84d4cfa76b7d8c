"""A real gateway process before scripted workers that live in the test's own event loop."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import aiohttp
import orjson

from tests.gateway.fake_workers import ScriptedFleet, ScriptedWorker
from transom.tokenizer import Tokenizer

_START_S = 60.0
PYTHON = (sys.executable, "-m", "transom")


@asynccontextmanager
async def gateway_process(
    tokenizer: Tokenizer, *flags: str, env: Mapping[str, str] | None = None
) -> AsyncIterator[ScriptedFleet]:
    """Run `transom gateway` with one scripted worker of each stage; yield when all are ready."""
    fleet = ScriptedFleet(
        tokenizer, [ScriptedWorker("encoder")], [ScriptedWorker("prefill")], [ScriptedWorker("decode")]
    )
    for worker in fleet.workers:
        await worker.start()
    fleet.wire()
    addresses = [part for worker in fleet.workers for part in (f"--{worker.stage}", worker.transport.address)]
    process = await asyncio.create_subprocess_exec(
        *PYTHON, "gateway", "--http-port", "0", "--ping-interval-s", "0.05", "--drain-timeout-s", "1",
        *addresses, *flags,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **(env or {})},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        async with asyncio.timeout(_START_S):
            line = await process.stdout.readline()
            assert line, "the gateway ended before it was ready"
            fleet.url = orjson.loads(line)["http"]
            await _until_ready(fleet.url)
        yield fleet
        assert process.returncode is None, "the gateway died"
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(_START_S):
            code = await process.wait()
        for worker in fleet.workers:
            await worker.stop()
    assert code == 0


async def _until_ready(url: str) -> None:
    async with aiohttp.ClientSession() as http:
        while True:
            async with http.get(f"{url}/ready") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.02)
