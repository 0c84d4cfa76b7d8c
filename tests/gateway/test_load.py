"""Many clients at once: bursts are answered or refused, idle streams cost little, nothing is lost."""

from __future__ import annotations

import asyncio

import aiohttp

from tests.gateway.conftest import FleetFactory
from tests.gateway.fake_workers import Script
from tests.gateway.test_failures import BODY, WITH_IMAGE, until_idle

CHAT = "/v1/chat/completions"


async def test_a_burst_of_200_pictures_is_answered(start_fleet: FleetFactory) -> None:
    fleet = await start_fleet()
    fleet.script = Script(answer=lambda job: "seen")
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask() -> str:
            async with session.post(fleet.url + CHAT, json=WITH_IMAGE) as response:
                assert response.status == 200, await response.text()
                text: str = (await response.json())["choices"][0]["message"]["content"]
                return text

        assert await asyncio.gather(*(ask() for _ in range(200))) == ["seen"] * 200
    await until_idle(fleet)


async def test_a_burst_over_the_bound_is_answered_or_told_to_come_back(start_fleet: FleetFactory) -> None:
    fleet = await start_fleet(max_inflight=20)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask() -> int:
            async with session.post(fleet.url + CHAT, json=BODY) as response:
                await response.read()
                assert (response.status == 429) == ("Retry-After" in response.headers)
                return response.status

        statuses = await asyncio.gather(*(ask() for _ in range(100)))
    assert set(statuses) <= {200, 429}
    assert statuses.count(200) >= 20
    await until_idle(fleet)


async def test_many_idle_streams_leave_room_for_others(start_fleet: FleetFactory) -> None:
    fleet = await start_fleet(max_inflight=600)
    hold = asyncio.Event()
    fleet.script = Script(hold=hold)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        idle = await asyncio.gather(
            *(session.post(fleet.url + CHAT, json=BODY | {"stream": True}) for _ in range(300))
        )
        assert fleet.stage.load()["choices"] == 300
        async with session.get(fleet.url + "/health") as response:
            assert response.status == 200
        async with session.post(fleet.url + CHAT, json=BODY | {"max_tokens": 1}) as response:
            assert response.status == 200
        hold.set()
        for response in idle:
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
    await until_idle(fleet)
