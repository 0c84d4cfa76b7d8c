"""Rotary embedding against multiplication by a complex number."""

from __future__ import annotations

import pytest
import torch

from transom.kernels.rope import apply_rope, rope_table


@pytest.mark.parametrize(("rotary_dim", "theta"), [(8, 1e4), (10, 1e6), (24, 5e6)])
def test_rotation_is_a_complex_product(rotary_dim: int, theta: float) -> None:
    positions = torch.tensor([0, 1, 7, 4000, 33])
    x = torch.randn(5, 3, 24)
    out = apply_rope(x, *rope_table(positions, theta, rotary_dim))

    half = rotary_dim // 2
    paired = torch.complex(x[..., :half].double(), x[..., half:rotary_dim].double())
    frequencies = torch.tensor([theta ** (-2 * i / rotary_dim) for i in range(half)], dtype=torch.float64)
    turned = paired * torch.exp(1j * positions[:, None, None] * frequencies)
    expected = torch.cat([turned.real, turned.imag, x[..., rotary_dim:].double()], dim=-1)
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=0)  # fp32 angles at position 4000
    torch.testing.assert_close(out[:3].double(), expected[:3], atol=1e-5, rtol=1e-5)


def test_scores_depend_on_distance_only() -> None:
    q, k = torch.randn(1, 1, 16), torch.randn(1, 1, 16)

    def score(at: int, other: int) -> torch.Tensor:
        turned_q = apply_rope(q, *rope_table(torch.tensor([at]), 1e4, 16))
        turned_k = apply_rope(k, *rope_table(torch.tensor([other]), 1e4, 16))
        return (turned_q * turned_k).sum()

    torch.testing.assert_close(score(9, 4), score(105, 100), atol=1e-4, rtol=1e-4)
    assert not torch.isclose(score(9, 4), score(9, 5))


def test_half_precision_rotates_in_fp32() -> None:
    x = torch.randn(4, 2, 16)
    tables = rope_table(torch.tensor([100_000, 3, 20, 900]), 1e4, 16)
    rounded = x.bfloat16()
    out = apply_rope(rounded, *tables)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, apply_rope(rounded.float(), *tables).bfloat16())
