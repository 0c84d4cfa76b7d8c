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
