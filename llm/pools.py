"""Paged dual KV pools of one engine: full layers keep every token, SWA layers only the live window.

A page of the full pool is the authority for where tokens are; `full_to_swa` says which SWA page mirrors it,
or none once the window has passed. Used by the engine thread alone; knows neither text nor sockets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from transom.errors import OverloadedError
from transom.kernels.kv_rows import all_finite, stored_dtype, stored_size
from transom.llm.capacity import PoolPlan, pages_for
from transom.llm.model.spec import DecoderConfig, LayerSpec

Pages = npt.NDArray[np.int64]  # page numbers of the full pool

NO_PAGES: Pages = np.empty(0, np.int64)
NULL_PAGE = 0  # in both pools: all zeros for ever, owned by nobody, stands for "nothing here"


class PoolExhaustedError(OverloadedError):
    """A pool has fewer free pages than asked for; nothing was taken."""


class PageAllocator:
    """Hands out page numbers of one pool; O(1) a page. Page 0 is the null page and never handed out."""

    def __init__(self, pages: int) -> None:
        self.capacity = pages - 1
        self._free = list(range(pages - 1, 0, -1))
        self._taken = np.zeros(pages, dtype=np.bool_)

    @property
    def available(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.capacity - len(self._free)

    def alloc(self, count: int) -> list[int]:
        """Take `count` pages or raise PoolExhaustedError."""
        if count > len(self._free):
            raise PoolExhaustedError(f"{count} pages wanted, {len(self._free)} of {self.capacity} are free")
        if count == 0:
            return []
        pages = self._free[-count:]
        del self._free[-count:]
        self._taken[pages] = True
        return pages

    def free(self, pages: list[int]) -> None:
        """Give pages back; giving back what is not taken is a bug in the caller."""
        if not pages:
            return
        assert self._taken[pages].all(), f"page freed twice or never taken: {pages}"
        self._taken[pages] = False
        self._free.extend(pages)

    def check_integrity(self, owned: Sequence[int]) -> None:
        """Assert that exactly the `owned` pages are taken, each once, and that the rest is free once."""
        assert len(set(owned)) == len(owned), "a page has two owners"
        assert set(owned) == set(np.flatnonzero(self._taken).tolist()), "taken pages differ from owned pages"
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        assert not self._taken[self._free].any(), "a free page is taken"
        assert len(self._free) + len(owned) == self.capacity, "pages were lost"
        assert NULL_PAGE not in self._free, "the null page is free"
        assert not self._taken[NULL_PAGE], "the null page is taken"


class KVStore:
    """K and V of the layers of one kind: (layers, kv_heads, pages, page_size, dim).

    Of fp8, `dim` counts the bytes of a stored row, its scale included (transom.kernels.kv_rows).
    """

    def __init__(
        self, specs: Sequence[LayerSpec], pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shapes = {(spec.kv_heads, spec.head_dim, spec.v_head_dim) for spec in specs}
        assert len(shapes) == 1, f"layers of one kind differ in their KV shape: {shapes}"
        kv_heads, head_dim, v_head_dim = shapes.pop()
        shape = len(specs), kv_heads, pages, page_size
        self.k, self.v = (
            torch.empty(*shape, stored_size(dim, dtype), dtype=stored_dtype(dtype), device=device)
            for dim in (head_dim, v_head_dim)
        )
        self.zero([NULL_PAGE])
        # Views by slot, (kv_heads, slots, dim) a layer, made once: a view costs as much as a small kernel.
        self.k_slots = list(self.k.flatten(2, 3).unbind(0))
        self.v_slots = list(self.v.flatten(2, 3).unbind(0))
        self.k_pages = list(self.k.unbind(0))
        self.v_pages = list(self.v.unbind(0))

    def zero(self, pages: Sequence[int]) -> None:
        """Clear pages: what a former owner left (NaN perhaps) must not reach the next one's padding."""
        index = torch.as_tensor(pages, device=self.k.device)
        self.k.index_fill_(2, index, 0)
        self.v.index_fill_(2, index, 0)

    def read(self, pages: torch.Tensor, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy slots begin..end of the given pages to host memory, (layers, tokens, kv_heads, dim)."""
        k, v = (
            x.index_select(2, pages).flatten(2, 3)[:, :, begin:end].transpose(1, 2).contiguous().cpu()
            for x in (self.k, self.v)
        )
        return k, v

    def write(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store rows (layers, tokens, kv_heads, dim), read from such a store, at `slots` of all layers."""
        for pool, rows in ((self.k, k), (self.v, v)):
            assert rows.dtype == pool.dtype, f"rows of {rows.dtype} for a pool of {pool.dtype}"
            pool.flatten(2, 3).index_copy_(2, slots, rows.to(pool.device).transpose(1, 2))


@dataclass(frozen=True, slots=True)
class HostKV:
    """A request's KV outside the pools: handed over or retracted. Host memory, owned by the holder.

    Rows are as the pools store them: full_* (full layers, length - begin, kv_heads, dim); swa_* (SWA layers,
    swa_len, kv_heads, dim) hold the last `swa_len` positions only. `begin` is 0 but for an answer on its way
    back to the prefix cache.
    """

    length: int
    swa_len: int
    full_k: torch.Tensor
    full_v: torch.Tensor
    swa_k: torch.Tensor
    swa_v: torch.Tensor
    begin: int = 0

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.full_k, self.full_v, self.swa_k, self.swa_v

    @property
    def size_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self.tensors)

    @property
    def finite(self) -> bool:
        """Whether no row holds a NaN or an infinity."""
        return all(map(all_finite, self.tensors))


@dataclass(slots=True, eq=False)
class RequestKV:
    """The pages of one running request. Page i holds positions i * page_size and on.

    `pages[:shared]` belong to the prefix cache and are only read; the rest is the request's own. Of its own,
    those before `swa_from` have lost their SWA page, and slots before `swa_since` were never written in one.
    Only DualPools and PrefixCache change it.
    """

    pages: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(16, dtype=np.int64))
    count: int = 0
    shared: int = 0
    swa_from: int = 0
    length: int = 0  # tokens stored
    swa_since: int = 0

    @property
    def swa_count(self) -> int:
        """SWA pages of its own."""
        return self.count - max(self.swa_from, self.shared)

    def append(self, new: list[int]) -> None:
        end = self.count + len(new)
        if end > len(self.pages):
            self.pages = np.concatenate([self.pages[: self.count], np.zeros(end, dtype=np.int64)])
        self.pages[self.count : end] = new
        self.count = end


class DualPools:
    """Both pools and the map between them.

    `margin` tokens of SWA slots stay behind the window, for the window at the last full page of an answer.
    `clear_pages` zeroes pages when they are handed out, for attention that reads slots which nobody has
    written and gives them a weight of 0. With `scratch` each pool has a page beyond the plan, which rows that
    only pad a batch write to and read.
    """

    def __init__(
        self,
        config: DecoderConfig,
        plan: PoolPlan,
        *,
        dtype: torch.dtype,
        device: torch.device,
        margin: int = 0,
        clear_pages: bool = True,
        scratch: bool = False,
    ) -> None:
        specs = config.layers
        self._clear_pages = clear_pages
        self.plan = plan
        self.page_size = plan.page_size
        self.device = device
        self.window = max(spec.window or 0 for spec in specs if not spec.full)
        self.kept = self.window + margin
        full_pages, swa_pages = plan.full_pages + scratch, plan.swa_pages + scratch
        self.full = KVStore([s for s in specs if s.full], full_pages, plan.page_size, dtype, device)
        self.swa = KVStore([s for s in specs if not s.full], swa_pages, plan.page_size, dtype, device)
        self.full_pages = PageAllocator(plan.full_pages)
        self.swa_pages = PageAllocator(plan.swa_pages)
        # Kept on the host, where page tables are built; one numpy view serves all updates.
        self.full_to_swa = torch.zeros(full_pages, dtype=torch.int64)
        self.swa_of: npt.NDArray[np.int64] = self.full_to_swa.numpy()
        self.scratch_page = plan.full_pages if scratch else None  # no allocator knows it
        if scratch:
            self.swa_of[plan.full_pages] = plan.swa_pages
        # layer id -> its place in the store of its kind
        self.index_of = [sum(s.full == spec.full for s in specs[:i]) for i, spec in enumerate(specs)]

    def extend(self, kv: RequestKV, length: int) -> None:
        """Give `kv` room for positions below `length` in both pools, or raise PoolExhaustedError."""
        self._add_pages(kv, pages_for(length, self.page_size), swa_first=kv.count)

    def slide(self, kv: RequestKV) -> None:
        """Free the SWA pages that no query at `kv.length` or later sees, but for the margin."""
        end = min(max(kv.length - self.kept + 1, 0) // self.page_size, kv.count)
        begin = max(kv.swa_from, kv.shared)
        if end > begin:
            self.free_swa(kv.pages[begin:end])
        kv.swa_from = max(kv.swa_from, end)

    def release(self, kv: RequestKV) -> None:
        """Free everything `kv` owns; it is empty afterwards."""
        own = kv.pages[kv.shared : kv.count]
        self.free_swa(own[self.swa_mapped(own)])
        self.free_full(own)
        kv.count = kv.shared = kv.swa_from = kv.length = 0

    # What the prefix cache asks for (transom.llm.radix.contract.PagePools).

    def free_full(self, pages: Pages) -> None:
        """Take full pages back; their SWA pages have gone before."""
        self.full_pages.free(pages.tolist())

    def free_swa(self, pages: Pages) -> None:
        """Take back the SWA pages that these full pages map to, and clear the map there."""
        self.swa_pages.free(self.swa_of[pages].tolist())
        self.swa_of[pages] = NULL_PAGE

    def move_swa(self, source: Pages, target: Pages) -> None:
        """Let `target`, so far unmapped, map to the SWA pages of `source`, which is unmapped afterwards."""
        self.swa_of[target] = self.swa_of[source]
        self.swa_of[source] = NULL_PAGE

    def swa_mapped(self, pages: Pages) -> npt.NDArray[np.bool_]:
        """Return for each full page whether it maps to an SWA page."""
        mapped: npt.NDArray[np.bool_] = self.swa_of[pages] != NULL_PAGE
        return mapped

    # KV outside of the pools.

    def offload(self, kv: RequestKV) -> HostKV:
        """Copy the KV of `kv` to host memory: all full rows, SWA rows of the last window. Frees nothing."""
        return self.copy_out(kv, 0, kv.length)

    def copy_out(self, kv: RequestKV, begin: int, end: int) -> HostKV:
        """Copy full rows of positions begin..end, and the SWA rows kept of those before `end`."""
        pages = kv.pages[: pages_for(end, self.page_size)]
        first = begin // self.page_size
        offset = first * self.page_size
        full_pages = torch.from_numpy(pages[first:]).to(self.device)
        full_k, full_v = self.full.read(full_pages, begin - offset, end - offset)
        # The next query stands at `kv.length` and sees window - 1 keys before itself.
        window_start = max(kv.length - self.window + 1, 0)
        gaps = np.flatnonzero(~self.swa_mapped(pages))
        first = max(
            max(kv.length - self.kept + 1, 0) // self.page_size, int(gaps[-1]) + 1 if len(gaps) else 0
        )
        assert first <= window_start // self.page_size, "SWA slots inside the window were freed"
        offset = first * self.page_size
        swa_begin = max(kv.length - self.kept + 1, offset, kv.swa_since)
        live = torch.from_numpy(self.swa_of[pages[first:]]).to(self.device)
        swa_k, swa_v = self.swa.read(live, swa_begin - offset, end - offset)
        return HostKV(end, end - swa_begin, full_k, full_v, swa_k, swa_v, begin)

    def adopt(self, host: HostKV) -> RequestKV:
        """Bring offloaded KV into the pools. Raise PoolExhaustedError, leaving them unchanged.

        Of a hand-over from longer pages come more SWA rows than are kept here: those are left out.
        """
        since = max(host.length - host.swa_len, host.length - self.kept + 1)
        kv = RequestKV(swa_since=since)
        self.take_in(kv, host, since)
        return kv

    def take_in(self, kv: RequestKV, host: HostKV, swa_begin: int) -> None:
        """Give `kv` pages up to the end of `host` and store what it has, SWA rows from `swa_begin` on.

        Of pages that `kv` has already nothing is written. Raise PoolExhaustedError, leaving all as it was.
        """
        own = kv.count * self.page_size
        self._add_pages(kv, pages_for(host.length, self.page_size), swa_first=swa_begin // self.page_size)
        kv.length = host.length
        begin = max(host.begin, own)
        slots, _ = self.slots(kv, begin, host.length)
        rows = slice(begin - host.begin, None)
        self.full.write(torch.from_numpy(slots).to(self.device), host.full_k[:, rows], host.full_v[:, rows])
        begin = max(swa_begin, own)
        _, slots = self.slots(kv, begin, host.length)
        rows = slice(begin - (host.length - host.swa_len), None)
        self.swa.write(torch.from_numpy(slots).to(self.device), host.swa_k[:, rows], host.swa_v[:, rows])

    def slots(
        self, kv: RequestKV, begin: int, end: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the full and the SWA slot of positions begin..end."""
        positions = np.arange(begin, end)
        pages = kv.pages[positions // self.page_size]
        offsets = positions % self.page_size
        return pages * self.page_size + offsets, self.swa_of[pages] * self.page_size + offsets

    def _add_pages(self, kv: RequestKV, total: int, *, swa_first: int) -> None:
        """Grow `kv` to `total` pages; those from index `swa_first` on get an SWA page as well."""
        wanted = total - kv.count
        if wanted <= 0:
            return
        swa_wanted = total - max(swa_first, kv.count)
        full = self.full_pages.alloc(wanted)
        try:
            swa = self.swa_pages.alloc(swa_wanted)
        except PoolExhaustedError:
            self.full_pages.free(full)
            raise
        if self._clear_pages:
            self.full.zero(full)
            self.swa.zero(swa)
        self.swa_of[full[wanted - swa_wanted :]] = swa
        kv.append(full)
        kv.swa_from = max(kv.swa_from, total - swa_wanted) if swa_wanted < wanted else kv.swa_from

    def check_integrity(self, owners: Iterable[RequestKV], cached: Pages = NO_PAGES) -> None:
        """Assert that the owners' own and the `cached` pages are all there is, and that the map agrees."""
        owned: list[int] = cached.tolist()
        mirrored: list[int] = cached[self.swa_mapped(cached)].tolist()
        for kv in owners:
            assert 0 <= kv.swa_from <= kv.count, f"swa_from {kv.swa_from} of {kv.count} pages"
            assert kv.shared <= kv.count, f"{kv.shared} of {kv.count} pages are shared"
            assert kv.length <= kv.count * self.page_size, "tokens beyond the last page"
            live_from = max(kv.length - self.window + 1, 0) // self.page_size
            assert kv.count == 0 or kv.swa_from <= live_from, "an SWA page inside the window is gone"
            assert self.swa_mapped(kv.pages[live_from : kv.count]).all(), "a page in the window lacks SWA"
            owned.extend(kv.pages[kv.shared : kv.count].tolist())
            mirrored.extend(kv.pages[max(kv.swa_from, kv.shared) : kv.count].tolist())
        self.full_pages.check_integrity(owned)
        self.swa_pages.check_integrity(self.swa_of[mirrored].tolist() if mirrored else [])
        mapped = np.flatnonzero(self.swa_of[: self.plan.full_pages]).tolist()
        assert mapped == sorted(mirrored), "full_to_swa maps pages that nobody mirrors"
        for store in (self.full, self.swa):
            assert not store.k[:, :, NULL_PAGE].any(), "the null page was written"
            assert not store.v[:, :, NULL_PAGE].any(), "the null page was written"
