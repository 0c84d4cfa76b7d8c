"""Mixture of experts: sigmoid routing with a selection bias, SwiGLU experts (llm processes, trainer).

One matmul pair per expert over the rows routed to it; no per-token work outside torch.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def route_tokens(
    logits: torch.Tensor, correction_bias: torch.Tensor, top_k: int, *, normalise: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose `top_k` experts per token: (weights fp32, expert ids), each (tokens, top_k).

    The bias balances the load: it takes part in the choice only, never in the weight.
    """
    scores = logits.sigmoid()
    experts = (scores.detach() + correction_bias).topk(top_k, dim=-1, sorted=False).indices
    weights = scores.gather(-1, experts)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, experts


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for rows that hold [gate | up]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def run_experts(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Return sum over the chosen experts of weight * expert(x), shape of x (tokens, hidden).

    gate_up is (experts, 2 * intermediate, hidden), down (experts, hidden, intermediate). Rows are sorted by
    expert so that each expert is two matmuls over one contiguous slice; `unbind` and `split` rather than
    indexing, because their backward is one stack and one concatenation.
    """
    top_k = experts.shape[-1]
    flat = experts.flatten()
    if not flat.numel():
        return torch.zeros_like(x)
    if x.shape[0] <= 2 * gate_up.shape[0] and gate_up.numel() <= _SMALL_WEIGHTS:
        return _run_all_experts(x, weights, experts, gate_up, down)
    order = flat.argsort(stable=True)
    rows = order // top_k
    counts = torch.bincount(flat, minlength=gate_up.shape[0]).tolist()
    parts = torch.split(x.index_select(0, rows), counts)
    outputs = [
        functional.linear(swiglu(functional.linear(part, up)), out)
        for part, up, out in zip(parts, gate_up.unbind(0), down.unbind(0))
        if part.shape[0]
    ]
    weighted = torch.cat(outputs) * weights.flatten().index_select(0, order)[:, None].to(x.dtype)
    return torch.zeros_like(x).index_add(0, rows, weighted)


# Experts this small stay in the cache, where computing all of them for a few rows is cheaper than sorting the
# rows by expert: 0.10 against 0.23 ms for one row, 0.27 against 0.46 for 16 (8 experts of 3 x 128 x 96, one
# 2.4 GHz EPYC core); above 32 rows it is the other way round.
_SMALL_WEIGHTS = 1 << 20


def _run_all_experts(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Compute every expert for every row and weight those that were not chosen by zero."""
    shares = x.new_zeros(x.shape[0], gate_up.shape[0]).scatter(1, experts, weights.to(x.dtype))
    hidden = swiglu(torch.matmul(x, gate_up.transpose(1, 2)))  # (experts, tokens, intermediate)
    return torch.matmul(hidden * shares.t()[:, :, None], down.transpose(1, 2)).sum(0)
