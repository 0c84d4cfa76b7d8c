"""Decode workers as real processes: results, refusals, crashes, silence, and what they leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import av
import msgspec
import numpy as np
import pytest
from PIL import Image

from tests.patience import PATIENCE_S
from transom.encoder.decode_pool import DecodePool, Decoding, Worker, WorkerEndedError
from transom.encoder.media import wire
from transom.errors import MediaError

pytestmark = pytest.mark.process

IMAGE = wire.ImageJob(
    factor=32, min_pixels=9216, max_pixels=2**20, max_aspect_ratio=200, max_image_pixels=10**8,
    full_decode_pixels=10**8, max_tokens=10**6, background=(255, 255, 255), frame_index=0,
)  # fmt: skip
PLAN = wire.VideoJob(
    factor=32, min_pixels=9216, max_pixels=16384, total_max_pixels=2**24, max_aspect_ratio=200,
    max_image_pixels=10**8, full_decode_pixels=10**8, max_tokens=10**6, fps=30, min_frames=8,
    max_frames=2000, temporal_patch=2, max_video_s=3600, threads=1, sound=None,
)  # fmt: skip
# All 300 frames of the clip below, found by their numbers.
VIDEO = wire.SliceJob(
    clip=1, first=0, goals=tuple(range(300)), keys=(0,) * 300, begin=0, stop=300, end=None,
    height=240, width=320, temporal_patch=2, timed=False, can_jump=False, frame_ticks=1, threads=1,
)  # fmt: skip


def picture_file() -> wire.MemoryFile:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 48), (10, 20, 30)).save(buffer, "PNG")
    return wire.MemoryFile.of(buffer.getvalue())


@pytest.fixture(scope="module")
def clip_file() -> wire.MemoryFile:
    """A clip whose decoding takes a while: 300 frames, each of them sampled."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as output:
        stream = output.add_stream("mpeg4", rate=30)
        stream.width, stream.height, stream.pix_fmt = 320, 240, "yuv420p"
        for number in range(300):
            pixels = np.full((240, 320, 3), number % 250, np.uint8)
            output.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        output.mux(stream.encode(None))
    return wire.MemoryFile.of(buffer.getvalue())


PICTURE = [wire.Measured, wire.Picture]  # what comes of one


@contextlib.asynccontextmanager
async def running(
    workers: int = 2, timeout_s: float = PATIENCE_S, memory_mb: int = 2048
) -> AsyncIterator[DecodePool]:
    pool = DecodePool(workers=workers, timeout_s=timeout_s, memory_mb=memory_mb)
    await pool.start()
    try:
        yield pool
    finally:
        pids = pool.pids
        await pool.close()
        assert not set(map(str, pids)) & set(os.listdir("/proc"))


async def collect(
    pool: DecodePool,
    job: wire.Job,
    file: wire.MemoryFile,
    after_first: Callable[[], Awaitable[None]] | None = None,
) -> list[wire.Reply]:
    replies: list[wire.Reply] = []
    async with pool.decode(job, file) as parts:
        async for reply, fd in parts:
            if fd is not None:
                os.close(fd)
                if after_first is not None:
                    await after_first()
                    after_first = None
            replies.append(reply)
    return replies


async def take(parts: Decoding) -> wire.Reply:
    """Take one part and let go of its data."""
    reply, fd = await anext(parts)
    if fd is not None:
        os.close(fd)
    return reply


def kinds(replies: list[wire.Reply]) -> list[type[wire.Reply]]:
    return [type(reply) for reply in replies]


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_pictures_come_back_as_they_are() -> None:
    file = picture_file()
    async with running() as pool, pool.decode(IMAGE, file) as parts:
        size, nothing = await anext(parts)
        assert isinstance(size, wire.Measured)
        assert (size.size.pixels, nothing) == (48 * 64, None)
        async for reply, fd in parts:
            assert isinstance(reply, wire.Picture)
            pixels = wire.map_array(fd, np.uint8, (reply.height, reply.width, 3))
            assert pixels.shape == (48, 64, 3)
            assert (pixels == (10, 20, 30)).all()


async def test_good_and_bad_items_side_by_side(clip_file: wire.MemoryFile) -> None:
    garbage, good = wire.MemoryFile.of(b"garbage" * 100), picture_file()
    async with running(workers=3) as pool:
        before = open_descriptors()
        jobs = [collect(pool, IMAGE, garbage if number % 2 else good) for number in range(60)]
        jobs += [collect(pool, VIDEO, clip_file), collect(pool, PLAN, garbage)]
        results = await asyncio.gather(*jobs, return_exceptions=True)
        assert all(isinstance(result, list) for result in results[0:60:2])
        assert all(isinstance(result, MediaError) for result in results[1:60:2])
        assert isinstance(results[60], list)
        assert sum(isinstance(reply, wire.FrameUnit) for reply in results[60]) == 150
        assert isinstance(results[61], MediaError)
        assert pool.crashes == 0
        assert open_descriptors() == before


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS])
async def test_a_crash_fails_its_item_and_the_pool_recovers(
    clip_file: wire.MemoryFile, number: signal.Signals
) -> None:
    async with running(workers=1) as pool:

        async def crash() -> None:
            os.kill(pool.pids[0], number)

        with pytest.raises(MediaError, match=f"the decoder crashed on this item .{number.name}"):
            await collect(pool, VIDEO, clip_file, crash)
        assert kinds(await collect(pool, IMAGE, picture_file())) == PICTURE
        assert pool.crashes == 1


async def test_a_worker_killed_from_outside_before_it_answers_is_replaced_once(
    clip_file: wire.MemoryFile,
) -> None:
    async with running(workers=1) as pool:
        victim = pool.pids[0]
        os.kill(victim, signal.SIGSTOP)  # so that it can't answer before it dies
        async with pool.decode(IMAGE, picture_file()) as parts:
            os.kill(victim, signal.SIGKILL)
            replies = [await take(parts), await take(parts)]
        assert kinds(replies) == PICTURE
        assert pool.crashes == 1


async def test_a_worker_killed_from_outside_in_the_middle_fails_its_item(clip_file: wire.MemoryFile) -> None:
    async with running(workers=1) as pool:

        async def kill() -> None:
            os.kill(pool.pids[0], signal.SIGKILL)

        with pytest.raises(WorkerEndedError, match="ended from outside") as caught:
            await collect(pool, VIDEO, clip_file, kill)
        assert caught.value.status == 500
        assert kinds(await collect(pool, IMAGE, picture_file())) == PICTURE


async def test_a_silent_decoder_is_killed(clip_file: wire.MemoryFile) -> None:
    async with running(workers=1, timeout_s=1.0) as pool:

        async def stop() -> None:
            os.kill(pool.pids[0], signal.SIGSTOP)

        with pytest.raises(MediaError, match="no progress for 1 s, the limit"):
            await collect(pool, VIDEO, clip_file, stop)
    async with running(workers=1) as pool:
        assert kinds(await collect(pool, IMAGE, picture_file())) == PICTURE


async def test_memory_bombs_hit_the_limit_of_the_worker() -> None:
    buffer = io.BytesIO()
    Image.new("L", (9000, 9000)).save(buffer, "PNG")
    async with running(workers=1, memory_mb=400) as pool:
        with pytest.raises(MediaError, match="memory"):
            await collect(pool, IMAGE, wire.MemoryFile.of(buffer.getvalue()))
        assert kinds(await collect(pool, IMAGE, picture_file())) == PICTURE
        assert pool.crashes == 0


async def test_a_job_given_up_frees_its_worker(clip_file: wire.MemoryFile) -> None:
    file = picture_file()
    async with running(workers=1) as pool:
        before = open_descriptors()
        for _ in range(3):
            async with pool.decode(VIDEO, clip_file) as parts:
                _, fd = await anext(parts)
                assert fd is not None
                os.close(fd)
        assert kinds(await collect(pool, IMAGE, file)) == PICTURE
        assert pool.crashes == 0
        assert open_descriptors() == before


async def test_long_jobs_leave_a_worker_to_pictures(clip_file: wire.MemoryFile) -> None:
    async with running(workers=2) as pool, pool.decode(VIDEO, clip_file) as first:
        await take(first)
        second = asyncio.create_task(collect(pool, VIDEO, clip_file))
        await asyncio.sleep(0)
        assert kinds(await collect(pool, IMAGE, picture_file())) == PICTURE
        assert not second.done()
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)


async def test_waiting_for_a_worker_can_be_given_up(clip_file: wire.MemoryFile) -> None:
    async with running(workers=1) as pool:
        async with pool.decode(VIDEO, clip_file) as parts:
            await take(parts)
            waiting = [asyncio.create_task(collect(pool, IMAGE, picture_file())) for _ in range(4)]
            await asyncio.sleep(0)
            for task in waiting[::2]:
                task.cancel()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [isinstance(result, list) for result in results] == [False, True, False, True]


async def test_a_worker_that_is_insisted_on_is_waited_for_and_replaced_when_it_dies(
    clip_file: wire.MemoryFile,
) -> None:
    async with running(workers=3) as pool:
        async with pool.decode(VIDEO, clip_file) as first:
            await take(first)
            own = first.worker
            assert own is not None
            waiting = asyncio.create_task(take_from(pool, clip_file, own))
            for _ in range(20):
                await asyncio.sleep(0)
            assert kinds(await collect(pool, IMAGE, picture_file())) == PICTURE  # others are free meanwhile
            assert not waiting.done()
        assert await waiting is own
        async with pool.decode(VIDEO, clip_file) as again:
            await take(again)
            assert again.worker is not None
            waiting = asyncio.create_task(take_from(pool, clip_file, again.worker))
            await asyncio.sleep(0)
            again.worker.process.kill()
            with pytest.raises(WorkerEndedError):
                await exhaust(again)
        assert await waiting is not again.worker


async def exhaust(parts: Decoding) -> None:
    async for _, fd in parts:
        if fd is not None:
            os.close(fd)


async def take_from(pool: DecodePool, file: wire.MemoryFile, near: Worker) -> Worker | None:
    async with pool.decode(VIDEO, file, near=near, insist=True) as parts:
        await take(parts)
    return parts.worker


async def test_a_worker_forgets_clips_that_are_over(clip_file: wire.MemoryFile) -> None:
    def mappings(pid: int) -> int:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="ascii").splitlines()
        return sum("memfd:transom-media" in line for line in lines)

    async with running(workers=1) as pool:
        pid = pool.pids[0]
        for clip in range(3):
            await collect(pool, msgspec.structs.replace(VIDEO, clip=clip, stop=4), clip_file)
        assert mappings(pid) == 3
        for clip in range(3):
            pool.forget(clip)
        await collect(pool, IMAGE, picture_file())
        await collect(pool, IMAGE, picture_file())
        assert mappings(pid) <= 1  # the last picture's
