"""A real gateway process before scripted workers that live in the test's own event loop."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import orjson

from tests.gateway.fake_workers import ScriptedFleet, ScriptedWorker
from tests.patience import PATIENCE_S
from transom.tokenizer import Tokenizer

PYTHON = (sys.executable, "-m", "transom")


@dataclass
class ServedFleet(ScriptedFleet):
    """Scripted workers and the process that serves them at `url`."""

    process: asyncio.subprocess.Process = field(init=False)

    async def metrics(self) -> dict[str, float]:
        """Return the process's own metrics by name and labels."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    async def until_idle(self) -> dict[str, float]:
        """Return the metrics once nothing is in work."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                found = await self.metrics()
                if not (found["transom_gateway_choices"] or found["transom_requests_in_flight"]):
                    assert found["transom_gateway_tokens"] == 0
                    assert found["transom_gateway_buffered_bytes"] == 0
                    return found
                await asyncio.sleep(0.05)

    async def until_ready_says(self, status: int) -> None:
        """Return when GET /ready answers so."""
        async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession() as session:
            while True:
                async with session.get(f"{self.url}/ready") as response:
                    if response.status == status:
                        return
                await asyncio.sleep(0.02)


@asynccontextmanager
async def gateway_process(
    tokenizer: Tokenizer, *flags: str, env: Mapping[str, str] | None = None, prefills: int = 1
) -> AsyncIterator[ServedFleet]:
    """Run `transom gateway` with scripted workers of each stage; yield when all are ready."""
    fleet = ServedFleet(
        tokenizer,
        [ScriptedWorker("encoder")],
        [ScriptedWorker("prefill") for _ in range(prefills)],
        [ScriptedWorker("decode")],
    )
    for worker in fleet.workers:
        await worker.start()
    fleet.wire()
    addresses = [part for worker in fleet.workers for part in (f"--{worker.stage}", worker.transport.address)]
    process = fleet.process = await asyncio.create_subprocess_exec(
        *PYTHON, "gateway", "--http-port", "0", "--ping-interval-s", "0.05", "--drain-timeout-s", "1",
        "--worker-timeout-s", "600",
        *addresses, *flags,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **(env or {})},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            line = await process.stdout.readline()
            assert line, "the gateway ended before it was ready"
            fleet.url = orjson.loads(line)["http"]
        await fleet.until_ready_says(200)
        yield fleet
        assert process.returncode in (None, 0), "the gateway died"
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(PATIENCE_S):
            code = await process.wait()
        for worker in fleet.workers:
            await worker.stop()
    assert code == 0
