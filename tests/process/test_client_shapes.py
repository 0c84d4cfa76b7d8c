"""Load generators' requests answered by the real pipeline, with real media."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import media
import pytest

from tests import client_shapes

pytestmark = pytest.mark.process

SHAPES = client_shapes.with_media(
    media.picture("red", "circle"), media.colour_scenes(["red"], seconds_each=1), media.tones(440, 1)
)


@pytest.mark.parametrize("name", SHAPES)
async def test_a_load_generators_chat_is_answered_at_its_length(base_url: str, name: str) -> None:
    body = SHAPES[name]
    async with (
        aiohttp.ClientSession() as session,
        session.post(base_url + client_shapes.CHAT, json=body) as response,
    ):
        assert response.status == 200, await response.text()
        lines = [line async for line in response.content]
    events: list[dict[str, Any]] = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    usage = events[-1]["usage"]
    assert usage["completion_tokens"] == 8  # ignore_eos or min_tokens: exactly as many as asked for
    assert [choice["finish_reason"] for event in events for choice in event["choices"]][-1] == "length"
    details = usage["prompt_tokens_details"]
    for kind in ("image", "video", "audio"):
        sent = kind in name or name.endswith(" all")
        assert (details[f"{kind}_tokens"] > 0) == sent, (kind, details)
    assert usage["prompt_tokens"] > sum(details[f"{kind}_tokens"] for kind in ("image", "video", "audio"))


@pytest.mark.parametrize("stream", [True, False])
async def test_guidellms_completion_is_answered_at_its_length(base_url: str, stream: bool) -> None:
    body = client_shapes.guidellm_completion(stream=stream)
    async with (
        aiohttp.ClientSession() as session,
        session.post(base_url + client_shapes.COMPLETIONS, json=body) as response,
    ):
        text = await response.text()
        assert response.status == 200, text
    last = [line[6:] for line in text.splitlines() if line.startswith("data: {")][-1] if stream else text
    assert json.loads(last)["usage"]["completion_tokens"] == 8
