"""Finished encodings in the embedding cache, in one process and between two real encoders."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import threading
import uuid
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from transom.encoder.admission import Admission, Item
from transom.encoder.config import EncoderConfig
from transom.encoder.encoding import Chunk, Encoding
from transom.encoder.flights import Flights
from transom.encoder.kept import KeptEncodings
from transom.encoder.media import wire
from transom.encoder.spans import Timeline
from transom.errors import MediaError
from transom.messages import EncodeJob, MediaOptions, Modality
from transom.shared_cache.contract import Claim, Lease

Make = Callable[..., bytes]
KEY = "ab" * 16
SHM = Path("/dev/shm")


def encoding(modality: Modality = "video") -> Encoding:
    return Encoding(KEY, modality, keep_bytes=1 << 20, window_bytes=1 << 20)


async def complete(modality: Modality = "video") -> Encoding:
    source = encoding(modality)
    source.notes = ("a note",)
    rng = np.random.default_rng(0)
    for number in range(3):
        # The last chunk of a clip may have no rows.
        rows = rng.integers(0, 1 << 16, (5 * (2 - number), 64), np.uint16)
        await source.publish(Chunk([1, 2, 3 + number], rows, number, last=number == 2))
    return source


def arenas(scope: str) -> list[str]:
    return [name for name in os.listdir(SHM) if scope in name]


@pytest.fixture
async def scope() -> AsyncIterator[str]:
    """A name for arenas of a test's own; nothing of them may be left."""
    name = uuid.uuid4().hex
    yield name
    assert arenas(name) == []


async def opened(scope: str, size_bytes: int = 1 << 20) -> KeptEncodings:
    kept = KeptEncodings()
    await kept.open(f"{scope}/model", size_bytes, keep=False)
    return kept


async def test_what_one_kept_another_sends_again(scope: str) -> None:
    one, two = await opened(scope), await opened(scope)
    source = await complete()
    claim = await one.find(source)
    assert isinstance(claim, Claim)
    await one.keep(source, claim, "bfloat16")
    again = encoding()
    lease = await two.find(again)
    assert isinstance(lease, Lease)
    await two.replay(again, lease)
    assert again.complete
    assert (source.cache_hit, again.cache_hit) == (False, True)
    assert (again.notes, again.size) == (source.notes, source.size)
    assert (again.media_tokens, again.audio_tokens) == (source.media_tokens, source.audio_tokens)
    for was, now in zip(source.chunks, again.chunks, strict=True):
        assert was is not None
        assert now is not None
        assert (now.token_ids, now.audio_rows, now.last) == (was.token_ids, was.audio_rows, was.last)
        assert now.rows.shape == was.rows.shape
        assert bytes(now.raw) == bytes(was.raw)
    assert one.load() == two.load()
    assert one.load()["cache_entries"] == 1
    assert one.load()["cache_bytes"] > 0
    await one.close()
    await two.close()  # with chunks that are still in use


async def test_an_entry_is_made_even_if_the_last_reader_leaves_meanwhile(scope: str) -> None:
    kept = await opened(scope)
    source = Encoding(KEY, "image", keep_bytes=0, window_bytes=1 << 20)
    reader = source.join()
    await source.publish(Chunk([1], np.ones((1, 64), np.uint16), 0, last=True))
    claim = await kept.find(source)
    assert isinstance(claim, Claim)
    hold = threading.Event()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    busy = asyncio.create_task(asyncio.to_thread(hold.wait))
    await asyncio.sleep(0)
    keeping = asyncio.create_task(kept.keep(source, claim, "bfloat16"))
    await asyncio.sleep(0)
    while await source.next(reader) is not None:
        pass
    assert not source.complete  # it has forgotten what was delivered
    hold.set()
    await asyncio.gather(busy, keeping)
    assert isinstance(await kept.find(encoding("image")), Lease)
    await kept.close()


async def test_pictures_wait_for_another_encoder_and_streams_do_not(scope: str) -> None:
    one, two = await opened(scope), await opened(scope)
    source = await complete("image")
    claim = await one.find(source)
    assert isinstance(claim, Claim)
    assert await two.find(encoding("video")) is None
    assert await two.find(encoding("audio")) is None
    waiting = asyncio.create_task(two.find(encoding("image")))
    await one.keep(source, claim, "bfloat16")
    found = await waiting
    assert isinstance(found, Lease)
    found.release()
    await one.close()
    await two.close()


async def test_a_claim_that_is_given_up_goes_to_who_waits(scope: str) -> None:
    one, two = await opened(scope), await opened(scope)
    claim = await one.find(encoding("image"))
    assert isinstance(claim, Claim)
    waiting = asyncio.create_task(two.find(encoding("image")))
    claim.abandon()
    found = await waiting
    assert isinstance(found, Claim)
    found.abandon()
    await one.close()
    await two.close()


async def test_a_start_that_is_broken_off_leaves_nothing(scope: str) -> None:
    kept = KeptEncodings()
    start = asyncio.create_task(kept.open(f"{scope}/model", 16 << 20, keep=False))
    await asyncio.sleep(0)
    start.cancel()
    await asyncio.gather(start, return_exceptions=True)
    await kept.close()
    assert kept.load() == {}


async def test_no_capacity_keeps_nothing(scope: str) -> None:
    kept = await opened(scope, 0)
    source = await complete()
    claim = await kept.find(source)
    assert isinstance(claim, Claim)
    await kept.keep(source, claim, "bfloat16")
    assert kept.load()["cache_entries"] == 0
    assert isinstance(await kept.find(source), Claim)
    await kept.close()


def job_of(modality: Modality) -> EncodeJob:
    return EncodeJob(
        request_id="r", item_index=0, param="p", modality=modality, routing_key="k", url=None,
        options=MediaOptions(), deadline_s=0.0, gateway="g", reply_to="p",
    )  # fmt: skip


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Without it what is kept by a cycle stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def test_what_is_given_up_holds_no_lease(scope: str, no_collector: None) -> None:
    """Who follows an encoding and who makes it are cancelled, and take their chunks along."""
    kept = await opened(scope)
    source = await complete()
    claim = await kept.find(source)
    assert isinstance(claim, Claim)
    await kept.keep(source, claim, "bfloat16")
    tasks: set[asyncio.Task[None]] = set()

    def spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    # What is kept needs no pipeline.
    flights = Flights(kept, cast(Any, None), "bfloat16", Timeline(), spawn)
    job = job_of("video")
    admission = Admission(EncoderConfig(), Timeline())
    reached = asyncio.Semaphore(0)

    async def follow(item: Item, steps: int) -> None:
        try:
            found = await flights.look_up(KEY, job)
            assert found is not None
            found.window_bytes = 0  # its maker waits for its reader
            reader = found.join()
            try:
                for _ in range(steps):
                    chunk = await found.next(reader)
                    assert chunk is not None
                    assert len(chunk.raw) == chunk.rows.nbytes
                reached.release()
                await asyncio.Event().wait()
            finally:
                found.leave(reader)
                flights.stop_if_abandoned(found)
        finally:
            admission.drop(item)

    for steps in range(3):
        item = admission.admit(job, None)
        item.task = spawn(follow(item, steps))
        await reached.acquire()
        assert kept.load()["cache_leases"] > 0
        admission.cancel("r")
        del item
        while tasks:
            await asyncio.wait(tasks)
        await asyncio.sleep(0)
        assert kept.load()["cache_leases"] == 0, steps
    await kept.close()


class Failing:
    """Stands for the pipeline: an item whose second piece fails in a rank."""

    def __init__(self) -> None:
        self.rows: weakref.ref[np.ndarray] | None = None

    async def run(self, encoding: Encoding, file: wire.MemoryFile, options: MediaOptions) -> None:
        first, second = (asyncio.get_running_loop().create_future() for _ in range(2))
        first.set_result(np.zeros(5))
        second.set_exception(MediaError("broken"))
        waiting = [first, second]
        self.rows = weakref.ref(await waiting[0])
        await waiting[1]


async def test_a_failed_item_keeps_no_rows_alive(scope: str, no_collector: None) -> None:
    kept, failing = await opened(scope), Failing()
    tasks: list[asyncio.Task[None]] = []

    def spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        tasks.append(asyncio.create_task(work))
        return tasks[-1]

    flights = Flights(kept, cast(Any, failing), "bfloat16", Timeline(), spawn)
    file = wire.MemoryFile.of(b"a picture")
    source = flights.encode(KEY, job_of("image"), file)
    reader = source.join()
    with pytest.raises(MediaError, match="broken"):
        await source.next(reader)
    source.leave(reader)
    await asyncio.gather(*tasks)
    assert failing.rows is not None
    assert failing.rows() is None
    file.close()
    await kept.close()


@pytest.mark.process
async def test_two_encoders_share_what_they_made(
    scope: str,
    encoder_process: Callable[..., tuple[subprocess.Popen[str], dict[str, Any]]],
    new_client: Any,
    make_picture: Make,
    make_sound: Make,
    make_clip: Make,
) -> None:
    flags = ("--decode-workers", "1", "--embedding-cache-mb", "8")

    async def start() -> tuple[subprocess.Popen[str], dict[str, Any]]:
        return await asyncio.to_thread(encoder_process, *flags, scope=scope)

    (first, line_a), (second, line_b) = await asyncio.gather(start(), start())
    assert len(arenas(scope)) == 1
    media = {
        "image": make_picture(1),
        "audio": make_sound(1.5),
        "video": make_clip(30, hertz=300.0),
    }
    kept: list[str] = []
    async with new_client(line_a) as a, new_client(line_b) as b:
        for kind, data in media.items():
            made = a.send(f"a-{kind}", kind, data)
            await a.wait(made)
            while (await a.load())["cache_entries"] <= len(kept):
                pass  # it is kept after it was sent
            kept.append(kind)
            found = b.send(f"b-{kind}", kind, data)
            await b.wait(found)
            assert (made.done.cache_hit, found.done.cache_hit) == (False, True)
            assert found.embedding.tobytes() == made.embedding.tobytes()
            assert found.tokens == made.tokens
            assert found.done.audio_tokens == made.done.audio_tokens
            assert "decode" not in found.done.timings_ms
        load_a, load_b = await a.settled(), await b.settled()
        assert load_b["batches"] == 0
        assert (load_a["cache_hits"], load_a["cache_misses"]) == (0, 3)
        assert (load_b["cache_hits"], load_b["cache_misses"]) == (3, 0)
        assert load_a["cache_entries"] == load_b["cache_entries"] == 3
        assert load_a["cache_bytes"] == load_b["cache_bytes"] > 0
    # A killed encoder's entries outlive it, and its successor takes part in the arena again.
    first.send_signal(signal.SIGKILL)
    await asyncio.to_thread(first.wait)
    third, line_c = await start()
    async with new_client(line_c) as c:
        found = c.send("c", "image", media["image"])
        await c.wait(found)
        assert found.done.cache_hit
    for process in (second, third):
        assert len(arenas(scope)) == 1
        process.terminate()
        assert await asyncio.to_thread(process.wait) == 0
    assert arenas(scope) == []
