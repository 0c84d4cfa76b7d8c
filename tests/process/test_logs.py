"""Logs as JSON: an object a line, and the id of a request in the lines of each process that worked on it."""

from __future__ import annotations

import json
import re
from typing import Any

import aiohttp
import media
import pytest

pytestmark = pytest.mark.process


def records(pipeline: Any) -> list[dict[str, Any]]:
    """Return what all processes have logged."""
    found = []
    for line in pipeline.log(last=1_000_000).splitlines():
        text = line.partition("|")[2].strip()
        if text.startswith("{"):
            found.append(json.loads(text))
            assert {"time", "level", "stage", "logger", "message"} <= set(found[-1])
    return found


async def test_an_id_leads_through_the_logs_of_all_processes(own_pipeline: Any) -> None:
    pipeline = own_pipeline(env={"TRANSOM_LOG_JSON": "1", "TRANSOM_UP_LOG_LEVEL": "info"})
    data = media.picture("red", "circle")
    picture, broken = (media.data_url(one, "image/png") for one in (data, data[:-60]))
    question = {"type": "text", "text": "secret question " * 10}
    url = f"{pipeline.url}/v1/chat/completions"
    ids = {}
    async with aiohttp.ClientSession() as session:
        # With its pictures it is too long: prefill and decode are the first to know.
        long = [{"type": "text", "text": "a"}, *[image(picture)] * 8]
        rooms = []
        for words in (0, 1000):
            long[0]["text"] = "a" + " b" * words
            rooms.append(await left(session, pipeline.url, long))
        # Room for the short answer remains as far as the gateway knows.
        words = int((rooms[0] - 20) / (rooms[0] - rooms[1]) * 1000)
        long[0]["text"] = "a" + " b" * words
        assert 4 < await left(session, pipeline.url, long) < 8 * 12
        for name, parts in (
            ("broken", [question, image(broken)]),
            ("private", [question, image("http://localhost/a.png")]),
            ("long", long),
            ("good", [question, image(picture)]),
        ):
            body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 4}
            async with session.post(url, json=body) as response:
                assert response.status == (200 if name == "good" else 400), await response.text()
                ids[name] = response.headers["X-Request-Id"]

    def processes(name: str) -> set[str]:
        return {one["stage"] for one in records(pipeline) if one.get("request_id") == ids[name]}

    def said(stage: str, reason: str) -> list[str]:
        messages = (one["message"] for one in records(pipeline) if one["stage"] == stage)
        return [one for one in messages if re.fullmatch(reason, one)]

    # What each process has logged before the answer may be printed after it, and in any order.
    pipeline.until(lambda: processes("broken") >= {"gateway", "encoder"}, "lines about the broken picture")
    # The reasons that no client is told: from processes of the encoder's own, in the same form.
    for stage, reason in (
        ("fetcher", r"a URL is refused: localhost stands for \S+"),
        ("decoder", r"a picture can't be decoded: .*"),
    ):
        pipeline.until(lambda: bool(said(stage, reason)), f"{reason!r} of the {stage}")  # noqa: B023
    # Whichever of the two counts first.
    pipeline.until(lambda: "gateway" in processes("long"), "line of the gateway about the long request")
    pipeline.until(lambda: bool(processes("long") & {"prefill", "decode"}), "line of a worker about it")
    pipeline.until(lambda: "gateway" in processes("good"), "line about the good request")
    assert "secret" not in pipeline.log(last=1_000_000)


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


async def left(session: aiohttp.ClientSession, url: str, parts: list[dict[str, Any]]) -> int:
    """Return how many tokens the context has left beside the text of a message."""
    body = {"messages": [{"role": "user", "content": parts}]}
    async with session.post(f"{url}/tokenize", json=body) as response:
        found = await response.json()
    return int(found["max_model_len"] - found["count"])
