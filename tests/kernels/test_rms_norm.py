"""RMSNorm against its formula."""

from __future__ import annotations

import pytest
import torch

from transom.kernels.rms_norm import rms_norm


@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
def test_formula(scale: float) -> None:
    x = torch.randn(7, 33) * scale
    weight = torch.randn(33)
    exact = x.double()
    expected = exact / (exact.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), expected, atol=1e-5, rtol=1e-5)


def test_bf16_sums_in_fp32() -> None:
    x = torch.randn(3, 4096).bfloat16()
    weight = torch.ones(4096, dtype=torch.bfloat16)
    out = rms_norm(x, weight, 1e-5)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), rms_norm(x.float(), weight.float(), 1e-5), atol=1e-2, rtol=8e-3)
