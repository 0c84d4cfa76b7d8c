"""Fetch workers as real processes: what they give, what is given up, their deaths, what they leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.encoder.server.origin import BODY, LIMITS, Origin, memory_files, running, serving
from transom.encoder.fetch_pool import FetchPool
from transom.errors import ConfigError, MediaError, TransomError

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


@pytest.fixture
async def origin() -> AsyncIterator[Origin]:
    async with serving() as own:
        yield own


async def body(pool: FetchPool, url: str) -> bytes:
    download = await pool.fetch(url)
    assert download is not None
    try:
        return bytes(download.file.view)
    finally:
        download.file.close()


def owner_of(ports: tuple[int, int], pids: list[int]) -> int:
    """The process of a pool that has the client's end of a connection."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]]
    # Both ends tell: other processes may have connections from the same port to other ones.
    inode = next(line[9] for line in lines if tuple(int(end.split(":")[1], 16) for end in line[1:3]) == ports)
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(link) == f"socket:[{inode}]":
                    return pid
    raise AssertionError(f"nobody of {pids} has the connection of {ports}")


async def test_bytes_come_in_memory_that_nobody_can_change(origin: Origin) -> None:
    async with running() as pool:
        before = await memory_files()
        download = await pool.fetch(f"{origin.base}/a.png")
        assert download is not None
        assert bytes(download.file.view) == BODY
        seals = fcntl.fcntl(download.file.fd, fcntl.F_GET_SEALS)
        assert seals & (fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        with pytest.raises(PermissionError):
            os.pwrite(download.file.fd, b"x", 0)
        assert await pool.fetch(f"{origin.base}/a.png", download.validator) is None  # unchanged
        download.file.close()
        del download
        assert await body(pool, f"{origin.base}/empty") == b""
        assert await memory_files() == before


async def test_refusals_say_what_the_fetcher_says(origin: Origin) -> None:
    async with running(max_bytes=1000) as pool:
        for url, said in (
            (f"{origin.base}/a.png", "limit 1000"),
            ("ftp://example.com/a", "scheme 'ftp' is not allowed"),
            ("http://example.com/" + "a" * 9000, "URL of 9019 characters, limit 8192"),
            ("file:///etc/passwd", "file: URLs are not allowed here"),
        ):
            with pytest.raises(MediaError, match=said):
                await pool.fetch(url)
        assert pool.running == 0
        assert pool.crashes == 0


async def test_a_file_is_read_in_the_worker(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(BODY)
    async with running(folders=(str(tmp_path),)) as pool:
        assert await body(pool, f"file://{tmp_path}/a.bin") == BODY


@pytest.mark.parametrize("changes", [{"dns_servers": ("nonsense",)}, {"folders": ("/no/such/folder",)}])
async def test_settings_that_cannot_be_used_stop_the_start(changes: dict[str, Any]) -> None:
    pool = FetchPool(dataclasses.replace(LIMITS, **changes), workers=1)
    with pytest.raises(ConfigError, match=r"nonsense|/no/such/folder"):
        await pool.start()
    await pool.close()


async def test_what_is_given_up_ends_at_the_server_too(origin: Origin) -> None:
    async with running() as pool:
        before = await memory_files()
        tasks = [asyncio.create_task(pool.fetch(f"{origin.base}/slow/{number}")) for number in range(8)]
        await origin.until(lambda: len(origin.hits) == 8)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert pool.running == 0
        await origin.until(lambda: len(origin.gone) == 8)
        assert await body(pool, f"{origin.base}/a.png") == BODY
        assert await memory_files() == before


async def test_what_comes_when_it_is_given_up_is_let_go(origin: Origin) -> None:
    async with running() as pool:
        before = await memory_files()
        taken = 0
        for wait in range(12):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.003 * wait):
                    taken += await body(pool, f"{origin.base}/a.png") == BODY
        assert taken < 12
        assert await body(pool, f"{origin.base}/a.png") == BODY
        assert await memory_files() == before


async def test_a_killed_worker_costs_no_item(origin: Origin) -> None:
    async with running() as pool:
        before = await memory_files()
        tasks = [asyncio.create_task(body(pool, f"{origin.base}/slow/{number}")) for number in range(4)]
        await origin.until(lambda: len(origin.hits) == 4)
        os.kill(pool.pids[0], signal.SIGKILL)
        await origin.until(lambda: sum(origin.hits.values()) == 8)
        origin.release.set()
        assert await asyncio.gather(*tasks) == [BODY] * 4
        assert pool.crashes == 1
        assert await body(pool, f"{origin.base}/a.png") == BODY
        async with asyncio.timeout(30):
            while await memory_files() > before or len(pool.pids) > 1:
                pass


@pytest.mark.parametrize(
    ("number", "kind", "said", "shared"),
    [
        (signal.SIGSEGV, MediaError, r"the download crashed on this item \(signal SIGSEGV\)", 1),
        (signal.SIGKILL, TransomError, r"downloaded this item were ended \(signal SIGKILL\)", 2),
    ],
)
async def test_a_server_that_ends_workers_costs_its_item_alone(
    origin: Origin, number: signal.Signals, kind: type[TransomError], said: str, shared: int
) -> None:
    async with running() as pool:
        origin.killer = lambda ports: os.kill(owner_of(ports, pool.pids), number)
        others = [asyncio.create_task(body(pool, f"{origin.base}/slow/{one}")) for one in range(2)]
        await origin.until(lambda: len(origin.hits) == 2)
        with pytest.raises(kind, match=said) as caught:
            await pool.fetch(f"{origin.base}/poison")
        assert caught.value.status == (400 if kind is MediaError else 500)
        assert origin.hits["/poison"] == shared + 1
        origin.release.set()
        assert await asyncio.gather(*others) == [BODY] * 2
        assert pool.crashes == shared


async def test_a_worker_that_hangs_is_ended(origin: Origin) -> None:
    async with running(grace_s=0.2, total_s=0.3) as pool:
        os.kill(pool.pids[0], signal.SIGSTOP)
        with pytest.raises(MediaError, match=r"took over 0\.3 s, the limit"):
            await pool.fetch(f"{origin.base}/a.png")
    async with running() as pool:
        assert await body(pool, f"{origin.base}/a.png") == BODY


async def test_suspects_are_downloaded_again_all_at_once(origin: Origin) -> None:
    """Slow innocents neither wait for each other nor begin anew more than twice; the killer is named."""
    slow = [f"/slow/{one}" for one in range(40)]
    async with running() as pool:
        before = await memory_files()
        origin.killer = lambda ports: os.kill(owner_of(ports, pool.pids), signal.SIGSEGV)
        innocent = [asyncio.create_task(body(pool, origin.base + path)) for path in slow]
        await origin.until(lambda: len(origin.hits) == len(slow))
        with pytest.raises(MediaError, match="the download crashed on this item"):
            await pool.fetch(f"{origin.base}/poison")
        assert origin.hits["/poison"] == 3  # in the crowd, in a group, alone
        # All others are asked for again at once, before the server has answered one of them.
        await origin.until(lambda: min(origin.hits[path] for path in slow) == 2)
        assert sum(origin.hits[path] > 2 for path in slow) <= 5  # of the killer's group
        assert pool.running == len(slow)
        origin.release.set()
        assert await asyncio.gather(*innocent) == [BODY] * len(slow)
        assert max(origin.hits[path] for path in slow) == 3
        assert await body(pool, f"{origin.base}/a.png") == BODY
        async with asyncio.timeout(30):
            while await memory_files() > before or len(pool.pids) > 1:
                pass


async def test_several_killers_in_one_crowd_are_all_found(origin: Origin) -> None:
    async with running() as pool:
        origin.killer = lambda ports: os.kill(owner_of(ports, pool.pids), signal.SIGSEGV)
        innocent = [asyncio.create_task(body(pool, f"{origin.base}/slow/{one}")) for one in range(12)]
        await origin.until(lambda: len(origin.hits) == 12)
        killers = [asyncio.create_task(pool.fetch(f"{origin.base}/poison/{one}")) for one in range(4)]
        errors = await asyncio.gather(*killers, return_exceptions=True)
        assert {type(error) for error in errors} == {MediaError}
        origin.release.set()
        assert await asyncio.gather(*innocent) == [BODY] * 12


async def test_nobody_is_blamed_for_what_was_given_up(origin: Origin) -> None:
    """A killer whose client goes away ends a process in which one innocent is left."""
    async with running() as pool:
        innocent = [asyncio.create_task(body(pool, f"{origin.base}/slow/{one}")) for one in range(17)]
        await origin.until(lambda: len(origin.hits) == 17)
        os.kill(pool.pids[0], signal.SIGSEGV)  # 17 suspects: some processes have two or more of them
        await origin.until(lambda: sum(origin.hits.values()) == 34)
        trials = pool.pids[:]
        for task in innocent[1:]:
            task.cancel()
        await asyncio.gather(*innocent[1:], return_exceptions=True)
        for pid in trials:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSEGV)
        await origin.until(lambda: origin.hits["/slow/0"] == 3)
        origin.release.set()
        assert await innocent[0] == BODY
