"""What requests hold of the pools, with a prefix cache or without one (engine thread alone).

Gives pages, takes them back and copies KV out; when any of this is due is for the engine and its scheduler.
"""

from __future__ import annotations

from transom.llm.capacity import pages_for
from transom.llm.pools import DualPools, RequestKV
from transom.llm.prefix_cache import PrefixCache
from transom.llm.request import AnswerEvent, PrefilledEvent, Request
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

    def hand_over(self, request: Request) -> PrefilledEvent:
        """Return a copy of the KV of a request that goes on elsewhere, and where it is wanted back from."""
        if self._cache is not None:
            self._cache.finish(request)
        host_kv = self._pools.offload(pages_of(request))
        wanted = self._cache.hand_over(request) if self._cache is not None else None
        token = request.output_ids[-1]
        return PrefilledEvent(request.request_id, request.prompt_ids, token, host_kv, wanted)

    def finish(self, request: Request) -> AnswerEvent | None:
        """Let others use what an ended request has generated: here, and where its prompt is if it came along.

        That takes whole pages, with the window before the last of them.
        """
        if self._cache is not None:
            self._cache.finish(request)
        wish = request.wish
        if wish is None:
            return None
        end = request.computed // wish.page_size * wish.page_size
        if end <= max(wish.begin, request.computed - self._pools.window):
            return None
        answer = self._pools.copy_out(pages_of(request), wish.begin, end)
        return AnswerEvent(request.request_id, wish, request.output_ids, answer)

    def drop_host_kv(self, request: Request) -> None:
        if request.host_kv is not None and request.retractions:
            self.retracted_bytes -= request.host_kv.size_bytes
        request.host_kv = None

    def forget(self, request: Request) -> None:
        """Free what the request holds in the pools."""
        self._release(request)
        if self._cache is not None:
            self._cache.forget(request)

    def figures(self) -> dict[str, float]:
        """Return what is used; cached slots that could be evicted count as free."""
        pools, free = self._pools, self.free_pages
        return {
            "full_used_slots": (pools.full_pages.capacity - free.full) * pools.page_size,
            "full_total_slots": pools.full_pages.capacity * pools.page_size,
            "swa_used_slots": (pools.swa_pages.capacity - free.swa) * pools.page_size,
            "swa_total_slots": pools.swa_pages.capacity * pools.page_size,
            "retracted_bytes": self.retracted_bytes,
            **(self._cache.figures() if self._cache else {}),
        }

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
