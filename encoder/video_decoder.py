"""Checks at an encoder's start that the decoder it is to use for videos can be loaded.

Encoder process (front), which loads neither torch nor torchcodec: another process tries.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

from transom.errors import ConfigError

_PROBE_S = 120.0


async def check_video_decoder(name: str) -> None:
    """Raise ConfigError unless the decoder of the setting `video_decoder` can be loaded."""
    if name == "pyav":
        return
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "import torchcodec.decoders", stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(_PROBE_S):
            _, said = await process.communicate()
    except TimeoutError:
        raise ConfigError(f"video_decoder torchcodec: not loaded within {_PROBE_S:g} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    if process.returncode:
        reason = next(
            (line for line in said.decode("utf-8", "replace").splitlines() if "Error: " in line), "no reason"
        )
        raise ConfigError(
            f"video_decoder torchcodec can't be loaded ({reason[:200]}); it needs the extra `video`"
            " and FFmpeg's shared libraries"
        )
