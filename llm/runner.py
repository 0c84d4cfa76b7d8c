"""Runs one batch through the model: embeddings, paged attention, logits, sampling (engine thread).

Knows what to compute, not why: which requests make up a batch is the engine's and the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from transom.kernels.ops import Ints
from transom.llm.model.causal_lm import CausalLM
from transom.llm.model.fused import FusedModel
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

    def __init__(self, model: CausalLM | FusedModel, pools: DualPools) -> None:
        self._model = model
        self._pools = pools

    @torch.inference_mode()
    def run(self, steps: Sequence[Step]) -> dict[str, Draw]:
        """Store the KV of the steps' tokens; return the draw of each request that was due one.

        Running the same step again is harmless: it writes the same slots.
        """
        steps = sorted(steps, key=_batch_order)
        ids: list[int] = []
        for request, count in ((step.request, step.count) for step in steps):
            ids += request.tokens(request.computed, request.computed + count)
        x = self._model.embed(torch.tensor(ids, device=self._pools.device))
        row = 0
        for step in steps:
            if step.request.embeddings:
                _place_embeddings(x, row, step)
            row += step.count
        ends = np.cumsum([step.count for step in steps])
        due = [i for i, step in enumerate(steps) if step.samples]
        hidden = self._forward(x, steps, ends[due] - 1)
        return self._sample([steps[i].request for i in due], hidden)

    def _forward(self, x: torch.Tensor, steps: Sequence[Step], rows: Ints) -> torch.Tensor:
        """Return the hidden states of `rows`; x may be overwritten."""
        if isinstance(self._model, FusedModel):
            spans = [(pages_of(step.request), step.request.computed, step.count) for step in steps]
            return self._model.forward(x, self._model.place(self._pools, spans), rows)
        at = [np.arange(step.request.computed, step.request.computed + step.count) for step in steps]
        positions = torch.from_numpy(np.concatenate(at)).to(x.device)
        attention = PagedAttention(
            self._pools,
            [Span(pages_of(step.request), step.request.computed, step.count) for step in steps],
            self._model.config.layers,
        )
        hidden: torch.Tensor = self._model(x, positions, attention)
        return hidden.index_select(0, torch.from_numpy(rows).to(x.device))

    def _sample(self, due: Sequence[Request], hidden: torch.Tensor) -> dict[str, Draw]:
        if not due:
            return {}
        states = [request.sampler for request in due if request.sampler is not None]
        draws = sample(self._model.logits(hidden), states, [len(request.output_ids) for request in due])
        return {request.request_id: drawn for request, drawn in zip(due, draws, strict=True)}


def _place_embeddings(x: torch.Tensor, row: int, step: Step) -> None:
    """Put the rows of media over the embeddings of their pads, as far as this chunk covers them."""
    begin = step.request.computed
    for part in step.request.embeddings:
        if part.positions[-1] < begin or part.positions[0] >= begin + step.count:
            continue
        low, high = torch.searchsorted(part.positions, torch.tensor([begin, begin + step.count])).tolist()
        index = (part.positions[low:high] - begin + row).to(x.device)
        x.index_copy_(0, index, part.rows[low:high].to(x.device, x.dtype))
