"""Attention of one engine step over the paged pools: an AttentionBackend built anew for each batch.

All index work of the step is done once here, in numpy on the host, and shared by the layers of a kind. Used
by the engine thread; knows which pages requests have, not what the requests are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from transom.kernels.kv_rows import to_rows
from transom.kernels.paged_attention import paged_attention
from transom.llm.model.spec import LayerSpec
from transom.llm.pools import NULL_PAGE, DualPools, RequestKV

Ints = npt.NDArray[np.int64]

_FAR = np.iinfo(np.int64).max  # the position of a key that no query sees
_LEAST_BLOCK = (
    32  # queries of a block of a windowed chunk: shorter ones cost more kernels than they save keys
)
# Rows of a decode batch are padded to the longest of their group; a further group costs ten small kernels.
_PADDED_SHARE = 2.0
_SMALL_PAGES = 16
# The mask of a full layer is queries by keys: 64 MB at most, whatever the context.
_MASK_ELEMENTS = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Span:
    """`count` new tokens of one request from position `begin` on; their pages exist already."""

    kv: RequestKV
    begin: int
    count: int


def _masked_parts(span: Span) -> list[Span]:
    """Cut a chunk of a long prompt into parts whose mask has a bounded size."""
    most = max(_MASK_ELEMENTS // (span.begin + span.count), 1)
    return [Span(span.kv, span.begin + at, min(most, span.count - at)) for at in range(0, span.count, most)]


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows of the batch that run as one kernel call of (batch, queries).

    `gather` maps each query to its packed row and `scatter` each packed row to its query; None when the
    packed rows begin..end are the queries already.
    """

    begin: int
    end: int
    queries: int
    gather: torch.Tensor | None
    scatter: torch.Tensor | None
    pages: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the layers of one kind share. Built for sinks (null page first) or without."""

    slots: torch.Tensor
    groups: list[_Group]


class PagedAttention:
    """AttentionBackend over `pools` for one step. Spans of one token should come first, longest KV first."""

    def __init__(self, pools: DualPools, spans: Sequence[Span], specs: Sequence[LayerSpec]) -> None:
        self._pools = pools
        self._spans = spans
        full, swa = zip(*(pools.slots(span.kv, span.begin, span.begin + span.count) for span in spans))
        sinks = {spec.full: spec.has_sink for spec in specs}
        windows = {spec.full: spec.window for spec in specs}
        self._kinds = {
            True: _Kind(self._tensor(np.concatenate(full)), self._groups(None, sinks[True])),
            False: _Kind(self._tensor(np.concatenate(swa)), self._groups(windows[False], sinks[False])),
        }

    def attend(
        self,
        layer: int,
        spec: LayerSpec,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
    ) -> torch.Tensor:
        kind = self._kinds[spec.full]
        store = self._pools.full if spec.full else self._pools.swa
        index = self._pools.index_of[layer]
        for slots, new in ((store.k_slots[index], k), (store.v_slots[index], v)):
            slots.index_copy_(1, kind.slots, to_rows(new, slots.dtype).transpose(0, 1))
        outputs = []
        for group in kind.groups:
            rows = q[group.begin : group.end] if group.gather is None else q.index_select(0, group.gather)
            out = paged_attention(
                rows.view(-1, group.queries, spec.heads, spec.head_dim),
                store.k_pages[index],
                store.v_pages[index],
                group.pages,
                group.bias,
                scale=spec.scale,
                sink=sink,
            ).flatten(0, 1)
            outputs.append(out if group.scatter is None else out.index_select(0, group.scatter))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _groups(self, window: int | None, sink: bool) -> list[_Group]:
        singles = next((i for i, span in enumerate(self._spans) if span.count > 1), len(self._spans))
        groups = []
        begin = 0
        for end in self._decode_bounds(singles, window):
            groups.append(self._group(self._spans[begin:end], begin, 1, window, sink))
            begin = end
        if window is not None and singles < len(self._spans):
            block = max(_LEAST_BLOCK, -(-window // self._pools.page_size) * self._pools.page_size)
            groups.append(self._group(self._spans[singles:], singles, block, window, sink))
        elif window is None:
            row = singles
            for span in self._spans[singles:]:
                for part in _masked_parts(span):
                    groups.append(self._group([part], row, part.count, window, sink))
                    row += part.count
        return groups

    def _decode_bounds(self, singles: int, window: int | None) -> list[int]:
        """Cut the single-token spans, longest first, where padding would cost more than a further call."""
        if singles == 0 or window is not None:
            return [singles] if singles else []
        bounds = []
        longest = self._spans[0].kv.count
        for i, span in enumerate(self._spans[:singles]):
            pages = span.kv.count
            if longest > _SMALL_PAGES and pages * _PADDED_SHARE < longest:
                bounds.append(i)
                longest = pages
        return [*bounds, singles]

    def _group(self, spans: Sequence[Span], row: int, block: int, window: int | None, sink: bool) -> _Group:
        """Cut the spans into blocks of `block` queries, packed rows from `row` on, and list their pages."""
        page_size = self._pools.page_size
        blocks = [
            (span, begin, min(begin + block, span.begin + span.count))
            for span in spans
            for begin in range(span.begin, span.begin + span.count, block)
        ]
        first_pages = [
            0 if window is None else max(begin - window + 1, 0) // page_size for _, begin, _ in blocks
        ]
        end_pages = [(end - 1) // page_size + 1 for _, _, end in blocks]
        lead = int(sink)
        width = lead + max(end - first for first, end in zip(first_pages, end_pages))
        pages = np.full((len(blocks), width), NULL_PAGE, dtype=np.int64)
        for i, (span, _, _) in enumerate(blocks):
            listed = span.kv.pages[first_pages[i] : end_pages[i]]
            pages[i, lead : lead + len(listed)] = listed if window is None else self._pools.swa_of[listed]
        begins = np.array([begin for _, begin, _ in blocks])
        counts = np.array([end for _, _, end in blocks]) - begins
        # A block's padding repeats its last query.
        queries = np.minimum(np.arange(block), counts[:, None] - 1) + begins[:, None]  # (blocks, block)
        gather = scatter = None
        total = int(counts.sum())
        if total != len(blocks) * block:
            starts = row + np.cumsum(counts) - counts
            gather = self._tensor((queries - begins[:, None] + starts[:, None]).ravel())
            scatter = self._tensor(np.flatnonzero(np.arange(block) < counts[:, None]))
        bias = None
        if window is not None or sink or block == 1 or begins[0] > 0:
            bias = self._bias(queries, np.array(first_pages), np.array(end_pages), width, window, sink)
        return _Group(row, row + total, block, gather, scatter, self._tensor(pages), bias)

    def _bias(
        self, queries: Ints, first: Ints, end: Ints, width: int, window: int | None, sink: bool
    ) -> torch.Tensor:
        """Return (blocks, block, keys): 0 where a query sees a key, -inf elsewhere."""
        page_size = self._pools.page_size
        lead = int(sink)
        page = np.arange(width) - lead + first[:, None]
        position = (page[:, :, None] * page_size + np.arange(page_size)).reshape(len(first), -1)
        hidden = (page < first[:, None]) | (page >= end[:, None])
        position[np.repeat(hidden, page_size, axis=1)] = _FAR
        keys, at = self._tensor(position)[:, None], self._tensor(queries)[:, :, None]
        seen = keys <= at
        if window is not None:
            seen &= keys > at - window
        if sink:
            seen[..., 0] = True
        return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, float("-inf"))

    def _tensor(self, array: Ints) -> torch.Tensor:
        return torch.from_numpy(array).to(self._pools.device, non_blocking=True)
