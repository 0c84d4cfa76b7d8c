"""A gateway as a process of its own before scripted workers in the test's process.

So its memory, its descriptors and its reaction to signals are those of the real thing.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from tests.gateway.fake_workers import ScriptedFleet, ScriptedWorker
from transom.tokenizer import Tokenizer


@dataclass
class ChildFleet(ScriptedFleet):
    """Scripted workers and the process that serves them at `url`."""

    process: asyncio.subprocess.Process = field(init=False)

    async def metrics(self) -> dict[str, float]:
        """Return the process's own metrics by name and labels."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    async def until_idle(self) -> dict[str, float]:
        """Return the metrics once nothing is in work and nobody but the asker is connected."""
        async with asyncio.timeout(30):
            while True:
                found = await self.metrics()
                if not (found["transom_gateway_choices"] or found["transom_requests_in_flight"]):
                    assert found["transom_gateway_tokens"] == 0
                    assert found["transom_gateway_buffered_bytes"] == 0
                    return found
                await asyncio.sleep(0.05)

    async def until_ready_says(self, status: int) -> None:
        """Return when GET /ready answers so."""
        async with asyncio.timeout(20), aiohttp.ClientSession() as session:
            while True:
                async with session.get(f"{self.url}/ready") as response:
                    if response.status == status:
                        return
                await asyncio.sleep(0.02)


@asynccontextmanager
async def child_fleet(
    tokenizer: Tokenizer, *flags: str, prefills: int = 1, decodes: int = 1
) -> AsyncIterator[ChildFleet]:
    """Run scripted workers and `transom gateway` before them; yield when it is ready."""
    fleet = ChildFleet(
        tokenizer,
        [ScriptedWorker("encoder")],
        [ScriptedWorker("prefill") for _ in range(prefills)],
        [ScriptedWorker("decode") for _ in range(decodes)],
    )
    for worker in fleet.workers:
        await worker.start()
    fleet.wire()
    inboxes = [part for one in fleet.workers for part in (f"--{one.stage}", one.transport.address)]
    command = [sys.executable, "-m", "transom", "gateway", "--http-port", "0", "--log-level", "warning"]
    fleet.process = await asyncio.create_subprocess_exec(
        *command, *inboxes, *flags, stdout=asyncio.subprocess.PIPE, env=dict(os.environ)
    )
    try:
        async with asyncio.timeout(60):
            assert fleet.process.stdout is not None
            line: dict[str, Any] = orjson.loads(await fleet.process.stdout.readline())
            fleet.url = line["http"]
        await fleet.until_ready_says(200)
        yield fleet
    finally:
        if fleet.process.returncode is None:
            fleet.process.send_signal(signal.SIGKILL)
        await fleet.process.wait()
        for worker in fleet.workers:
            await worker.stop()
