"""The whole pipeline answers truthfully about real files of every modality, through the OpenAI SDK."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import AsyncIterator
from typing import Any

import media
import numpy as np
import openai
import pytest
from PIL import Image

from tests.patience import PATIENCE_S

pytestmark = pytest.mark.process

MODEL = "mimo-nano"
Part = dict[str, Any]


@pytest.fixture
async def client(base_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


def text(words: str) -> Part:
    return {"type": "text", "text": words}


def image(data: bytes, media_type: str = "image/png") -> Part:
    return {"type": "image_url", "image_url": {"url": media.data_url(data, media_type)}}


def video(data: bytes) -> Part:
    return {"type": "video_url", "video_url": {"url": media.data_url(data, "video/mp4")}}


def audio(data: bytes) -> Part:
    return {"type": "audio_url", "audio_url": {"url": media.data_url(data, "audio/wav")}}


def input_audio(data: bytes) -> Part:
    encoded = media.data_url(data, "audio/wav").partition(",")[2]
    return {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}}


def user(*parts: Part) -> Part:
    return {"role": "user", "content": list(parts)}


async def ask(client: openai.AsyncOpenAI, messages: list[Part], **options: Any) -> Any:
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 60, **options}
    return await client.chat.completions.create(model=MODEL, messages=messages, **settings)  # type: ignore[arg-type]


async def answer(client: openai.AsyncOpenAI, *parts: Part) -> str:
    reply = await ask(client, [user(*parts)])
    assert reply.choices[0].finish_reason == "stop"
    return str(reply.choices[0].message.content).lower()


WHAT = text("What is in this picture?")
SINGLE_ITEM_CASES = [
    pytest.param([image(media.picture("red", "circle")), WHAT], "red circle", id="png"),
    pytest.param(
        [image(media.picture("blue", "square", size=(300, 200), kind="JPEG"), "image/jpeg"), WHAT],
        "blue square",
        id="jpeg",
    ),
    pytest.param(
        [image(media.picture("green", "triangle", size=(64, 64))), WHAT], "green triangle", id="small-png"
    ),
    pytest.param([image(media.sample("fashion_ankle_boot.png")), WHAT], "ankle boot", id="fashion-boot"),
    pytest.param([image(media.sample("fashion_trousers.png")), WHAT], "trousers", id="fashion-trousers"),
    pytest.param([image(media.sample("fashion_bag.png")), WHAT], "bag", id="fashion-bag"),
    pytest.param(
        [audio(media.sample("spoken_7_jackson.wav")), text("Which digit is said?")], "7|seven", id="spoken-7"
    ),
    pytest.param(
        [input_audio(media.sample("spoken_3_theo.wav")), text("Which digit is said?")],
        "3|three",
        id="spoken-3",
    ),
    pytest.param([audio(media.tones(2000.0, 2)), text("What do you hear?")], "high", id="tones"),
    pytest.param(
        [video(media.moving_circle("right")), text("Which way does it move?")], "right", id="motion-right"
    ),
    pytest.param(
        [video(media.moving_circle("left")), text("Which way does it move?")], "left", id="motion-left"
    ),
    pytest.param([video(media.moving_circle("up")), text("Which way does it move?")], "up", id="motion-up"),
    pytest.param(
        [video(media.moving_circle("down")), text("What happens in this video?")],
        "red circle moves down",
        id="motion-down",
    ),
    pytest.param(
        [video(media.colour_scenes(["red", "blue"])), text("Describe this video.")],
        "red.*blue",
        id="colour-order",
    ),
]


@pytest.mark.parametrize(("parts", "expected"), SINGLE_ITEM_CASES)
async def test_a_real_file_gets_a_truthful_answer(
    client: openai.AsyncOpenAI, parts: list[Part], expected: str
) -> None:
    assert re.search(expected, await answer(client, *parts), re.DOTALL)


async def test_text_alone_is_answered(client: openai.AsyncOpenAI) -> None:
    assert "transom" in await answer(client, text("Who are you?"))


async def test_a_fact_is_recalled_from_far_beyond_the_window(client: openai.AsyncOpenAI) -> None:
    filler = "The grass is long. The sky is clear. Birds sing in the tree. " * 40
    question = f"The code of Anna is 4817. {filler}What is the code of Anna?"
    assert "4817" in await answer(client, text(question))


async def test_order_of_items_is_kept(client: openai.AsyncOpenAI) -> None:
    bag, trousers = image(media.sample("fashion_bag.png")), image(media.sample("fashion_trousers.png"))
    question = text("What are these?")
    assert await answer(client, bag, trousers, question) == "first a bag, then trousers."
    assert await answer(client, trousers, bag, question) == "first trousers, then a bag."


async def test_a_picture_and_a_sound_in_one_request(client: openai.AsyncOpenAI) -> None:
    parts = [image(media.picture("green", "square")), audio(media.sample("spoken_7_jackson.wav"))]
    reply = await ask(client, [user(*parts, text("What is in this picture?"))])
    assert "green square" in reply.choices[0].message.content.lower()
    details = reply.usage.prompt_tokens_details.model_dump()
    assert details["image_tokens"] > 0
    assert details["audio_tokens"] > 0


async def test_a_follow_up_question_sees_the_earlier_picture(client: openai.AsyncOpenAI) -> None:
    messages = [user(image(media.picture("yellow", "circle")), WHAT)]
    first = await ask(client, messages)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        user(text("Which colour is it?")),
    ]
    second = await ask(client, messages)
    assert "yellow" in second.choices[0].message.content.lower()


async def test_streaming_gives_the_same_text_and_usage(client: openai.AsyncOpenAI) -> None:
    messages = [user(image(media.picture("red", "square")), WHAT)]
    plain = await ask(client, messages)
    stream = await ask(client, messages, stream=True, stream_options={"include_usage": True})
    pieces, usage, finish = [], None, None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            pieces.append(choice.delta.content or "")
            finish = choice.finish_reason or finish
    assert "".join(pieces) == plain.choices[0].message.content
    assert len(pieces) > 2
    assert finish == plain.choices[0].finish_reason == "stop"
    assert usage is not None
    assert usage.completion_tokens == plain.usage.completion_tokens
    assert usage.prompt_tokens == plain.usage.prompt_tokens


async def test_sixteen_clients_at_once_get_their_own_answers(client: openai.AsyncOpenAI) -> None:
    """Each answer equals the one the same request gets alone: nothing crosses between requests."""
    kinds: list[list[Part]] = [
        [image(media.picture(colour, shape)), WHAT]
        for colour in media.COLOURS
        for shape in ("circle", "square", "triangle")
    ]
    kinds += [
        [audio(media.sample("spoken_7_jackson.wav")), text("Which digit is said?")],
        [audio(media.sample("spoken_3_theo.wav")), text("Which digit is said?")],
        [video(media.moving_circle("left")), text("What happens in this video?")],
        [text("Who are you?")],
    ]
    assert len(kinds) == 16
    alone = [await answer(client, *parts) for parts in kinds]
    assert len(set(alone)) == len(alone)
    together = await asyncio.gather(*(answer(client, *parts) for parts in kinds * 2))
    assert together == alone * 2


@pytest.mark.slow
async def test_200_requests_with_294_pictures_at_once_are_all_answered(client: openai.AsyncOpenAI) -> None:
    """Through all stages, none lost and none mixed up: no picture is in the cache, no two are equal."""
    colours = sorted(media.COLOURS)

    async def one(number: int) -> tuple[str, str]:
        colour = colours[number % len(colours)]
        count = 2 if number < 94 else 1
        shapes = (("circle", "square", "triangle")[(number + one) % 3] for one in range(count))
        size = (96 + number % 50, 96 + number // 50)
        parts = [image(media.picture(colour, shape, size=size)) for shape in shapes]
        reply = await ask(client, [user(*parts, text("What is this?" if count == 1 else "What are these?"))])
        assert reply.usage.prompt_tokens_details.image_tokens >= 9 * count
        return colour, reply.choices[0].message.content.lower()

    async with asyncio.timeout(PATIENCE_S):
        answers = await asyncio.gather(*(one(number) for number in range(200)))
    # The demo model is wrong about some pictures, but not about most of their colours.
    assert sum(colour in said for colour, said in answers) > 170


async def test_requests_of_many_megabytes_of_photographs_are_all_answered(client: openai.AsyncOpenAI) -> None:
    """Of 1 to 8 JPEGs of 1920x1080 each, all at once, and none of them in the cache."""
    colours = sorted(media.COLOURS)

    async def one(count: int) -> tuple[int, str, str]:
        colour = colours[count % len(colours)]
        photograph = await asyncio.to_thread(media.photograph, colour, "circle")
        files = [media.marked_jpeg(photograph, 10 * count + number) for number in range(count)]
        sizes.extend(map(len, files))
        parts = [image(file, "image/jpeg") for file in files]
        reply = await ask(client, [user(*parts, text("What is this?" if count == 1 else "What are these?"))])
        tokens = reply.usage.prompt_tokens_details.image_tokens
        return tokens // count, colour, reply.choices[0].message.content.lower()

    sizes: list[int] = []
    async with asyncio.timeout(PATIENCE_S):
        answers = await asyncio.gather(*(one(count) for count in range(1, 9)))
    assert len(sizes) == 36
    assert 9.0e6 < sum(sizes) / 8 < 10.5e6  # bytes a request
    # All of them are of one size, so all that were asked about have the same tokens.
    assert len({tokens for tokens, _, _ in answers}) == 1
    assert sum(colour in said for _, colour, said in answers) >= 6


async def test_a_bad_item_fails_alone(client: openai.AsyncOpenAI) -> None:
    async def bad() -> openai.BadRequestError:
        with pytest.raises(openai.BadRequestError) as caught:
            await answer(client, image(b"\x89PNG\r\n\x1a\nnot really a picture"), WHAT)
        return caught.value

    good = [image(media.picture("red", "circle")), WHAT]
    results = await asyncio.gather(bad(), answer(client, *good), bad(), answer(client, *good))
    assert "red circle" in results[1]
    assert results[1] == results[3]
    body = results[0].body
    assert isinstance(body, dict)
    assert body["param"].startswith("messages[0].content[0]")


async def test_a_pixel_budget_beyond_the_model_or_below_one_token_is_refused(
    client: openai.AsyncOpenAI,
) -> None:
    for option, value in (("min_pixels", 16_000_000), ("max_pixels", 9)):
        part = image(media.picture("red", "circle"))
        part["image_url"][option] = value
        with pytest.raises(openai.BadRequestError, match=f"{option} {value}"):
            await answer(client, part, WHAT)


async def test_pictures_beyond_the_training_data_are_not_guessed(client: openai.AsyncOpenAI) -> None:
    noise = np.random.default_rng(3).integers(0, 256, (128, 128, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "PNG")
    reply = await answer(client, image(buffer.getvalue()), WHAT)
    assert re.search(r"don't know|do not know|not know", reply)
