"""A request's timeline: what the API tells of it, to whom, for how long, and how the command draws it."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from rich.console import Console

from tests.gateway.conftest import FleetFactory
from tests.gateway.fake_workers import ROWS, ScriptedFleet
from tests.patience import PATIENCE_S
from transom.commands.trace import draw
from transom.errors import NotFoundError
from transom.gateway.exchange import Exchange
from transom.gateway.timeline import Timeline
from transom.gateway.trace import Trace, TraceBook

PNG = "data:image/png;base64,iVBORw0KGgo="


def chat(text: str = "hi", **fields: Any) -> dict[str, Any]:
    parts = [
        {"type": "image_url", "image_url": {"url": PNG}},
        {"type": "text", "text": text},
    ]
    return {"messages": [{"role": "user", "content": parts}], **fields}


async def post(
    http: aiohttp.ClientSession, fleet: ScriptedFleet, body: dict[str, Any], key: str = ""
) -> tuple[int, str, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with http.post(f"{fleet.url}/v1/chat/completions", json=body, headers=headers) as response:
        return response.status, response.headers["X-Request-Id"], await response.json()


async def trace(
    http: aiohttp.ClientSession, fleet: ScriptedFleet, id: str, key: str = ""
) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with http.get(f"{fleet.url}/v1/requests/{id}/trace", headers=headers) as response:
        return response.status, await response.json()


async def test_a_finished_request_shows_its_stages_in_order(fleet: ScriptedFleet) -> None:
    async with aiohttp.ClientSession() as http:
        _, id, answer = await post(http, fleet, chat())
        status, found = await trace(http, fleet, id)
    assert status == 200
    assert id == answer["id"] == found["id"]
    assert (found["state"], found["status"], found["error"]) == ("finished", 200, None)
    assert found["finish_reasons"] == ["stop"]
    assert found["usage"] == answer["usage"]
    stages = [span["stage"] for span in found["spans"]]
    assert list(dict.fromkeys(stages)) == ["gateway", "encoder", "prefill", "decode"]
    assert [span["name"] for span in found["spans"]][:5] == ["body", "parse", "prepare", "admit", "send"]
    encoder = [span for span in found["spans"] if span["stage"] == "encoder"]
    assert [span["name"] for span in encoder] == ["decode", "forward", "send"]
    # As the encoder said: the forward began while something was still being decoded.
    assert encoder[1]["start_ms"] == pytest.approx(encoder[0]["start_ms"] + 0.3, abs=0.002)
    for span in found["spans"]:
        assert span["start_ms"] >= 0
        assert span["start_ms"] + span["duration_ms"] <= found["duration_ms"] + 2.0, span
        assert not span["running"]
    assert found["ttft_ms"] <= found["duration_ms"]
    (item,) = found["media"]
    assert (item["modality"], item["cache_hit"], item["tokens"]) == ("image", False, ROWS)
    assert item["worker"] == "encoder-0"
    assert "tcp://" not in str(found)


async def test_a_running_request_is_seen_and_ends_by_the_client_leaving(fleet: ScriptedFleet) -> None:
    fleet.script.hold = asyncio.Event()
    async with aiohttp.ClientSession() as http:
        async with http.post(f"{fleet.url}/v1/chat/completions", json=chat(stream=True)) as response:
            await response.content.readline()
            id = response.headers["X-Request-Id"]
            _, found = await trace(http, fleet, id)
            assert (found["state"], found["status"]) == ("running", None)
            assert found["spans"][-1]["running"] or found["usage"]["completion_tokens"] == 1
            response.close()
        async with asyncio.timeout(PATIENCE_S):
            while found["state"] == "running":
                await asyncio.sleep(0.01)
                _, found = await trace(http, fleet, id)
    assert (found["status"], found["error"]) == (499, "cancelled")
    # What had come by then was used all the same.
    usage = found["usage"]
    assert (usage["completion_tokens"], usage["prompt_tokens_details"]["image_tokens"]) == (1, ROWS)
    assert usage["total_tokens"] == usage["prompt_tokens"] + 1


async def test_failed_requests_have_a_trace_too(fleet: ScriptedFleet) -> None:
    from transom.errors import MediaError

    fleet.script.encode_error = MediaError("no picture", param="messages[0].content[0].image_url").info()
    async with aiohttp.ClientSession() as http:
        status, id, _ = await post(http, fleet, chat())
        _, found = await trace(http, fleet, id)
    assert status == 400
    assert (found["status"], found["error"]) == (400, "invalid_media")
    assert found["media"][0]["cache_hit"] is None


async def test_only_the_key_that_sent_a_request_sees_it(start_fleet: FleetFactory, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first\nsecond\n")
    fleet = await start_fleet(api_keys_file=str(keys))
    async with aiohttp.ClientSession() as http:
        _, id, _ = await post(http, fleet, chat(), key="first")
        assert (await trace(http, fleet, id))[0] == 401
        assert (await trace(http, fleet, id, key="wrong"))[0] == 401
        foreign = await trace(http, fleet, id, key="second")
        unknown = await trace(http, fleet, "chatcmpl-0", key="second")
        assert foreign == unknown
        assert foreign[0] == 404
        assert (await trace(http, fleet, id, key="first"))[0] == 200


async def test_the_last_ones_are_kept(start_fleet: FleetFactory) -> None:
    fleet = await start_fleet(kept_traces=2)
    async with aiohttp.ClientSession() as http:
        ids = [(await post(http, fleet, chat()))[1] for _ in range(3)]
        found = [(await trace(http, fleet, id))[0] for id in ids]
    assert found == [404, 200, 200]


def make_trace(id: str, owner: bytes = b"") -> Trace:
    return Trace(
        id=id,
        kind="chat",
        model="m",
        owner=owner,
        timeline=Timeline(),
        exchange=Exchange(timeout_s=1, deadline_s=1),
        outputs=[],
        usage=dict,
    )


def test_running_requests_outlast_ended_ones_but_not_the_bound() -> None:
    book = TraceBook(2, str)
    with book.record(make_trace("ended")):
        pass
    with book.record(make_trace("a")), book.record(make_trace("b")):
        with pytest.raises(NotFoundError):
            book.find("ended", b"")
        assert book.find("a", b"")["id"] == "a"
        with book.record(make_trace("c")):
            assert len(book) == 2
    assert len(book) <= 2


def test_a_book_without_pages_keeps_nothing() -> None:
    book = TraceBook(0, str)
    with book.record(make_trace("a")):
        assert len(book) == 0
    assert len(book) == 0


async def test_fleet_view_names_no_address(fleet: ScriptedFleet) -> None:
    fleet.encoders[0].load = {"items": 3.0, "odd": float("nan")}
    async with aiohttp.ClientSession() as http, asyncio.timeout(PATIENCE_S):
        load: dict[str, float] = {}
        while "items" not in load:
            async with http.get(f"{fleet.url}/v1/fleet") as response:
                text = await response.text()
                body = await response.json()
            load = body["stages"][0]["workers"][0]["load"]
            await asyncio.sleep(0.01)
    assert body["ready"]
    assert body["missing"] == []
    assert [(one["stage"], one["total"], one["ready"]) for one in body["stages"]] == [
        ("encoder", 1, 1), ("prefill", 1, 1), ("decode", 1, 1),
    ]  # fmt: skip
    assert load == {"items": 3.0}
    assert "tcp" not in text
    ages = [worker["age_s"] for stage in body["stages"] for worker in stage["workers"]]
    assert all(0 <= age_s < PATIENCE_S for age_s in ages)


async def test_the_command_draws_it(fleet: ScriptedFleet) -> None:
    async with aiohttp.ClientSession() as http:
        _, id, _ = await post(http, fleet, chat())
        _, found = await trace(http, fleet, id)
    out = io.StringIO()
    found["media"][0]["notes"] = ["\x1b[2Jcleared"]
    draw(found, Console(file=out, soft_wrap=True, highlight=False, markup=False))
    lines = out.getvalue().splitlines()
    assert lines[0].startswith(f"{id}  chat of ")
    assert sum("#" in line for line in lines) == len(found["spans"])
    assert any(line.startswith("prefill-0  ") for line in lines)
    assert lines[-1].startswith(f"image 1: encoded, {ROWS} tokens")
    assert "\x1b" not in out.getvalue()
