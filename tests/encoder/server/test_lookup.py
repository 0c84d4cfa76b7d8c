"""Repeated media cost no download where a server vouches for them, no decode and no forward ever."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
from aiohttp import web

pytestmark = pytest.mark.process

Make = Callable[..., bytes]
WORK = ("decode_jobs", "batches")


class Origin:
    """Serves `files` by path: (body, headers); or redirects. Counts what it is asked and what it gives."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[bytes, dict[str, str]]] = {}
        self.redirects: dict[str, str] = {}
        self.bodies: Counter[str] = Counter()
        self.conditions: list[tuple[str, str | None]] = []

    async def answer(self, request: web.Request) -> web.Response:
        if request.path in self.redirects:
            raise web.HTTPFound(self.redirects[request.path])
        body, headers = self.files[request.path]
        condition = request.headers.get("If-None-Match") or request.headers.get("If-Modified-Since")
        self.conditions.append((request.path, condition))
        if condition is not None and condition in (headers.get("ETag"), headers.get("Last-Modified")):
            return web.Response(status=304, headers=headers)
        self.bodies[request.path] += 1
        return web.Response(body=body, headers=headers)


@pytest.fixture
async def origin() -> AsyncIterator[Origin]:
    own = Origin()
    app = web.Application()
    app.router.add_get("/{path:.*}", own.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    own.base = f"http://127.0.0.1:{runner.addresses[0][1]}"  # type: ignore[attr-defined]
    yield own
    await runner.cleanup()


@pytest.fixture
async def open_client(encoder_process: Any, new_client: Any) -> AsyncIterator[Any]:
    """A client of an encoder that may fetch from loopback."""
    _, line = await asyncio.to_thread(
        encoder_process,
        "--allow-private-addresses",
        "--fetch-ports",
        "0",
        "--decode-workers",
        "1",
        "--fetch-connect-s",
        "600",
        "--fetch-read-s",
        "600",
        "--fetch-total-s",
        "600",
    )
    async with new_client(line) as client:
        yield client


async def test_a_hit_costs_no_download_no_decode_and_no_forward(
    open_client: Any, origin: Any, make_picture: Make, make_clip: Make, make_sound: Make
) -> None:
    client, tries = open_client, 0

    async def ask(kind: str, path: str, **options: Any) -> Any:
        nonlocal tries
        tries += 1
        result = client.send(f"try-{tries}", kind, url=origin.base + path, **options)
        await client.wait(result)
        assert result.error is None
        return result

    rested = {"Last-Modified": "Sun, 29 Nov 2015 12:00:00 GMT"}
    origin.files = {
        "/a.png": (make_picture(1), {"ETag": '"a"'}),
        "/b.png": (make_picture(2), {"ETag": '"a"'}),
        "/clip.mkv": (make_clip(20), rested),
        "/sound.wav": (make_sound(1.0), {"ETag": 'W/"weak"'}),
    }
    kinds = {"/a.png": "image", "/clip.mkv": "video", "/sound.wav": "audio"}
    first = {path: await ask(kind, path) for path, kind in kinds.items()}
    before = await client.load()
    for path, kind in kinds.items():
        again = await ask(kind, path)
        assert again.done.cache_hit
        assert again.done.content_key == first[path].done.content_key
        assert again.embedding.tobytes() == first[path].embedding.tobytes()
        assert again.tokens == first[path].tokens
    after = await client.load()
    assert {name: after[name] for name in WORK} == {name: before[name] for name in WORK}
    assert after["cache_hits"] - before["cache_hits"] == 3
    # A weak tag does not vouch for every byte: that one was downloaded again.
    assert origin.bodies == {"/a.png": 1, "/clip.mkv": 1, "/sound.wav": 2}

    # Other options: the server vouches, but nothing is kept under that key.
    smaller = await ask("image", "/a.png", max_pixels=8192)
    assert not smaller.done.cache_hit
    assert origin.bodies["/a.png"] == 2

    # A redirect that leads elsewhere is not the same content, even if the tags are equal.
    origin.redirects["/moving"] = "/a.png"
    assert (await ask("image", "/moving")).done.cache_hit
    assert (await ask("image", "/moving")).done.cache_hit
    assert origin.conditions[-1] == ("/a.png", '"a"')
    origin.redirects["/moving"] = "/b.png"
    other = await ask("image", "/moving")
    assert origin.conditions[-1] == ("/b.png", None)
    assert not np.array_equal(other.embedding, first["/a.png"].embedding)

    # New content under the old URL.
    origin.files["/a.png"] = (make_picture(3), {"ETag": '"a2"'})
    changed = await ask("image", "/a.png")
    assert origin.conditions[-1] == ("/a.png", '"a"')
    assert not changed.done.cache_hit
    assert changed.done.content_key != first["/a.png"].done.content_key

    # Inline media are looked up by their bytes, before they are decoded.
    inline = client.send("inline", "image", make_picture(9))
    await client.wait(inline)
    before = await client.load()
    results = [client.send(f"inline-{n}", "image", make_picture(9)) for n in range(5)]
    await client.wait(*results)
    assert all(result.done.cache_hit for result in results)
    after = await client.load()
    assert {name: after[name] for name in WORK} == {name: before[name] for name in WORK}
