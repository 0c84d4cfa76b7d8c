"""The items that an encoder holds: what is let in, what each is charged with, who is told to stop.

Encoder process (front), event loop. Knows jobs and tasks; nothing of media, caches or sockets.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from transom.encoder.config import EncoderConfig
from transom.encoder.spans import ItemSpans, Timeline
from transom.errors import MediaError, OverloadedError
from transom.messages import EncodeJob
from transom.recent_ids import RecentIds

_MB = 1024 * 1024
_ABORTS_KEPT = 10_000


@dataclass(eq=False)
class Item:
    """One EncodeJob in the process."""

    job: EncodeJob
    data: memoryview | None
    received_s: float
    charged_bytes: int
    task: asyncio.Task[None] | None = None
    spans: ItemSpans = field(default_factory=ItemSpans)
    queue_ms: float = 0.0


class Admission:
    """Lets items in up to the bounds on their number and bytes."""

    def __init__(self, config: EncoderConfig, timeline: Timeline) -> None:
        self._config = config
        self._timeline = timeline
        self._items: dict[str, set[Item]] = defaultdict(set)
        self._aborted = RecentIds(limit=_ABORTS_KEPT)
        self.count = 0
        self.held_bytes = 0

    def admit(self, job: EncodeJob, data: memoryview | None) -> Item:
        """Take a job in; raise OverloadedError or MediaError when it may not come in."""
        size = len(data) if data is not None else 0
        config = self._config
        if self.count >= config.max_queued_items:
            raise OverloadedError(f"encoder queue is full ({config.max_queued_items} items)", retry_after_s=1)
        if self.held_bytes + size > config.max_queued_mb * _MB and self.count:
            raise OverloadedError(
                f"encoder queue is full ({config.max_queued_mb} MB of media)", retry_after_s=1
            )
        if size > config.max_media_mb * _MB:
            raise MediaError(f"{job.modality} of {size} bytes, limit {int(config.max_media_mb * _MB)}")
        item = Item(job, data, time.monotonic(), size, spans=ItemSpans(self._timeline))
        self._items[job.request_id].add(item)
        self.count += 1
        self.held_bytes += size
        return item

    def charge(self, item: Item, size_bytes: int) -> None:
        """Count further bytes that an item holds."""
        item.charged_bytes += size_bytes
        self.held_bytes += size_bytes

    def drop(self, item: Item) -> None:
        """Let an item go. Idempotent."""
        items = self._items.get(item.job.request_id)
        if items is not None and item in items:
            items.discard(item)
            self.count -= 1
            self.held_bytes -= item.charged_bytes
            # The task's error leads to its frames, those to the item: back to the task that would be a cycle.
            item.task = None
            if not items:
                del self._items[item.job.request_id]

    def abort(self, request_id: str) -> None:
        """End the items of a request, and refuse those of it that come later."""
        self._aborted.add(request_id, time.monotonic())
        self.cancel(request_id)

    def is_aborted(self, request_id: str) -> bool:
        """Tell whether a request was aborted lately."""
        return request_id in self._aborted

    def cancel(self, request_id: str, but: Item | None = None) -> None:
        """End the items of a request, all of them or all but one."""
        self._cancel_where(self._items.get(request_id, ()), lambda item: item is not but)

    def cancel_of(self, address: str) -> list[EncodeJob]:
        """End the items that nobody would be told of, or whose embeddings nobody would take; return these."""
        for items in list(self._items.values()):
            self._cancel_where(items, lambda item: address in (item.job.gateway, item.job.reply_to))
        jobs = (item.job for items in self._items.values() for item in items)
        return [job for job in jobs if job.reply_to == address != job.gateway]

    @staticmethod
    def _cancel_where(items: Iterable[Item], is_meant: Callable[[Item], bool]) -> None:
        for item in list(items):
            if item.task is not None and is_meant(item):
                item.task.cancel()
