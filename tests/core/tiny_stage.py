"""A real stage without a model, run as a process by the tests of the stage frame and the supervisor."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from transom.config import StageConfig, add_flags, config_from_args, setting
from transom.errors import ConfigError
from transom.messages import Abort
from transom.stage import Stage, run_stage
from transom.transport import Received, Transport


@dataclass(frozen=True, kw_only=True)
class TinyConfig(StageConfig):
    """Settings of the tiny stage."""

    refuse: str = setting("", "refuse to start with this message")
    crash_file: str = setting("", "crash while starting as long as this file exists")
    work_s: float = setting(0.0, "how long the work lasts that an abort starts, if none ends it", ge=0)


class TinyStage(Stage):
    """Echoes aborts to their sender; `reason` may ask it to crash, to hang, to work on or to end its work."""

    name = "tiny"

    def __init__(self, config: TinyConfig) -> None:
        self._config = config
        self._crash_file = Path(config.crash_file) if config.crash_file else None
        self._transport: Transport | None = None
        self._work: set[asyncio.Task[None]] = set()
        self._enough = asyncio.Event()

    async def start(self, transport: Transport) -> None:
        if self._config.refuse:
            raise ConfigError(self._config.refuse)
        if self._crash_file is not None and self._crash_file.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        self._transport = transport

    async def handle(self, received: Received) -> None:
        assert isinstance(received.message, Abort)
        assert self._transport is not None
        if received.message.reason == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if received.message.reason == "hang":
            sys.stderr.write("hangs\n")
            threading.Event().wait()
        if received.message.reason == "enough":
            self._enough.set()
        elif received.message.reason == "work":
            task = asyncio.create_task(self._finish(received))
            self._work.add(task)
            task.add_done_callback(self._work.discard)
        else:
            self._transport.send(received.peer, received.message)

    async def _finish(self, received: Received) -> None:
        assert self._transport is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.work_s):
                await self._enough.wait()
        self._transport.send(received.peer, received.message)

    def peer_lost(self, address: str) -> None:
        sys.stderr.write(f"lost {address}\n")

    def load(self) -> dict[str, float]:
        return {"work": float(len(self._work))}

    async def drain(self) -> None:
        if self._work:
            await asyncio.wait(self._work)

    async def close(self) -> None:
        sys.stderr.write("closed\n")


def main() -> int:
    parser = argparse.ArgumentParser()
    add_flags(parser, TinyConfig)
    config = config_from_args(TinyConfig, "encoder", parser.parse_args())
    return run_stage(lambda: TinyStage(config), config, name="tiny")


if __name__ == "__main__":
    sys.exit(main())
