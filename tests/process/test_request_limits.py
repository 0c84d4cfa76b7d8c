"""What all media of one request may have together, on the whole pipeline: told by part, value and limit."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import media
import numpy as np
import pytest
from test_disconnects import until_nothing_is_held

pytestmark = pytest.mark.process

PICTURE = (160, 120)
TWO_PICTURES = 2 * PICTURE[0] * PICTURE[1]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    from conftest import Pipeline

    limits = {"PIXELS": TWO_PICTURES, "VIDEO_S": 9, "AUDIO_S": 4, "VISUAL_TOKENS": 35}
    env = {f"TRANSOM_GATEWAY_MAX_REQUEST_{name}": str(value) for name, value in limits.items()}
    running = Pipeline("--encoders", "2", env=env)
    yield running.url
    running.stop()
    assert not running.leaks(), running.log()


@pytest.fixture
async def session(url: str) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as one:
        yield one


def part(modality: str, data: bytes, media_type: str, **options: Any) -> dict[str, Any]:
    kind = f"{modality}_url"
    return {"type": kind, kind: {"url": media.data_url(data, media_type), **options}}


def pictures(*colours: str, **options: Any) -> list[dict[str, Any]]:
    return [
        part("image", media.picture(one, "circle", size=PICTURE), "image/png", **options) for one in colours
    ]


def clip(direction: str, seconds: int) -> dict[str, Any]:
    return part("video", media.moving_circle(direction, seconds=seconds), "video/mp4", max_pixels=9216)


def with_sound(seconds: float) -> dict[str, Any]:
    frames = [np.full((96, 128, 3), media.COLOURS["blue"], np.uint8)] * 20
    sound = 0.3 * np.sin(np.arange(int(24_000 * seconds)) / 9)
    return part(
        "video", media.encode_clip(frames, 10, sound.astype(np.float32)), "video/mp4", max_pixels=9216
    )


def beeps(frequency: float, count: int) -> dict[str, Any]:
    return part("audio", media.tones(frequency, count), "audio/wav")


def cases() -> dict[str, tuple[list[dict[str, Any]], str]]:
    """Parts that are too much together, each alone would not be; and what is said of them."""
    return {
        "pixels": (pictures("red", "green", "blue"), f"57600 pixels, at most {TWO_PICTURES}"),
        "video": ([clip("left", 5), clip("right", 5)], "10 s of video, at most 9"),
        "sound": ([beeps(400, 4), beeps(500, 4)], "4.8 s of sound, at most 4"),
        "sound of a video": ([with_sound(2.0), beeps(600, 4)], " s of sound, at most 4"),
        "tokens": ([clip("up", 5), *pictures("red")], "36 visual tokens, at most 35"),
    }


CASES = cases()


async def ask(session: aiohttp.ClientSession, url: str, parts: list[dict[str, Any]], **more: Any) -> Any:
    content = [{"type": "text", "text": "What is this?"}, *parts]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **more}
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        return response.status, None if response.status == 200 else (await response.json())["error"]


@pytest.mark.parametrize("case", CASES)
async def test_too_much_together_is_refused_by_part_value_and_limit(
    session: aiohttp.ClientSession, url: str, case: str
) -> None:
    parts, problem = CASES[case]
    # The second time the items that came through are found in the cache: the answer stays the same.
    for more in ({"stream": True}, {"stream": False}, {"n": 2}):
        status, error = await ask(session, url, parts, **more)
        assert (status, error["code"]) == (400, "invalid_media"), error
        where = {f"messages[0].content[{1 + at}].{one['type']}.url" for at, one in enumerate(parts)}
        assert error["param"] in where
        assert error["message"].startswith(f"{error['param']}: with this ")
        assert problem in error["message"]
        assert error["message"].endswith("are allowed in all")
    await until_nothing_is_held(session, url)
    for one in parts:
        assert (await ask(session, url, [one]))[0] == 200


async def test_an_item_that_is_too_much_alone_has_no_embeddings_either(
    session: aiohttp.ClientSession, url: str
) -> None:
    async with session.post(f"{url}/v1/media/embeddings", json={"input": clip("up", 10)}) as response:
        error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, "input.video_url.url")
    assert error["message"] == f"{error['param']}: with this 10 s of video, at most 9 are allowed in all"
    await until_nothing_is_held(session, url)
