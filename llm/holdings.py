"""What requests hold of the pools, with a prefix cache or without one (engine thread alone).

Gives pages, takes them back and copies KV out; when any of this is due is for the engine and its scheduler.
"""

from __future__ import annotations

from transom.llm.capacity import pages_for
from transom.llm.pools import DualPools, HostKV, RequestKV
from transom.llm.prefix_cache import PrefixCache
from transom.llm.request import Request, ReturnWish
from transom.llm.runner import Step, pages_of
from transom.llm.scheduler import FreePages


class Holdings:
    """`retracted_bytes` of KV wait in host memory, of requests that gave their pages back."""

    def __init__(self, pools: DualPools, cache: PrefixCache | None, swa_release_interval: int) -> None:
        self.retracted_bytes = 0
        self._pools = pools
        self._cache = cache
        self._interval = swa_release_interval

    @property
    def free_pages(self) -> FreePages:
        if self._cache is not None:
            return self._cache.free_pages
        return FreePages(self._pools.full_pages.available, self._pools.swa_pages.available)

    def give_first(self, request: Request) -> None:
        """Give the request pages: those of its own KV, or of the cached prefix, or none yet."""
        if request.host_kv is not None:
            if self._cache is not None:
                full = pages_for(request.host_kv.length, self._pools.page_size)
                self._cache.make_room(full, full)
            request.kv = self._pools.adopt(request.host_kv)
            self.drop_host_kv(request)
        elif self._cache is not None:
            self._cache.attach(request)
        else:
            request.kv = RequestKV()

    def extend(self, request: Request, end: int) -> None:
        """Have pages for the positions before `end`."""
        kv = pages_of(request)
        if end > kv.count * self._pools.page_size:
            (self._cache or self._pools).extend(kv, end)

    def note(self, step: Step) -> None:
        """Take note of what a step has stored: some of it may be cached, some SWA pages freed."""
        request, kv = step.request, pages_of(step.request)
        due = not step.decoding or kv.length % self._interval == 0
        if self._cache is None:
            if due:
                self._pools.slide(kv)
        elif not step.decoding:
            self._cache.store(request)
        elif due:
            self._cache.slide(request)

    def retract(self, request: Request) -> None:
        """Take the request's pages: decoding ones keep their KV in host memory, prompts start anew."""
        if request.decoding:
            request.host_kv = self._pools.offload(pages_of(request))
            self.retracted_bytes += request.host_kv.size_bytes
        else:
            request.computed = 0
        request.retractions += 1
        self._release(request)

    def finish(self, request: Request) -> None:
        """Let others use what an ended request has generated."""
        if self._cache is not None:
            self._cache.finish(request)

    def hand_over(self, request: Request) -> tuple[HostKV, int | None]:
        """Return a copy of the request's KV, and from where on that of its answer is wanted back."""
        host_kv = self._pools.offload(pages_of(request))
        return host_kv, self._cache.hand_over(request) if self._cache is not None else None

    def answer(self, request: Request, wish: ReturnWish) -> HostKV | None:
        """Return the whole pages of what was generated, for the prefix cache where the prompt is."""
        end = request.computed // wish.page_size * wish.page_size
        if end <= max(wish.begin, request.computed - self._pools.window):
            return None
        return self._pools.copy_out(pages_of(request), wish.begin, end)

    def drop_host_kv(self, request: Request) -> None:
        if request.host_kv is not None and request.retractions:
            self.retracted_bytes -= request.host_kv.size_bytes
        request.host_kv = None

    def forget(self, request: Request) -> None:
        """Free what the request holds in the pools."""
        self._release(request)
        if self._cache is not None:
            self._cache.forget(request)

    def check_integrity(self) -> None:
        """Assert that pools and cache add up when no request is there."""
        (self._cache or self._pools).check_integrity(())

    def _release(self, request: Request) -> None:
        if request.kv is not None:
            if self._cache is not None:
                self._cache.release(request)
            else:
                self._pools.release(request.kv)
            request.kv = None
