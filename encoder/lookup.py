"""From an item to the encoding of its content: its server is asked, it is downloaded, its digest looked up.

Encoder process (front), event loop; what grows with a size runs in threads. Knows nothing of who waits for
the encoding.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator

from transom.encoder.admission import Admission, Item
from transom.encoder.downloads import Content, Downloads
from transom.encoder.encoding import Encoding
from transom.encoder.flights import Flights
from transom.encoder.known_urls import KnownUrls, Validator
from transom.encoder.media.wire import MemoryFile
from transom.encoder.off_loop import off_loop
from transom.errors import MediaError
from transom.media_key import bytes_digest, content_key_of
from transom.messages import Dtype, EncodeJob


class Lookup:
    """Finds encodings, under way, kept or begun now."""

    def __init__(
        self,
        downloads: Downloads,
        flights: Flights,
        admission: Admission,
        *,
        revision: str,
        dtype: Dtype,
    ) -> None:
        self._downloads = downloads
        self._flights = flights
        self._admission = admission
        self._revision = revision
        self._dtype: Dtype = dtype
        self._known = KnownUrls()

    async def find(self, item: Item) -> Encoding:
        """Return the encoding of an item's content; raise MediaError when it has none."""
        job, data = item.job, item.data
        item.data = None
        if data is not None:
            file = await off_loop(len(data), MemoryFile.of, data)
            try:
                digest = await off_loop(file.size_bytes, bytes_digest, file.view)
                return self._encode(job, file, digest)
            finally:
                # A running encoding holds a descriptor of its own.
                file.close()
        assert job.url is not None
        known = self._known.get(job.url)
        if known is not None:
            async with self._fetched(item, job.url, known.validator) as content:
                if content is not None:
                    return self._encode(job, content.file, content.digest)
            found = await self._flights.look_up(self._key(job, known.digest), job)
            if found is not None:
                return found
            # What it gave is no longer kept: only now the content is needed.
        async with self._fetched(item, job.url, None) as content:
            assert content is not None
            return self._encode(job, content.file, content.digest)

    def _encode(self, job: EncodeJob, file: MemoryFile, digest: str) -> Encoding:
        """Return the encoding of a file's content."""
        if not file.size_bytes:
            raise MediaError(f"{job.modality} is empty (0 bytes)")
        return self._flights.encode(self._key(job, digest), job, file)

    @contextlib.asynccontextmanager
    async def _fetched(self, item: Item, url: str, known: Validator | None) -> AsyncIterator[Content | None]:
        """Give what is at the item's URL; None when it is still what is known of it."""
        started = time.monotonic()
        async with contextlib.AsyncExitStack() as stack:
            try:
                content = await stack.enter_async_context(self._downloads.get(url, known))
            finally:
                item.spans.add("fetch", started, time.monotonic())
            if content is not None:
                self._admission.charge(item, content.file.size_bytes)
                self._known.remember(url, content.digest, content.validator)
            yield content

    def _key(self, job: EncodeJob, digest: str) -> str:
        return content_key_of(digest, job.modality, job.options, self._revision, self._dtype)
