"""Odd and broken media of the wild, all at once and beside good ones: the right result or a clear refusal."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.process

KINDS = {
    "images_edge": "image", "exif_orientation": "image", "images": "image", "video_edge": "video",
    "video": "video", "audio": "audio",
}  # fmt: skip
MAX_BYTES = 200_000  # decoding the longer ones shows nothing new and takes minutes on busy cores
# What is refused, with words of the reason. All else must be embedded.
REFUSED = {
    "pil_broken.png": "damaged PNG",
    "pil_broken_data_stream.png": "can't be decoded",
    "pil_decompression_bomb.gif": "limit 100000000",
    "pil_hopper.psd": "Photoshop",
    "pil_png_decompression_dos.png": "inflates to more than is read",
    "pil_truncated_image.png": "truncated",
    "pil_truncated_jpeg.jpg": "truncated",
    "pil_truncated_end_chunk.png": "truncated",
    "pil_ultrahdr.jpg": "truncated",
    "small_webp.webp": "can't be decoded",
    "tc_sigsegv.png": "can't be decoded",
    "filetype_fixture-isom.mp4": "can't be opened",
    "mb_oversized-id3.wav": "no picture track",
}
LIMIT_S = 800.0
LIBRARY_WORDS = re.compile(r"Errno|<none>|_io\.|0x[0-9a-f]{6}|Traceback|av\.error|PIL\.")


async def test_all_edge_cases_at_once_beside_good_pictures(
    client: Any, shared_media: Path, make_picture: Callable[..., bytes]
) -> None:
    files = [
        file
        for folder in KINDS
        for file in sorted((shared_media / folder).iterdir())
        if file.suffix != ".json" and file.stat().st_size <= MAX_BYTES
    ]
    assert len(files) > 80
    pictures = [make_picture(5000 + number, 60 + number, 50) for number in range(6)]
    alone = [client.send(f"alone-{number}", "image", data) for number, data in enumerate(pictures)]
    await client.wait(*alone)
    sent: list[tuple[Path, Any]] = []
    beside: list[tuple[int, Any]] = []
    for number, file in enumerate(files):
        kind = KINDS[file.parent.name]
        sent.append((file, client.send(file.name, kind, file.read_bytes(), deadline_s=LIMIT_S)))
        if number % 4 == 0:
            # Another background than alone, which shows nowhere: encoded here and not found in the cache.
            which = number // 4 % len(pictures)
            good = client.send(
                f"good-{number}",
                "image",
                pictures[which],
                deadline_s=LIMIT_S,
                background=(number % 256, 1, 2),
            )
            beside.append((which, good))
    async with asyncio.timeout(LIMIT_S):
        for _, result in [*sent, *beside]:
            await result.ended.wait()
    outcomes = {file.name: result.error.message if result.error else None for file, result in sent}
    assert {name for name, said in outcomes.items() if said is not None} == REFUSED.keys() & outcomes.keys()
    for file, result in sent:
        if file.name in REFUSED:
            assert (result.error.status, result.error.code) == (400, "invalid_media"), file.name
            assert REFUSED[file.name] in result.error.message
            assert not LIBRARY_WORDS.search(result.error.message)
        else:
            assert result.complete, file.name
            assert np.isfinite(result.embedding).all(), file.name
    for which, good in beside:
        assert good.error is None
        np.testing.assert_allclose(good.embedding, alone[which].embedding, atol=2e-4)
    load = await client.settled()
    assert load["decoder_crashes"] == 0
    assert load["media_bytes"] == 0
