"""Causal attention with optional window and sink over batches of equal-length requests: the torch reference.

Used by the trainer and as the oracle for paged backends. Differentiable in q, k, v and sink.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend causally, every request in full: O(T^2) unless `window` allows the banded form.

    q is (batch, T, heads, head_dim), k (batch, T, kv_heads, head_dim), v (batch, T, kv_heads, v_head_dim),
    sink (heads); the result (batch, T, heads, v_head_dim). A query sees itself and `window` - 1 keys before.
    The sink adds exp(sink) to the softmax's denominator and has no value.
    """
    length = q.shape[1]
    if window is not None and length > 2 * window:
        return _banded(q, k, v, scale=scale, window=window, sink=sink)
    if sink is None and (window is None or window >= length):
        return _flash(q, k, v, scale=scale)
    index = torch.arange(length, device=q.device)
    distance = index[:, None] - index
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return _explicit(q, k, v, seen, scale=scale, sink=sink)


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> torch.Tensor:
    """torch's fused kernel; it takes one head size only, so v is padded with zeros up to head_dim."""
    v_head_dim = v.shape[-1]
    wide = max(0, q.shape[-1] - v_head_dim)
    out = functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        functional.pad(v, (0, wide)).transpose(1, 2),
        is_causal=True,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out[..., :v_head_dim].transpose(1, 2)


def _explicit(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    *,
    scale: float,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """Spell the softmax out; `seen` is (queries, keys) or (batch, queries, keys).

    The query heads of one KV head are stacked as rows, so that K and V are never repeated in memory.
    """
    batch, queries, heads, head_dim = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    group = heads // kv_heads
    rows = q.view(batch, queries, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    rows = rows.reshape(batch, kv_heads, group * queries, head_dim) * scale
    scores = torch.matmul(rows, k.permute(0, 2, 3, 1)).float()  # (batch, kv_heads, group * queries, keys)
    scores = scores.view(batch, kv_heads, group, queries, keys)
    scores = scores.masked_fill(~(seen if seen.dim() == 2 else seen[:, None, None]), float("-inf"))
    if sink is not None:
        column = sink.float().view(1, kv_heads, group, 1, 1).expand(batch, -1, -1, queries, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1)[..., :keys].to(v.dtype)
    out = torch.matmul(weights.reshape(batch, kv_heads, group * queries, keys), v.transpose(1, 2))
    out = out.view(batch, kv_heads, group, queries, v.shape[-1])
    return out.permute(0, 3, 1, 2, 4).reshape(batch, queries, heads, v.shape[-1])


def _banded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    window: int,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """Cut into chunks of window - 1 tokens, each of which sees itself and the one before: O(T * window)."""
    batch, length = q.shape[:2]
    chunk = max(window - 1, 1)
    chunks = -(-length // chunk)
    pad = chunks * chunk - length
    q = functional.pad(q, (0, 0, 0, 0, 0, pad)).view(batch * chunks, chunk, *q.shape[2:])
    k, v = (_with_previous(x, chunk, chunks) for x in (k, v))
    index = torch.arange(chunk, device=q.device)
    distance = index[:, None] + chunk - torch.arange(2 * chunk, device=q.device)
    seen = ((distance >= 0) & (distance < window)).repeat(chunks, 1, 1)
    seen[0, :, :chunk] = False  # nothing stands before the first chunk
    out = _explicit(q, k, v, seen.repeat(batch, 1, 1), scale=scale, sink=sink)
    return out.reshape(batch, chunks * chunk, *out.shape[2:])[:, :length]


def _with_previous(x: torch.Tensor, chunk: int, chunks: int) -> torch.Tensor:
    """Put each chunk behind the one before it: (batch * chunks, 2 * chunk, heads, dim)."""
    batch, length = x.shape[:2]
    padded = functional.pad(x, (0, 0, 0, 0, chunk, chunks * chunk - length))
    pieces = padded.view(batch, chunks + 1, chunk, *x.shape[2:])
    return torch.cat([pieces[:, :-1], pieces[:, 1:]], dim=2).flatten(0, 1)
