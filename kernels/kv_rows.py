"""Rows of K and V as the pools store them: as they are, rounded to bf16, or in fp8 with a scale of their own.

The torch reference of what the fused kernels do on their way to and from the pools; used by the engine thread
and by hand-over. An fp8 row is `dim` bytes of e4m3 and the fp32 scale of the row behind them.
"""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
SCALE_BYTES = 4
_MOST = 448.0  # the largest number of e4m3


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the tensors that hold KV of `dtype`: fp8 rows are bytes."""
    return torch.uint8 if dtype == FP8 else dtype


def stored_size(dim: int, dtype: torch.dtype) -> int:
    """Return the elements of a stored row."""
    if dtype != FP8:
        return dim
    assert dim % SCALE_BYTES == 0, f"fp8 rows of {dim} values would leave their scales unaligned"
    return dim + SCALE_BYTES


def row_dim(rows: torch.Tensor) -> int:
    """Return how many values stored rows (..., stored size) have."""
    return rows.shape[-1] - (SCALE_BYTES if rows.dtype == torch.uint8 else 0)


def to_rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return x (..., dim) as rows of the stored `dtype`. What is not finite stays so, with its whole row."""
    if dtype != torch.uint8:
        return x.to(dtype)
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True) / _MOST
    scaled = (x / scale.masked_fill(scale == 0, 1.0)).clamp(-_MOST, _MOST)
    return torch.cat([scaled.to(FP8).view(torch.uint8), scale.view(torch.uint8)], -1)


def from_rows(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of stored rows, (..., dim)."""
    if rows.dtype != torch.uint8:
        return rows.to(dtype)
    return (rows[..., :-SCALE_BYTES].view(FP8).float() * _scales(rows)).to(dtype)


def all_finite(rows: torch.Tensor) -> bool:
    """Tell whether no stored row holds a NaN or an infinity."""
    return bool((rows if rows.dtype != torch.uint8 else _scales(rows)).isfinite().all())


def _scales(rows: torch.Tensor) -> torch.Tensor:
    return rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
