"""Clients that go away at random moments: the pipeline is afterwards as if nobody had asked.

A thousand of them take a minute; `--disconnects 100` on pytest's command line is for a quick look.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from tests.patience import PATIENCE_S
from transom.bench.media import make_part

pytestmark = [pytest.mark.process, pytest.mark.timeout(3600)]

AT_ONCE = 12
KINDS = ("text", "image", "image", "audio", "video")
# Of every stage: what is not zero as long as anything of any request is held.
HELD = {
    "gateway": ("choices", "tokens", "buffered_bytes", "waiting"),
    "encoder": (
        "items", "media_bytes", "queued_patches", "queued_mel_frames", "decoders_busy", "fetches_running",
        "cache_leases",
    ),
    "prefill": (
        "jobs", "tokens", "running_requests", "waiting_requests", "parked_requests", "embedding_bytes",
        "handoff_bytes", "full_used_slots", "swa_used_slots",
    ),
    "decode": (
        "jobs", "tokens", "running_requests", "waiting_requests", "queued_requests", "promised_bytes",
        "retracted_bytes", "full_used_slots", "swa_used_slots",
    ),
}  # fmt: skip


def bodies() -> list[dict[str, Any]]:
    """Requests of all kinds; some media come again, so that cached embeddings are sent too."""
    found = []
    for number in range(40):
        kind = KINDS[number % len(KINDS)]
        question = {"type": "text", "text": f"What is this? ({number})"}
        content = [question] if kind == "text" else [make_part(kind, (77, number % 25)), question]
        found.append(
            {
                "messages": [{"role": "user", "content": content}],
                "max_tokens": 300,
                "ignore_eos": True,
                "stream": number % 3 != 0,
                "n": 2 if number % 7 == 0 else 1,
            }
        )
    return found


async def held(session: aiohttp.ClientSession, url: str) -> tuple[dict[str, float], float]:
    """Return what is not back at zero, by stage or worker and figure, and the age of the oldest figure."""
    async with session.get(f"{url}/v1/fleet") as response:
        fleet = await response.json()
    age_s = 0.0
    found = {f"gateway {name}": fleet["gateway"][name] for name in HELD["gateway"]}
    for stage in fleet["stages"]:
        for worker in stage["workers"]:
            age_s = max(age_s, math.inf if worker["age_s"] is None else worker["age_s"])
            found[f"{worker['name']} in_work"] = worker["in_work"] + worker["in_work_tokens"]
            # Of a worker that has told nothing, as far as the gateway knows, something may be held.
            load = worker["load"]
            found |= {f"{worker['name']} {name}": load.get(name, 1) for name in HELD[stage["stage"]]}
    return {name: value for name, value in found.items() if value}, age_s


async def until_nothing_is_held(session: aiohttp.ClientSession, url: str) -> None:
    """Wait until two looks find nothing, with figures that every worker was asked for after the look before.

    At the first of them the gateway has sent its last word on every request. What a worker is asked for after
    that, it tells when it has read that word.
    """
    since = time.monotonic()
    end, clean = since + PATIENCE_S, 0
    while clean < 2:
        began = time.monotonic()
        left, age_s = await held(session, url)
        assert time.monotonic() < end, (left, age_s)
        if left or began - age_s > since:
            clean = 0 if left else clean + 1
            since = time.monotonic()
        await asyncio.sleep(0.1)


async def outcomes(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Return the gateway's counters of ended requests by status and of aborts by cause."""
    async with session.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    wanted = ("transom_requests_total", "transom_aborts_total", "transom_requests_in_flight")
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith(wanted))
    return {name: float(value) for name, value in pairs}


async def test_disconnects_at_random_moments_leave_nothing(
    pipeline: Any, base_url: str, request: pytest.FixtureRequest
) -> None:
    count: int = request.config.getoption("--disconnects")
    asked = await asyncio.to_thread(bodies)
    rng = random.Random(5)
    gone, log_len = 0, len(pipeline.log(last=1_000_000))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
        await until_nothing_is_held(session, base_url)
        before = await outcomes(session, base_url)
        by_client = 'transom_aborts_total{cause="client"}'

        async def client(numbers: Iterator[int], patience: float) -> None:
            nonlocal gone
            for number in numbers:
                longest_s = 0.2 if number % 4 == 0 else 1.5
                try:
                    async with asyncio.timeout(patience * rng.uniform(0, longest_s)):
                        body = asked[number % len(asked)]
                        async with session.post(f"{base_url}/v1/chat/completions", json=body) as response:
                            await response.read()
                except TimeoutError:
                    gone += 1

        # Those that went before the gateway had read them are not in the fleet's books. On a slow machine
        # that may be most: then more come, with more patience.
        aborted, rounds = 0.0, 0
        while aborted <= count / 12:
            assert rounds < 8, f"{aborted:.0f} of {gone} that have gone were counted as aborted"
            numbers = iter(range(count))
            await asyncio.gather(*(client(numbers, 2.0**rounds) for _ in range(AT_ONCE)))
            rounds += 1
            await until_nothing_is_held(session, base_url)
            after = await outcomes(session, base_url)
            aborted = after.get(by_client, 0) - before.get(by_client, 0)
        assert after["transom_requests_in_flight"] == 0
        assert gone > count / 3, "many of them should have gone before their answer was complete"
        assert aborted <= gone
        left = {name for name in after if "cause" in name and after[name] != before.get(name, 0)}
        assert left == {by_client}
        body = {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 8}
        async with session.post(f"{base_url}/v1/chat/completions", json=body) as response:
            assert response.status == 200
    logged = pipeline.log(last=1_000_000)[log_len:]
    assert "Task was destroyed" not in logged
    assert " error " not in logged
