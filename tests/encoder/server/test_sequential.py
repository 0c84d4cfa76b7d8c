"""The benchmark's baseline gives the embeddings of the encoder that it is compared with."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

Make = Callable[..., bytes]
pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def sequential() -> Iterator[dict[str, Any]]:
    command = [sys.executable, "-m", "transom.bench.sequential_encoder", "--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
        process.terminate()


async def test_the_sequential_encoder_agrees_with_ours(
    sequential: dict[str, Any], client: Any, new_client: Any, make_picture: Make, make_sound: Make
) -> None:
    # A picture of the size that the model wants: the two resize in different ways.
    items = {"image": make_picture(3, 128, 128), "audio": make_sound(3.0)}
    async with new_client(sequential) as baseline:
        for kind, data in items.items():
            theirs, ours = baseline.send(f"base-{kind}", kind, data), client.send(f"own-{kind}", kind, data)
            await baseline.wait(theirs)
            await client.wait(ours)
            assert theirs.error is None
            assert theirs.tokens == ours.tokens
            np.testing.assert_allclose(theirs.embedding, ours.embedding, atol=2e-4)
            assert {"queue", "decode", "preprocess", "forward", "total"} <= set(theirs.done.timings_ms)


async def test_what_it_cannot_take_it_refuses(sequential: dict[str, Any], new_client: Any) -> None:
    async with new_client(sequential) as baseline:
        broken, clip = baseline.send("a", "image", b"no picture"), baseline.send("b", "video", b"clip")
        await baseline.wait(broken, clip)
        assert "cannot identify image" in broken.error.message
        assert "pictures and sound" in clip.error.message
