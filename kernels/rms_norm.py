"""RMSNorm (used by every model; any process that runs one)."""

from __future__ import annotations

import torch
from torch.nn import functional


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale the last axis to unit root mean square, then by `weight`.

    torch's fused kernel keeps the sum of squares in fp32 and does forward and backward in one pass each: on a
    2-core AVX2 machine it halves the time of the same formula spelt in tensor operations.
    """
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)
