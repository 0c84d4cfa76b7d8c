"""Rotary position embedding over the leading dims of a head, half-split (any process that runs a model)."""

from __future__ import annotations

import torch


def rope_table(positions: torch.Tensor, theta: float, rotary_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cos, sin), each (tokens, rotary_dim / 2) in fp32, for integer `positions` (tokens,)."""
    steps = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=positions.device)
    angles = positions.to(torch.float32)[:, None] * (theta ** (-steps / rotary_dim))
    return angles.cos(), angles.sin()


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first 2 * cos.shape[-1] dims of x (tokens, heads, head_dim); the other dims pass unchanged.

    Dim i turns with dim i + rotary_dim / 2. The rotation is done in fp32 whatever the dtype of x: in bf16 the
    angle of a late position would lose more than the value it rotates.
    """
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    first, second, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    low, high = first.float(), second.float()
    return torch.cat(
        [(low * cos - high * sin).to(x.dtype), (high * cos + low * sin).to(x.dtype), rest], dim=-1
    )
