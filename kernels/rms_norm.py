"""RMSNorm (used by every model; any process that runs one)."""

from __future__ import annotations

import torch
from torch.nn import functional


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale the last axis to unit root mean square, then by `weight`; the squares are summed in fp32.

    torch's own op is one kernel on CUDA. On CPU it times like the formula spelt out (0.4 ms forward, 5-6
    ms with backward for 4,096 x 192 on one AVX2 core), so nothing is gained by writing it here.
    """
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)
