"""POST /v1/media/embeddings on the whole pipeline: the encoder's rows, its limits, its cache."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import aiohttp
import media
import numpy as np
import pytest

pytestmark = pytest.mark.process


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def picture(colour: str, shape: str) -> dict[str, Any]:
    return image(media.data_url(media.picture(colour, shape), "image/png"))


CASES: dict[str, dict[str, Any]] = {
    "image": picture("red", "circle"),
    "video": {
        "type": "video_url",
        "video_url": {"url": media.data_url(media.moving_circle("left", seconds=2), "video/mp4")},
    },
    "audio": {
        "type": "audio_url",
        "audio_url": {"url": media.data_url(media.sample("spoken_7_jackson.wav"), "audio/wav")},
    },
}


async def post(base_url: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession() as http, http.post(base_url + path, json=body) as response:
        return response.status, await response.json()


@pytest.mark.parametrize("modality", CASES)
async def test_rows_tokens_and_key_of_an_item(base_url: str, modality: str) -> None:
    part = CASES[modality]
    status, floats = await post(base_url, "/v1/media/embeddings", {"input": part})
    assert status == 200, floats
    _, packed = await post(base_url, "/v1/media/embeddings", {"input": part, "encoding_format": "base64"})
    assert packed["cache_hit"]
    assert packed["content_key"] == floats["content_key"]
    assert packed["shape"] == floats["shape"]
    values = np.frombuffer(base64.b64decode(packed["embedding"]), packed["dtype"]).reshape(packed["shape"])
    assert np.array_equal(np.array(floats["embedding"], np.float32), values)
    assert np.isfinite(values).all()
    assert values.std() > 0
    pads = sum(id in floats["pad_token_ids"] for id in floats["token_ids"])
    assert pads == floats["media_tokens"] == floats["shape"][0]
    # A chat counts the same tokens for the same item.
    chat = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
    _, answer = await post(base_url, "/v1/chat/completions", chat)
    assert answer["usage"]["prompt_tokens_details"][f"{modality}_tokens"] == floats["media_tokens"]


async def test_another_picture_has_other_rows_and_another_key(base_url: str) -> None:
    bodies = [{"input": picture(colour, "square")} for colour in ("blue", "green")]
    answers = await asyncio.gather(*(post(base_url, "/v1/media/embeddings", body) for body in bodies))
    first, second = (answer for _, answer in answers)
    assert first["shape"] == second["shape"]
    assert first["content_key"] != second["content_key"]
    assert not np.allclose(first["embedding"], second["embedding"])


async def test_a_file_below_an_allowed_folder_is_the_same_item(base_url: str, media_folder: Path) -> None:
    data = media.picture("red", "triangle")
    (media_folder / "red triangle.png").write_bytes(data)
    (media_folder / "out.png").symlink_to("/etc/hostname")
    by_file = (media_folder / "red triangle.png").as_uri()
    _, first = await post(base_url, "/v1/media/embeddings", {"input": image(by_file)})
    inline = {"input": image(media.data_url(data, "image/png"))}
    _, second = await post(base_url, "/v1/media/embeddings", inline)
    assert (first["content_key"], first["shape"]) == (second["content_key"], second["shape"])
    for url in ((media_folder / "out.png").as_uri(), "file:///etc/passwd", f"file://{media_folder}/../x"):
        status, answer = await post(base_url, "/v1/media/embeddings", {"input": image(url)})
        assert (status, answer["error"]["code"]) == (400, "invalid_media")
        assert "no readable file of this path" in answer["error"]["message"]
        assert answer["error"]["param"] == "input.image_url.url"


async def test_the_media_guard_stands_here_too(base_url: str) -> None:
    for url in ("http://127.0.0.1/x.png", media.data_url(b"no picture", "image/png")):
        status, answer = await post(base_url, "/v1/media/embeddings", {"input": image(url)})
        assert (status, answer["error"]["code"]) == (400, "invalid_media")
        assert answer["error"]["param"] == "input.image_url.url"
