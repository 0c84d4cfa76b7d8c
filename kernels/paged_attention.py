"""Attention over paged KV with optional window and sink: the torch reference (llm processes).

Decode and chunked prefill are the same operation on different shapes. Knows no requests: the caller says
which pages each row reads, and which of their slots each query sees.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from transom.kernels.kv_rows import from_rows


def paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    pages: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    scale: float,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """Attend from q (batch, queries, heads, head_dim) to gathered pages; (batch, queries, heads, v_head_dim).

    k_pages (kv_heads, pages in the pool, page_size, head_dim) and v_pages alike, or stored rows (kv_rows.py);
    `pages` (batch, n) lists the pages of each row, keys = n * page_size. `bias` (batch, queries, keys) is 0
    where a query sees a key, else -inf; None means causal with query i at key i. With a `sink` (heads) the
    first page must be all zeros: its first slot takes the sink's place in the softmax, where a V of zeros
    makes it worth nothing.
    """
    batch, count = pages.shape
    kv_heads, _, page_size, _ = k_pages.shape
    flat = pages.flatten()
    keys = count * page_size
    k, v = (
        from_rows(x.index_select(1, flat), q.dtype).view(kv_heads, batch, keys, -1)
        for x in (k_pages, v_pages)
    )
    if sink is None and q.shape[1] > 1:
        return _fused(q, k, v, bias, scale)
    assert bias is not None
    return _explicit(q, k, v, bias, scale, sink)


def _fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """torch's blockwise kernel never holds all scores; it takes one head size, so the smaller is padded."""
    queries, v_head_dim = q.shape[1], v.shape[-1]
    if bias is None:
        k, v = k[:, :, :queries], v[:, :, :queries]
    size = max(q.shape[-1], v_head_dim)
    q, k, v = (functional.pad(x, (0, size - x.shape[-1])) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(0, 1),
        v.transpose(0, 1),
        attn_mask=None if bias is None else bias[:, None].to(q.dtype),
        is_causal=bias is None,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[0],
    )
    return out[..., :v_head_dim].transpose(1, 2)


def _explicit(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    scale: float,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    batch, queries, heads, head_dim = q.shape
    kv_heads, _, keys, v_head_dim = v.shape
    group = heads // kv_heads
    # The query heads of one KV head become rows of one matrix, so K and V are never repeated in memory.
    rows = (q * scale).view(batch, queries, kv_heads, group, head_dim).permute(2, 0, 3, 1, 4)
    rows = rows.reshape(kv_heads * batch, group * queries, head_dim)
    scores = torch.bmm(rows, k.view(kv_heads * batch, keys, head_dim).transpose(1, 2)).float()
    scores = scores.view(kv_heads, batch, group, queries, keys) + bias[None, :, None]
    if sink is not None:
        scores[..., 0] = sink.float().view(kv_heads, 1, group, 1)
    weights = scores.softmax(-1).to(v.dtype).view(kv_heads * batch, group * queries, keys)
    out = torch.bmm(weights, v.view(kv_heads * batch, keys, v_head_dim))
    out = out.view(kv_heads, batch, group, queries, v_head_dim).permute(1, 3, 0, 2, 4)
    return out.reshape(batch, queries, heads, v_head_dim)
