"""One download for all who ask for a URL at once, and what each of them may do to the others."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest

from tests.encoder.server.origin import BODY, Origin, memory_files, running, serving, until_let_go
from tests.patience import PATIENCE_S
from transom.encoder.downloads import Downloads
from transom.encoder.fetch_pool import FetchPool
from transom.encoder.known_urls import Validator
from transom.encoder.metrics import EncoderMetrics
from transom.errors import CancelledRequestError, MediaError
from transom.media_key import bytes_digest

pytestmark = pytest.mark.process


@pytest.fixture
async def origin() -> AsyncIterator[Origin]:
    async with serving() as own:
        yield own


class Asker:
    """Asks through one Downloads, as items do."""

    def __init__(self, pool: FetchPool) -> None:
        self.metrics = EncoderMetrics()
        self.downloads = Downloads(pool, self.metrics, asyncio.create_task)

    async def ask(self, url: str, known: Validator | None = None) -> bytes | None:
        async with self.downloads.get(url, known) as content:
            if content is None:
                return None
            data = bytes(content.file.view)
            assert content.digest == bytes_digest(data)
            assert os.fstat(content.file.fd).st_size == len(data)
            return data

    def start(self, url: str, known: Validator | None = None) -> asyncio.Task[bytes | None]:
        return asyncio.create_task(self.ask(url, known))

    def count(self, outcome: str) -> float:
        return next(
            sample.value
            for sample in self.metrics.fetches.labels(outcome).collect()[0].samples
            if sample.name.endswith("_total")
        )


async def test_all_who_ask_at_once_share_one_download(origin: Origin) -> None:
    async with running() as pool:
        before = await memory_files()
        asker, url = Asker(pool), f"{origin.base}/slow/a"
        tasks = [asker.start(url) for _ in range(20)]
        await origin.until(lambda: origin.hits["/slow/a"] == 1)
        origin.release.set()
        assert await asyncio.gather(*tasks) == [BODY] * 20
        assert origin.hits == {"/slow/a": 1}
        assert (asker.count("downloaded"), asker.count("joined")) == (1, 19)
        # What has ended is nothing to join: who comes later asks the server.
        assert await asker.ask(url) == BODY
        assert origin.hits == {"/slow/a": 2}
        await until_let_go(before)


async def test_other_urls_spellings_and_conditions_are_downloads_of_their_own(origin: Origin) -> None:
    async with running() as pool:
        asker, url = Asker(pool), f"{origin.base}/slow/a"
        download = await pool.fetch(f"{origin.base}/a")
        assert download is not None
        tag = Validator.of(url, {"ETag": '"one"'})
        asks = [(url, None), (f"{url}?b", None), (f"{url}#c", None), (url, tag)]
        tasks = [asker.start(*ask) for ask in asks]
        await origin.until(lambda: origin.hits["/slow/a"] == 4)
        # Refused for its user name, though the same server is being asked for the same place.
        with pytest.raises(MediaError, match="user name"):
            await asker.ask(url.replace("http://", "http://me@"))
        origin.release.set()
        assert await asyncio.gather(*tasks) == [BODY, BODY, BODY, None]
        assert asker.count("joined") == 0


async def test_whoever_gives_up_leaves_the_others_alone(origin: Origin) -> None:
    async with running() as pool:
        before = await memory_files()
        asker, url = Asker(pool), f"{origin.base}/slow/a"
        tasks = [asker.start(url) for _ in range(3)]
        await origin.until(lambda: origin.hits["/slow/a"] == 1)
        tasks[0].cancel()  # the one who began it
        with pytest.raises(TimeoutError):  # a deadline of its own
            async with asyncio.timeout(0.05):
                await asker.ask(url)
        tasks.append(asker.start(url))
        origin.release.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(found[0], asyncio.CancelledError)
        assert found[1:] == [BODY] * 3
        assert origin.hits == {"/slow/a": 1}
        del found
        tasks.clear()
        await until_let_go(before)


async def test_when_all_have_given_up_the_download_ends_and_nobody_joins_it(origin: Origin) -> None:
    async with running() as pool:
        asker, url = Asker(pool), f"{origin.base}/slow/a"
        tasks = [asker.start(url) for _ in range(3)]
        await origin.until(lambda: origin.hits["/slow/a"] == 1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        again = asker.start(url)  # before the server knows
        await origin.until(lambda: origin.gone["/slow/a"] == 1)
        origin.release.set()
        assert await again == BODY
        assert origin.hits == {"/slow/a": 2}
        assert pool.running == 0


async def test_given_up_before_the_first_step(origin: Origin) -> None:
    async with running() as pool:
        asker, url = Asker(pool), f"{origin.base}/a"
        task = asker.start(url)
        await asyncio.sleep(0)  # it waits; the download has not begun
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await asker.ask(url) == BODY
        assert origin.hits == {"/a": 1}


async def test_an_error_is_for_those_who_joined(origin: Origin) -> None:
    async with running(max_bytes=1000) as pool:
        asker, url = Asker(pool), f"{origin.base}/slow/a"
        tasks = [asker.start(url) for _ in range(5)]
        await origin.until(lambda: origin.hits["/slow/a"] == 1)
        origin.release.set()
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(error) for error in errors] == [MediaError] * 5
        assert len({id(error) for error in errors}) == 5
        assert {error.status for error in errors if isinstance(error, MediaError)} == {400}
        assert origin.hits == {"/slow/a": 1}
        with pytest.raises(MediaError, match="limit 1000"):
            await asker.ask(url)
        assert origin.hits == {"/slow/a": 2}
        assert asker.count("failed") == 2


async def test_a_killer_is_tried_once_for_all_who_joined(origin: Origin) -> None:
    async with running() as pool:
        asker = Asker(pool)
        origin.killer = lambda _: [os.kill(pid, signal.SIGSEGV) for pid in pool.pids] and None
        tasks = [asker.start(f"{origin.base}/poison") for _ in range(6)]
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(error) for error in errors} == {MediaError}
        assert origin.hits == {"/poison": 2}
        assert await asker.ask(f"{origin.base}/a") == BODY


async def test_the_end_of_the_stage_wakes_who_waits(origin: Origin) -> None:
    async with running() as pool:
        tasks: set[asyncio.Task[None]] = set()
        metrics = EncoderMetrics()

        def spawn(work: object) -> asyncio.Task[None]:
            task = asyncio.create_task(work)  # type: ignore[arg-type]
            tasks.add(task)
            return task

        downloads = Downloads(pool, metrics, spawn)

        async def ask() -> None:
            async with downloads.get(f"{origin.base}/slow/a", None):
                raise AssertionError("it was cancelled")

        asks = [asyncio.create_task(ask()) for _ in range(2)]
        await origin.until(lambda: origin.hits["/slow/a"] == 1)
        for task in tasks:
            task.cancel()
        async with asyncio.timeout(PATIENCE_S):  # the server would let them wait for ever
            errors = await asyncio.gather(*asks, return_exceptions=True)
        assert [type(error) for error in errors] == [CancelledRequestError] * 2
