"""The downloads under way: one for all items that ask for the same URL at once.

Encoder process (front), event loop. Knows URLs and what came of them; nothing of items, keys or caches.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from transom.encoder.fetch_pool import FetchPool
from transom.encoder.fetch_process import Download
from transom.encoder.known_urls import Validator
from transom.encoder.media.wire import MemoryFile
from transom.encoder.metrics import EncoderMetrics
from transom.encoder.off_loop import off_loop
from transom.errors import CancelledRequestError, ErrorInfo, TransomError, from_info
from transom.media_key import bytes_digest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Content:
    """What a URL gave: a file that `Downloads` closes, its digest, how to ask next time."""

    file: MemoryFile
    digest: str
    validator: Validator | None


class _Flight:
    """One download, those who wait for it or use what it gave, and its outcome."""

    def __init__(self) -> None:
        self.users = 0
        self.task: asyncio.Task[None] | None = None
        self.ended = asyncio.Event()
        self.content: Content | None = None  # stays None if what was known is still there
        # Not the exception itself: raised once for each who waits, it would keep the frames of all.
        self.error: ErrorInfo | None = None


class Downloads:
    """Downloads, each URL once at a time. `spawn` runs a task that the stage waits for."""

    def __init__(
        self,
        fetches: FetchPool,
        metrics: EncoderMetrics,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._fetches = fetches
        self._metrics = metrics
        self._spawn = spawn
        # By the URL as it was given: what one spelling is refused for must not be shared with another. And by
        # what is known of it: a request with a condition and one without get different answers.
        self._flights: dict[tuple[str, Validator | None], _Flight] = {}

    @contextlib.asynccontextmanager
    async def get(self, url: str, known: Validator | None) -> AsyncIterator[Content | None]:
        """Give what is at a URL, valid in the block; None when it is still what `known` names.

        Raise what FetchPool.fetch does, to all who joined. Whoever is cancelled leaves the others alone; when
        all have gone, the download ends.
        """
        flight = self._flights.get((url, known))
        if flight is None:
            flight = self._begin(url, known)
        else:
            self._metrics.fetches.labels("joined").inc()
        flight.users += 1
        try:
            await flight.ended.wait()
            if flight.error is not None:
                raise from_info(flight.error)
            yield flight.content
        finally:
            flight.users -= 1
            if not flight.users:
                self._leave(url, known, flight)

    def _begin(self, url: str, known: Validator | None) -> _Flight:
        flight = self._flights[url, known] = _Flight()
        flight.task = self._spawn(self._run(url, known, flight))
        # A task that is cancelled before its first step runs nothing, not even its `finally`.
        flight.task.add_done_callback(lambda _: self._end(url, known, flight))
        return flight

    async def _run(self, url: str, known: Validator | None, flight: _Flight) -> None:
        outcome = "failed"
        try:
            download = await self._fetches.fetch(url, known)
            outcome = "unchanged" if download is None else "downloaded"
            if download is not None:
                flight.content = await self._named(download)
        except asyncio.CancelledError:
            flight.error = CancelledRequestError("nobody waits for this download any more").info()
            raise
        except TransomError as error:
            flight.error = error.info()
        except Exception as error:
            logger.exception("a download failed")
            flight.error = TransomError(f"the encoder failed on this item ({type(error).__name__})").info()
        finally:
            self._metrics.fetches.labels(outcome).inc()
            self._end(url, known, flight)

    @staticmethod
    async def _named(download: Download) -> Content:
        file = download.file
        try:
            digest = await off_loop(file.size_bytes, bytes_digest, file.view)
        except BaseException:
            file.close()
            raise
        return Content(file, digest, download.validator)

    def _leave(self, url: str, known: Validator | None, flight: _Flight) -> None:
        """The last one has gone."""
        if flight.content is not None:
            flight.content.file.close()
        elif not flight.ended.is_set():
            assert flight.task is not None
            flight.task.cancel()
        self._forget(url, known, flight)

    def _end(self, url: str, known: Validator | None, flight: _Flight) -> None:
        """Wake all who wait, and let nobody join any more."""
        flight.ended.set()
        self._forget(url, known, flight)

    def _forget(self, url: str, known: Validator | None, flight: _Flight) -> None:
        if self._flights.get((url, known)) is flight:
            del self._flights[url, known]
