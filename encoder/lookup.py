"""From an item to the encoding of its content: its server is asked, it is downloaded, its digest looked up.

Encoder process (front), event loop; what grows with a size runs in threads. Knows nothing of who waits for
the encoding.
"""

from __future__ import annotations

import time

from transom.encoder.admission import Admission, Item
from transom.encoder.encoding import Encoding
from transom.encoder.fetch_pool import Download, FetchPool
from transom.encoder.flights import Flights
from transom.encoder.known_urls import KnownContent, KnownUrls
from transom.encoder.media.wire import MemoryFile
from transom.encoder.metrics import EncoderMetrics
from transom.encoder.off_loop import off_loop
from transom.errors import MediaError
from transom.media_key import bytes_digest, content_key_of
from transom.messages import Dtype, EncodeJob


class Lookup:
    """Finds encodings, under way, kept or begun now."""

    def __init__(
        self,
        fetches: FetchPool,
        flights: Flights,
        admission: Admission,
        metrics: EncoderMetrics,
        *,
        revision: str,
        dtype: Dtype,
    ) -> None:
        self._fetches = fetches
        self._flights = flights
        self._admission = admission
        self._metrics = metrics
        self._revision = revision
        self._dtype: Dtype = dtype
        self._known = KnownUrls()

    async def find(self, item: Item) -> Encoding:
        """Return the encoding of an item's content; raise MediaError when it has none."""
        job, data = item.job, item.data
        item.data = None
        if data is not None:
            file = await off_loop(len(data), MemoryFile.of, data)
            return await self._encode(job, file, None)
        assert job.url is not None
        known = self._known.get(job.url)
        download = await self._fetch(item, job.url, known)
        if download is None and known is not None:
            found = await self._flights.look_up(self._key(job, known.digest), job)
            if found is not None:
                return found
            # What it gave is no longer kept: only now the content is needed.
            download = await self._fetch(item, job.url, None)
        assert download is not None
        return await self._encode(job, download.file, download)

    async def _encode(self, job: EncodeJob, file: MemoryFile, download: Download | None) -> Encoding:
        """Name the content of a file and find its encoding. Takes the file."""
        try:
            if not file.size_bytes:
                raise MediaError(f"{job.modality} is empty (0 bytes)")
            digest = await off_loop(file.size_bytes, bytes_digest, file.view)
            if job.url is not None and download is not None:
                self._known.remember(job.url, digest, download.validator)
            return self._flights.encode(self._key(job, digest), job, file)
        finally:
            # A running encoding holds a descriptor of its own.
            file.close()

    async def _fetch(self, item: Item, url: str, known: KnownContent | None) -> Download | None:
        """Download the item; None when it is still what is known of its URL."""
        started = time.monotonic()
        outcome = "failed"
        try:
            download = await self._fetches.fetch(url, known.validator if known else None)
            outcome = "unchanged" if download is None else "downloaded"
        finally:
            self._metrics.fetches.labels(outcome).inc()
            item.spans.add("fetch", started, time.monotonic())
        if download is not None:
            self._admission.charge(item, download.file.size_bytes)
        return download

    def _key(self, job: EncodeJob, digest: str) -> str:
        return content_key_of(digest, job.modality, job.options, self._revision, self._dtype)
