"""Decode steps recorded once and replayed: batches of single tokens, padded to a few sizes (engine thread).

The buffers, the padding and the filling are the same on any device; recording is CUDA's alone. Knows no
requests: rows come as page tables and positions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from transom.errors import ConfigError
from transom.kernels.ops import Ints
from transom.llm.graph_sizes import capture_within, graph_sizes, padded_size
from transom.llm.model.causal_lm import CausalLM
from transom.llm.model.fused import FusedModel, Placement, Span, list_spans
from transom.llm.pools import DualPools

logger = logging.getLogger(__name__)

_CLOSE = 1e-2  # what a step may differ by from itself: bf16 states, sums in another order
_SHARED = 2  # pages that requests share stand in the tables of each of them


@dataclass(frozen=True)
class DecodeRows:
    """Rows of one token each: spans as tables have them, whose page tables lie behind the scratch page's."""

    spans: Ints
    pages: Ints


class _PaddedStep:
    """One batch size: its buffers, its forward pass and, on CUDA, the graph of it."""

    def __init__(
        self, model: FusedModel, pools: DualPools, ids: torch.Tensor, tables: torch.Tensor, positions: int
    ) -> None:
        rows = len(ids)
        self.ids = ids
        self._model = model
        self._tables = model.ops.fixed_tables(tables, rows, pools.swa_of, pools.page_size)
        self._placement = Placement(pools, self._tables, positions - 1)
        self._rows = np.arange(rows)
        # Position 0 of the scratch page, the first in the tables: pads write there and read it.
        self._pads = np.zeros((rows, 4), np.int64)
        self._pads[:, 0], self._pads[:, 2] = self._rows, 1
        self._graph: torch.cuda.CUDAGraph | None = None
        self._hidden: torch.Tensor | None = None

    def fill(self, ids: torch.Tensor, rows: DecodeRows) -> None:
        """Put the rows of a step into the buffers; pads take the rest."""
        count = len(ids)
        self.ids[:count].copy_(ids)
        self.ids[count:].zero_()
        self._tables.fill(np.concatenate([rows.spans, self._pads[count:]]), rows.pages)

    def forward(self) -> torch.Tensor:
        """Return the hidden states (rows, hidden); those of a graph are overwritten by the next replay."""
        if self._graph is None:
            return self._model.forward(self._model.embed(self.ids), self._placement, self._rows)
        self._graph.replay()
        assert self._hidden is not None
        return self._hidden

    def warm_up(self, scratch_page: int) -> torch.Tensor:
        """Compute nothing but pads, which compiles kernels and sets up libraries; return their states."""
        self.fill(self.ids[:0], DecodeRows(self._pads[:0], np.array([scratch_page])))
        return self.forward()

    def capture(self, pool: Any, stream: torch.cuda.Stream, scratch_page: int) -> None:
        """Record the forward pass in memory of `pool`. Raise RuntimeError when a replay differs."""
        with torch.cuda.stream(stream):
            expected = self.warm_up(scratch_page)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            hidden = self.forward()
        self._graph, self._hidden = graph, hidden
        if not torch.allclose(self.forward(), expected, rtol=_CLOSE, atol=_CLOSE):
            raise RuntimeError("the recorded step computes something else than what was recorded")

    @property
    def captured(self) -> bool:
        return self._graph is not None

    def drop_graph(self) -> None:
        if self._graph is not None:
            self._graph.reset()
        self._graph = self._hidden = None


class DecodeGraphs:
    """Runs batches of decoding requests in the sizes that `sizes` lists.

    Pads are rows at position 0 of the pools' scratch page. `bytes` counts buffers, pools of the graphs and
    scratch pages, but not what the driver keeps of each graph.
    """

    def __init__(self, model: FusedModel, pools: DualPools, context_len: int, most: int) -> None:
        assert pools.scratch_page is not None
        self._pools = pools
        self._device = pools.device
        table_pages = most * -(-context_len // pools.page_size)
        self._entries = 1 + min(table_pages, _SHARED * pools.full_pages.capacity)
        model.reserve_positions(context_len)
        ids = torch.zeros(most, dtype=torch.int64, device=self._device)
        tables = model.ops.fixed_buffer(most, self._entries)
        self._steps = {
            size: _PaddedStep(model, pools, ids[:size], tables, context_len) for size in graph_sizes(most)
        }
        self.sizes = list(self._steps)
        scratch = pools.page_size * (pools.plan.full_token_bytes + pools.plan.swa_token_bytes)
        self.bytes = (ids.numel() + tables.numel()) * ids.itemsize + scratch
        self.steps = self.padded_rows = 0

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compute a batch of pads in each size."""
        assert self._pools.scratch_page is not None
        for step in self._steps.values():
            step.warm_up(self._pools.scratch_page)

    @torch.inference_mode()
    def capture(self, most_bytes: int, *, must: bool) -> None:
        """Record as many sizes as fit `most_bytes`; batches that none of them holds are not for us any more.

        One that can't be recorded is left out as well, or raises with `must`. Blocks.
        """
        begin_s, own, before = time.perf_counter(), self.bytes, self._reserved()
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        scratch_page = self._pools.scratch_page
        assert scratch_page is not None

        def capture(size: int) -> int:
            try:
                self._steps[size].capture(pool, stream, scratch_page)
            except RuntimeError as error:
                if must and not isinstance(error, torch.cuda.OutOfMemoryError):
                    raise
                logger.warning("the decode graph of %d rows can't be recorded: %s", size, error)
                return most_bytes + 1
            self.bytes = own + self._reserved() - before
            return self.bytes

        def undo(size: int) -> None:
            nonlocal pool
            self._steps[size].drop_graph()
            self.bytes = own + self._reserved() - before
            if not any(step.captured for step in self._steps.values()):
                pool = torch.cuda.graph_pool_handle()  # one that no graph uses is gone

        self.sizes = capture_within(self.sizes, most_bytes, capture, undo)
        left_out = ", ".join(str(size) for size in self._steps if size not in self.sizes)
        self._steps = {size: self._steps[size] for size in self.sizes}
        logger.info(
            "decode graphs: batch sizes %s in %.1f MB, recorded in %.1f s%s",
            ", ".join(map(str, self.sizes)) or "none",
            self.bytes / 1e6,
            time.perf_counter() - begin_s,
            f"; without {left_out}: cuda_graph_memory_mb allows {most_bytes / 1e6:.0f}" if left_out else "",
        )

    def place(self, spans: Sequence[Span]) -> DecodeRows | None:
        """Say where rows of one token stand; None when no size holds them or the tables are too short."""
        entries = 1 + sum(kv.count for kv, _, _ in spans)
        if padded_size(self.sizes, len(spans)) is None or entries > self._entries:
            return None
        listed, pages = list_spans(spans, at=1)
        return DecodeRows(listed, np.concatenate([[self._pools.scratch_page], *pages]))

    def forward(self, ids: torch.Tensor, rows: DecodeRows) -> torch.Tensor:
        """Store the KV of the tokens `ids` and return their hidden states, valid until the next call."""
        count = len(ids)
        size = padded_size(self.sizes, count)
        assert size is not None
        step = self._steps[size]
        step.fill(ids, rows)
        self.steps += 1
        self.padded_rows += size - count
        return step.forward()[:count]

    def figures(self) -> dict[str, float]:
        return {
            "graph_bytes": self.bytes,
            "graph_steps": self.steps,
            "graph_padded_rows": self.padded_rows,
        }

    def _reserved(self) -> int:
        """Return the bytes that torch holds of the device, caches it could give back left out."""
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device)


def wants_graphs(setting: str, device: torch.device) -> bool:
    """Tell whether decode steps shall run in fixed buffers. Raise ConfigError when they can't be recorded."""
    if setting == "on" and device.type != "cuda":
        raise ConfigError(f"cuda_graphs on: the device is {device}, graphs need CUDA")
    return setting in ("on", "padded") or (setting == "auto" and device.type == "cuda")


def make_graphs(
    model: CausalLM | FusedModel,
    pools: DualPools,
    context_len: int,
    *,
    setting: str,
    most: int,
    most_bytes: int,
) -> DecodeGraphs | None:
    """Return graphs for a model whose pools have a scratch page, None where its steps can't be recorded."""
    if not isinstance(model, FusedModel):
        # torch's experts and page tables ask the device for sizes, which no graph can do.
        if setting == "on":
            raise ConfigError("cuda_graphs on: the model runs on torch's kernels, graphs need the fused ones")
        logger.info("decode graphs: none, since torch's kernels compute this model")
        return None
    graphs = DecodeGraphs(model, pools, context_len, most)
    if setting != "padded":
        graphs.capture(most_bytes, must=setting == "on")
    else:
        graphs.warm_up()
        logger.info("decode steps: padded to sizes %s, not recorded", ", ".join(map(str, graphs.sizes)))
    return graphs
