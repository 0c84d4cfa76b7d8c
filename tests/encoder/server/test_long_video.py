"""A clip of an hour: its first embeddings leave before a tenth of it is decoded."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import aiohttp
import av
import numpy as np
import pytest

from tests.encoder.server.standstill import go_on, stopped_in, until_dropped

pytestmark = pytest.mark.process

SIDE = 64
HOUR_S = 3600


@pytest.fixture(scope="module")
def hour() -> bytes:
    """An hour at one frame a second with a keyframe a minute."""
    return clip_of(HOUR_S)


def clip_of(seconds: int) -> bytes:
    target = f"/dev/shm/clip-of-a-test-{os.getpid()}.mp4"
    try:
        with av.open(target, "w") as output:
            stream = output.add_stream("mpeg4", rate=1, options={"g": "60"})
            stream.width, stream.height, stream.pix_fmt = SIDE, SIDE, "yuv420p"
            pixels = np.zeros((SIDE, SIDE, 3), np.uint8)
            for number in range(seconds):
                pixels[:] = number % 250
                output.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            output.mux(stream.encode(None))
        return Path(target).read_bytes()
    finally:
        Path(target).unlink(missing_ok=True)


async def metric(client: Any, name: str) -> float:
    async with aiohttp.ClientSession() as http, http.get(f"{client.line['http']}/metrics") as response:
        text = await response.text()
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def processes(pid: int) -> list[int]:
    """The encoder and its children."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [pid, *(int(child) for task in tasks for child in (task / "children").read_text().split())]


def peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


# The first test of the module: what others sent would have raised the peaks already.
async def test_memory_does_not_grow_with_the_length_of_a_clip(
    client: Any, encoder: dict[str, Any], hour: bytes
) -> None:
    pids = processes(encoder["pid"])
    assert len(pids) == 5  # a rank, two decode workers, a fetch worker
    before: list[int] = []
    for number, data in enumerate((clip_of(120), clip_of(121), hour)):
        before = [peak_bytes(pid) for pid in pids]
        result = client.send(f"length-{number}", "video", data)
        await client.wait(result)
        assert result.error is None
    # The frames of an hour are 44 MB.
    grown = [peak_bytes(pid) - was for pid, was in zip(pids, before, strict=True)]
    assert max(grown) < 24 * 1024**2


async def test_the_first_embeddings_of_an_hour_leave_early_and_all_of_them_come(
    client: Any, hour: bytes
) -> None:
    units, ratio = "transom_encoder_video_units_total", "transom_encoder_first_chunk_decoded_ratio"
    names = (units, f"{ratio}_count", f'{ratio}_bucket{{le="0.1"}}')
    before = [await metric(client, name) for name in names]
    result = client.send("hour", "video", hour, background=(0, 0, 0))  # another key than before
    await client.wait(result)
    assert result.error is None
    assert result.chunks > 1
    grown = [await metric(client, name) - was for name, was in zip(names, before, strict=True)]
    assert grown == [64, 1, 1]  # units of the demo model's 128 frames; one clip, which began early
    assert result.rows[0].shape[0] <= len(result.embedding) * 0.1


async def test_a_clip_given_up_after_its_first_embeddings_is_decoded_no_further(
    client: Any, hour: bytes
) -> None:
    names: list[str] = []

    def send(number: int) -> Any:
        names.append(f"given-up-{number}")
        return client.send(names[-1], "video", hour, max_pixels=8192, background=(number, 0, 0))

    before = await metric(client, "transom_encoder_video_units_total")
    result, workers = await stopped_in(client, send)
    client.abort(names[-1])
    await until_dropped(client)
    go_on(workers)
    await client.settled()
    assert await metric(client, "transom_encoder_video_units_total") - before < 64 * len(names)
    assert not result.complete
