"""The decoder for videos that a setting names: refused at the start where it can't be loaded, else used."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.encoder.media.test_torchcodec import is_there
from transom.encoder.video_decoder import check_video_decoder
from transom.errors import ConfigError

pytestmark = pytest.mark.process


async def test_one_that_can_not_be_loaded_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "torchcodec"
    package.mkdir()
    (package / "__init__.py").write_text("raise OSError('libavutil.so.60: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(ConfigError, match=re.escape("libavutil.so.60: cannot open")):
        await check_video_decoder("torchcodec")
    await check_video_decoder("pyav")


async def test_clips_through_torchcodec_give_the_same_embeddings(
    client: Any, encoder_process: Callable[..., Any], new_client: Any, make_clip: Callable[..., bytes]
) -> None:
    if not is_there():
        pytest.skip("torchcodec is not installed, or FFmpeg's shared libraries are not")
    _, line = await asyncio.to_thread(encoder_process, "--video-decoder", "torchcodec")
    data = make_clip(120)
    async with new_client(line) as other:
        wanted, got = client.send("pyav", "video", data), other.send("torchcodec", "video", data)
        await client.wait(wanted)
        await other.wait(got)
    assert got.error is None
    assert got.tokens == wanted.tokens
    assert got.done.content_key != wanted.done.content_key
    np.testing.assert_allclose(got.embedding, wanted.embedding, atol=1e-4)
