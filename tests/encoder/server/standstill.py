"""Stops an encoder's decode workers in the middle of a clip, however slow the test itself is."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import select
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE_S


def children(pid: int, module: str = "") -> list[int]:
    """Process ids of an encoder's children that run a module."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                if module.encode() in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
    return found


def decoders(line: dict[str, Any]) -> list[int]:
    """The decode workers of the encoder with this readiness line."""
    return children(line["pid"], "encoder.media.worker")


async def stopped_in(
    client: Any, send: Callable[[int], Any], *beside: Callable[[int], Any]
) -> tuple[Any, list[int]]:
    """Return the result of a clip whose first embeddings have come, and the workers that stand still.

    `send` sends the clip, `beside` other items, which end before. Between two jobs of a clip no worker is
    busy: then they are stopped anew. Should the clip be decoded to its end before the workers stand still,
    another one is sent, with a number of its own.
    """
    for number in range(100):
        result, others = send(number), [one(number) for one in beside]
        async with asyncio.timeout(PATIENCE_S):
            await result.first.wait()
        await client.wait(*others)
        assert [one.error for one in others] == [None] * len(others)
        while not result.ended.is_set():
            workers = decoders(client.line)
            for pid in workers:
                os.kill(pid, signal.SIGSTOP)
            # The second answer knows what a worker had sent before it was stopped.
            if all([(await client.load())["decoders_busy"] for _ in range(2)]) and not result.ended.is_set():
                return result, workers
            go_on(workers)
            await client.load()
    raise AssertionError("every clip was decoded before its first embeddings had come here")


def go_on(workers: list[int]) -> None:
    """Let workers go on, but for those that stood still for so long that they were replaced."""
    for pid in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


async def crash(workers: list[int]) -> None:
    """End workers that stand still by a segmentation fault; return when they are dead.

    One that is dying still takes a job, and the crash would be that job's.
    """
    descriptors = [os.pidfd_open(pid) for pid in workers]
    try:
        for pid in workers:
            os.kill(pid, signal.SIGSEGV)
        go_on(workers)
        for descriptor in descriptors:
            ready, _, _ = await asyncio.to_thread(select.select, [descriptor], [], [], PATIENCE_S)
            assert ready
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


async def until_replaced(client: Any, workers: Iterable[int], send: Callable[[int], Any]) -> None:
    """Return when an encoder has buried workers that were killed: idle ones, once it wants to use them.

    `send` sends a picture, another one for each number.
    """
    async with asyncio.timeout(PATIENCE_S):
        for turn in itertools.count():
            if not set(workers) & set(children(client.line["pid"])):
                return
            await client.wait(*(send(4 * turn + which) for which in range(4)))


async def until_dropped(client: Any) -> None:
    """Return when the encoder has no item any more, whether or not a worker still has a job."""
    async with asyncio.timeout(PATIENCE_S):
        while (await client.load())["items"]:
            pass
