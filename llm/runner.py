"""Runs one batch through the model: embeddings, paged attention, logits, sampling.

The engine thread prepares it, the device's computes. Knows what to compute, not why: which requests make up
a batch is the engine's and the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from transom.kernels.ops import Ints
from transom.llm.decode_graphs import DecodeGraphs, DecodeRows
from transom.llm.model.causal_lm import CausalLM
from transom.llm.model.fused import FusedModel, Placement
from transom.llm.paged_attention import PagedAttention, Span
from transom.llm.pools import DualPools, RequestKV
from transom.llm.request import Request
from transom.llm.sampler import Drawn, SamplerState, sample


@dataclass(frozen=True, slots=True)
class Step:
    """`count` tokens of one request from `begin` on, whose pages exist; the last gets a token if `samples`.

    `decoding` and `ahead` (the end of the prompt had not arrived yet) are as they were when it was planned.
    """

    request: Request
    begin: int
    count: int
    samples: bool
    decoding: bool
    ahead: bool


def pages_of(request: Request) -> RequestKV:
    """Return the pages of a running request."""
    assert request.kv is not None, f"{request.request_id} holds no pages"
    return request.kv


def _batch_order(step: Step) -> tuple[bool, int]:
    """Single tokens first, longest KV first, as PagedAttention wants them."""
    return step.count > 1, -pages_of(step.request).count


_Placed = Placement | DecodeRows | tuple[PagedAttention, Ints]


@dataclass(frozen=True, slots=True)
class Batch:
    """All that a step needs on the host, copied or built: requests may go on meanwhile.

    `fed` pairs rows with those of the draws of the batch before, where their token ids come from. `rows`,
    ascending, are those that get a token, `states` and `indices` their samplers and output indices;
    `place_of` says which of them is whose.
    """

    ids: Ints
    fed: Ints  # (n, 2)
    media: Sequence[tuple[torch.Tensor, torch.Tensor]]  # rows, and the embeddings that go there
    placement: _Placed
    rows: Ints
    states: Sequence[SamplerState]
    indices: Sequence[int]
    place_of: Mapping[Request, int]


class ModelRunner:
    """A model and the pools its attention reads and writes; `graphs` take steps of single tokens."""

    def __init__(
        self, model: CausalLM | FusedModel, pools: DualPools, graphs: DecodeGraphs | None = None
    ) -> None:
        self._model = model
        self._pools = pools
        self._graphs = graphs

    def prepare(self, steps: Sequence[Step], before: Batch | None) -> Batch:
        """Do what a step needs on the host, where what `before`, the last batch, draws may be unknown."""
        steps = sorted(steps, key=_batch_order)
        ids: list[int] = []
        fed: list[tuple[int, int]] = []
        media: list[tuple[torch.Tensor, torch.Tensor]] = []
        for step in steps:
            request, row = step.request, len(ids)
            if step.begin < request.known_len:
                ids += request.tokens(step.begin, step.begin + step.count)
            else:
                assert before is not None, f"{request.request_id} has no token at {step.begin}"
                fed.append((row, before.place_of[request]))
                ids.append(0)
            if request.embeddings:
                media += _media_rows(row, step)
        ends = np.cumsum([step.count for step in steps])
        due = [i for i, step in enumerate(steps) if step.samples]
        requests = [steps[i].request for i in due]
        return Batch(
            np.array(ids, np.int64),
            np.array(fed, np.int64).reshape(-1, 2),
            media,
            self._place(steps, single=not media and all(step.count == 1 and step.samples for step in steps)),
            ends[due] - 1,
            [request.sampler for request in requests if request.sampler is not None],
            [steps[i].begin + steps[i].count - len(steps[i].request.prompt_ids) for i in due],
            {request: place for place, request in enumerate(requests)},
        )

    @torch.inference_mode()
    def compute(self, batch: Batch, before: torch.Tensor | None) -> Drawn:
        """Store the KV of the batch's tokens and draw; `before` are the tokens drawn by the batch before.

        Computing the same steps again is harmless: it writes the same slots.
        """
        device = self._pools.device
        ids = _upload(batch.ids, device)
        if len(batch.fed):
            assert before is not None
            rows, places = _upload(batch.fed.T, device)
            ids.index_copy_(0, rows, before.index_select(0, places))
        if isinstance(batch.placement, DecodeRows):
            assert self._graphs is not None
            hidden = self._graphs.forward(ids, batch.placement)
        else:
            x = self._model.embed(ids)
            for index, part in batch.media:
                x.index_copy_(0, index.to(device), part.to(device, x.dtype))
            hidden = self._forward(x, batch)
        if not batch.states:
            return Drawn(torch.zeros(0, dtype=torch.int64, device=device))
        return sample(self._model.logits(hidden), batch.states, batch.indices)

    def figures(self) -> dict[str, float]:
        return self._graphs.figures() if self._graphs is not None else {}

    def _place(self, steps: Sequence[Step], *, single: bool) -> _Placed:
        if isinstance(self._model, FusedModel):
            spans = [(pages_of(step.request), step.begin, step.count) for step in steps]
            recorded = self._graphs.place(spans) if single and self._graphs is not None else None
            return recorded or self._model.place(self._pools, spans)
        attention = PagedAttention(
            self._pools,
            [Span(pages_of(step.request), step.begin, step.count) for step in steps],
            self._model.config.layers,
        )
        return attention, np.concatenate([np.arange(step.begin, step.begin + step.count) for step in steps])

    def _forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the hidden states of the batch's rows; x may be overwritten."""
        if isinstance(self._model, FusedModel):
            assert isinstance(batch.placement, Placement)
            return self._model.forward(x, batch.placement, batch.rows)
        assert isinstance(batch.placement, tuple)
        attention, positions = batch.placement
        hidden: torch.Tensor = self._model(x, _upload(positions, x.device), attention)
        return hidden.index_select(0, _upload(batch.rows, x.device))


def make_current(device: torch.device) -> None:
    """Make a numbered GPU this thread's own: Triton launches on the current one, wherever its tensors are."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def _upload(array: Ints, device: torch.device) -> torch.Tensor:
    """Copy without waiting for what the device computes now; on a CPU it shares the array's memory."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)


def _media_rows(row: int, step: Step) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the rows of media that replace the embeddings of their pads, as far as this chunk goes."""
    begin, end = step.begin, step.begin + step.count
    found = []
    for part in step.request.embeddings:
        if part.positions[-1] < begin or part.positions[0] >= end:
            continue
        low, high = torch.searchsorted(part.positions, torch.tensor([begin, end])).tolist()
        found.append((part.positions[low:high] - begin + row, part.rows[low:high]))
    return found
