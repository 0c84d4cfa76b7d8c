"""An encoding that several requests follow, and its bounds."""

from __future__ import annotations

import asyncio
import gc
import weakref

import numpy as np
import pytest

from tests.patience import PATIENCE_S
from transom.encoder.encoding import Chunk, Encoding
from transom.encoder.gate import CostGate
from transom.errors import MediaError


def chunk(number: int, last: bool = False, rows: int = 4) -> Chunk:
    return Chunk([number], np.full((rows, 8), number, np.float32), 0, last)


def encoding(key: str = "k", keep: int = 10**6, window: int = 10**6) -> Encoding:
    return Encoding(key, "image", keep_bytes=keep, window_bytes=window)


async def read_all(source: Encoding) -> list[int]:
    reader = source.join()
    numbers = []
    while (part := await source.next(reader)) is not None:
        numbers.append(part.token_ids[0])
    source.leave(reader)
    return numbers


async def test_every_reader_gets_every_chunk_in_order_whenever_it_joins() -> None:
    source = encoding()
    early = [asyncio.create_task(read_all(source)) for _ in range(3)]
    for number in range(5):
        await source.publish(chunk(number, last=number == 4))
        await asyncio.sleep(0)
    late = await read_all(source)
    assert [*await asyncio.gather(*early), late] == [[0, 1, 2, 3, 4]] * 4
    assert source.complete
    assert source.media_tokens == 20


async def test_an_error_reaches_readers_after_the_chunks_before_it() -> None:
    source = encoding()
    reader = source.join()
    await source.publish(chunk(0))
    source.fail(MediaError("broken"))
    assert (await source.next(reader)) is not None
    with pytest.raises(MediaError, match="broken"):
        await source.next(reader)
    assert not source.joinable


async def test_who_leaves_is_told_from_who_is_at_the_same_place() -> None:
    size = chunk(0).size_bytes
    source = encoding(window=size)
    first, second = source.join(), source.join()
    source.leave(second)
    producer = asyncio.create_task(_produce(source, 4))
    # If the other one were thought to have left, the producer would wait for who is gone.
    async with asyncio.timeout(PATIENCE_S):
        for _ in range(4):
            assert await source.next(first) is not None
    assert await source.next(first) is None
    source.leave(first)
    assert source.abandoned
    await producer


async def _produce(source: Encoding, count: int) -> None:
    for number in range(count):
        await source.publish(chunk(number, last=number == count - 1))


async def test_an_error_keeps_nothing_alive() -> None:
    """Neither with who failed nor with who was told; the collector of cycles is not needed."""
    gc.collect()
    gc.disable()
    try:
        source = encoding()
        first = chunk(0)
        rows = weakref.ref(first.rows)
        await source.publish(first)
        del first

        async def make(source: Encoding) -> None:
            try:
                raise MediaError("broken")
            except MediaError as error:
                source.fail(error)

        async def follow(source: Encoding) -> str:
            reader = source.join()
            followed.set()
            try:
                await source.next(reader)
                await source.next(reader)
            except MediaError as error:
                return error.message
            return ""

        followed = asyncio.Event()
        follower = asyncio.create_task(follow(source))
        await followed.wait()
        await asyncio.create_task(make(source))
        assert await follower == "broken"
        del source, follower
        await asyncio.sleep(0)
        assert rows() is None
    finally:
        gc.enable()


async def test_the_producer_waits_for_the_slowest_reader() -> None:
    size = chunk(0).size_bytes
    source = encoding(window=2 * size)
    slow, fast = source.join(), source.join()

    async def produce() -> None:
        for number in range(6):
            await source.publish(chunk(number, last=number == 5))

    producer = asyncio.create_task(produce())
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(source.chunks) == 3
    assert await source.next(fast) is not None
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(source.chunks) == 3
    source.leave(slow)
    for number in range(1, 6):
        part = await source.next(fast)
        assert part is not None
        assert part.token_ids == [number]
    assert await source.next(fast) is None
    await producer


async def test_what_is_too_large_to_keep_forgets_what_was_delivered() -> None:
    size = chunk(0).size_bytes
    source = encoding(keep=2 * size)
    reader = source.join()
    for number in range(5):
        await source.publish(chunk(number))
        part = await source.next(reader)
        assert part is not None
        assert part.token_ids == [number]
    assert sum(part is not None for part in source.chunks) <= 2
    assert not source.joinable
    await source.publish(chunk(5, last=True))
    assert not source.complete


async def test_the_cost_gate_is_fair_and_bounded() -> None:
    gate = CostGate(10)
    order: list[str] = []

    async def hold(name: str, cost: int, release: asyncio.Event) -> None:
        async with gate.hold(cost):
            order.append(name)
            await release.wait()

    events = [asyncio.Event() for _ in range(4)]
    tasks = [
        asyncio.create_task(hold(name, cost, event))
        for (name, cost), event in zip([("a", 6), ("big", 50), ("b", 3), ("c", 3)], events, strict=True)
    ]
    for _ in range(5):
        await asyncio.sleep(0)
    assert order == ["a"]  # b would fit, but must not overtake the big one for ever
    tasks[1].cancel()
    events[0].set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert order == ["a", "b", "c"]
    for event in events:
        event.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with gate.hold(50):
        assert order == ["a", "b", "c"]
