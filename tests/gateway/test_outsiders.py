"""What strangers may not choose or learn: the fleet's encoders, ids of requests, inner addresses."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import aiohttp
import pytest

from tests.gateway.conftest import FleetFactory
from tests.gateway.fake_workers import Script, ScriptedFleet, ScriptedWorker
from tests.patience import PATIENCE_S
from transom.messages import EncodeJob, Join, KVHandoff, PrefillJob

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
PICTURE = {"type": "image_url", "image_url": {"url": "https://host/x.png"}}
ADDRESS = re.compile(r"(tcp|ipc)://|127\.0\.0\.1|:\d{4,5}\b")


async def encoders(session: aiohttp.ClientSession, fleet: ScriptedFleet) -> list[Any]:
    async with session.get(f"{fleet.url}/v1/fleet") as response:
        stages = (await response.json())["stages"]
    return next(one["workers"] for one in stages if one["stage"] == "encoder")  # type: ignore[no-any-return]


@pytest.mark.parametrize("accepts", [False, True])
async def test_who_calls_itself_an_encoder_is_one_only_where_that_is_allowed(
    start_fleet: FleetFactory, accepts: bool
) -> None:
    fleet = await start_fleet(accept_encoders=accepts)
    stranger = ScriptedWorker("encoder")
    await stranger.start()
    async with aiohttp.ClientSession() as session:
        body = {"messages": [{"role": "user", "content": [PICTURE]}]}
        async with session.post(f"{fleet.url}/v1/chat/completions", json=body) as response:
            assert response.status == 200
        (job,) = await fleet.encoders[0].wait_for(EncodeJob)
        fleet.encoders[0].transport.send(job.gateway, Join(address=stranger.transport.address))
        stranger.transport.send(job.gateway, Join(address=stranger.transport.address))
        if accepts:
            ready = 1
            async with asyncio.timeout(PATIENCE_S):
                while ready < 2:
                    ready = sum(one["ready"] for one in await encoders(session, fleet))
                    await asyncio.sleep(0.02)
        else:
            # The gateway takes messages in order: when it has answered this, it has refused that.
            async with session.post(f"{fleet.url}/v1/chat/completions", json=body) as response:
                assert response.status == 200
            assert len(await encoders(session, fleet)) == 1
    await stranger.stop()


async def test_a_client_can_not_choose_the_id_of_its_request(fleet: ScriptedFleet) -> None:
    """Else it could meet another's, in the fleet and in traces."""
    seen = set()
    async with aiohttp.ClientSession() as session:
        for body in (BODY, BODY | {"request_id": "mine", "id": "mine"}, BODY | {"rid": "mine"}):
            headers = {"X-Request-Id": "mine", "X-Correlation-Id": "mine"}
            async with session.post(
                f"{fleet.url}/v1/chat/completions", json=body, headers=headers
            ) as response:
                assert response.status == 200
                seen.add(response.headers["X-Request-Id"])
    assert len(seen) == 3
    assert all(re.fullmatch(r"chatcmpl-[0-9a-f]{32}", one) for one in seen)
    assert {job.request_id for job in await fleet.prefills[0].wait_for(PrefillJob, 3)} == seen


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", ["encoder", "prefill", "decode"])
async def test_the_loss_of_a_worker_is_told_without_its_address(
    start_fleet: FleetFactory, stage: str, stream: bool
) -> None:
    fleet = await start_fleet()
    fleet.script = Script(hold=asyncio.Event())
    holder = {"encoder": fleet.encoders, "prefill": fleet.prefills, "decode": fleet.decodes}[stage][0]
    if stage != "decode":  # the decode worker holds by the script
        holder.on_message = None
    kind = {"encoder": EncodeJob, "prefill": PrefillJob, "decode": KVHandoff}[stage]
    body = {"messages": [{"role": "user", "content": [PICTURE]}], "stream": stream}
    async with aiohttp.ClientSession() as session:
        asking = asyncio.create_task(session.post(f"{fleet.url}/v1/chat/completions", json=body))
        await holder.wait_for(kind)
        holder.incarnation = "second"
        async with await asking as response:
            text = await response.text()
    assert f"the {stage} worker of this request was lost" in text
    assert not ADDRESS.search(text)
