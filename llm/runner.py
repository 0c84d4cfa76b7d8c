"""Runs one batch through the model: embeddings, paged attention, logits, sampling (engine thread).

Knows what to compute, not why: which requests make up a batch is the engine's and the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from transom.llm.model.causal_lm import CausalLM
from transom.llm.paged_attention import PagedAttention, Span
from transom.llm.pools import DualPools, RequestKV
from transom.llm.request import Request
from transom.llm.sampler import Draw, sample


@dataclass(frozen=True, slots=True)
class Step:
    """The next `count` tokens of one request, whose pages exist; its last row gets a token if `samples`."""

    request: Request
    count: int
    samples: bool


def pages_of(request: Request) -> RequestKV:
    """Return the pages of a running request."""
    assert request.kv is not None, f"{request.request_id} holds no pages"
    return request.kv


def _batch_order(step: Step) -> tuple[bool, int]:
    """Single tokens first, longest KV first, as PagedAttention wants them."""
    return step.count > 1, -pages_of(step.request).count


class ModelRunner:
    """A model and the pools its attention reads and writes."""

    def __init__(self, model: CausalLM, pools: DualPools) -> None:
        self._model = model
        self._pools = pools

    @torch.inference_mode()
    def run(self, steps: Sequence[Step]) -> dict[str, Draw]:
        """Store the KV of the steps' tokens; return the draw of each request that was due one.

        Running the same step again is harmless: it writes the same slots.
        """
        steps = sorted(steps, key=_batch_order)
        device = self._pools.device
        ids: list[int] = []
        positions: list[int] = []
        for request, count in ((step.request, step.count) for step in steps):
            ids += request.tokens(request.computed, request.computed + count)
            positions += range(request.computed, request.computed + count)
        x = self._model.embed(torch.tensor(ids, device=device))
        row = 0
        for step in steps:
            _place_embeddings(x, row, step)
            row += step.count
        spans = [Span(pages_of(step.request), step.request.computed, step.count) for step in steps]
        attention = PagedAttention(self._pools, spans, self._model.config.layers)
        hidden = self._model(x, torch.tensor(positions, device=device), attention)
        return self._sample(steps, hidden)

    def _sample(self, steps: Sequence[Step], hidden: torch.Tensor) -> dict[str, Draw]:
        ends = torch.tensor([step.count for step in steps]).cumsum(0).tolist()
        due = [(step.request, end - 1) for step, end in zip(steps, ends) if step.samples]
        if not due:
            return {}
        rows = torch.tensor([row for _, row in due], device=hidden.device)
        logits = self._model.logits(hidden.index_select(0, rows))
        states = [request.sampler for request, _ in due if request.sampler is not None]
        draws = sample(logits, states, [len(request.output_ids) for request, _ in due])
        return {request.request_id: drawn for (request, _), drawn in zip(due, draws, strict=True)}


def _place_embeddings(x: torch.Tensor, row: int, step: Step) -> None:
    """Put the rows of media over the embeddings of their pads, as far as this chunk covers them."""
    begin = step.request.computed
    for part in step.request.embeddings:
        if part.positions[-1] < begin or part.positions[0] >= begin + step.count:
            continue
        low, high = torch.searchsorted(part.positions, torch.tensor([begin, begin + step.count])).tolist()
        index = (part.positions[low:high] - begin + row).to(x.device)
        x.index_copy_(0, index, part.rows[low:high].to(x.device, x.dtype))
