"""K and V as stored rows: the torch reference against e4m3 by hand, and the compiled kernels against it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from transom.kernels.kv_rows import FP8, all_finite, from_rows, row_dim, stored_dtype, stored_size, to_rows
from transom.kernels.native_ops import NativeOps

# Every e4m3 number that is not negative: zero, seven subnormals, and eight steps an octave up to 448.
E4M3 = [i * 2.0**-9 for i in range(8)] + [
    (1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8) if (e, m) < (8, 7)
]


def test_an_fp8_row_is_the_nearest_e4m3_numbers_of_its_largest_value() -> None:
    x = torch.randn(200, 48, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 6, 200)[:, None]
    rows = to_rows(x, stored_dtype(FP8))
    assert rows.shape == (200, stored_size(48, FP8))
    assert rows.dtype == torch.uint8
    assert row_dim(rows) == 48
    scale = x.abs().amax(-1, keepdim=True).double() / 448
    grid = torch.tensor([-value for value in E4M3[:0:-1]] + E4M3, dtype=torch.float64)
    nearest = (x.double()[..., None] / scale[..., None] - grid).abs().amin(-1)
    found = (from_rows(rows, torch.float64) / scale - x.double() / scale).abs()
    torch.testing.assert_close(found, nearest, atol=1e-4, rtol=1e-4)
    # Half a step of 2^-3 of each number, or of the smallest numbers half of 2^-9 of a 448th of the largest.
    assert bool((found <= x.double().abs() / scale / 16 * 1.0001 + 2.0**-10).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_rows_are_the_values_themselves(dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(2)).to(dtype)
    assert (stored_dtype(dtype), stored_size(5, dtype), row_dim(x)) == (dtype, 5, 5)
    assert torch.equal(from_rows(to_rows(x, dtype), torch.float64), x.double())
    assert all_finite(x)
    assert not all_finite(x / 0)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_is_nan_and_alone(wrong: float) -> None:
    x = torch.ones(3, 8)
    x[1, 2] = wrong
    rows = to_rows(x, torch.uint8)
    assert from_rows(rows, torch.float32)[1].isnan().all()
    assert torch.equal(from_rows(rows, torch.float32)[[0, 2]], torch.ones(2, 8))
    assert not all_finite(rows)
    assert all_finite(rows[[0, 2]])


def test_zeros_stay_zeros_and_tiny_rows_stay_finite() -> None:
    x = torch.stack([torch.zeros(4), torch.full((4,), 1e-44), torch.full((4,), 3e38)])
    back = from_rows(to_rows(x, torch.uint8), torch.float32)
    assert not back[0].any()
    assert back.isfinite().all()
    assert not to_rows(x[:1], torch.uint8).any()


@pytest.mark.parametrize("lanes", [4, 8, 20, 48])
def test_compiled_rows_are_the_reference_byte_for_byte(native_ops: NativeOps, lanes: int) -> None:
    """V passes through unchanged, so that what is stored is to_rows of what came; attention reads it back."""
    generator = torch.Generator().manual_seed(lanes)
    v = torch.randn(64, lanes, generator=generator) * torch.logspace(-5, 5, 64)[:, None]
    v[3], v[4, 1] = 0.0, float("nan")
    v[5, 0] = -0.0
    qkv = torch.cat([torch.ones(64, 2 * lanes), v], -1)
    spans, pages = np.array([[0, 0, 64, 0]]), np.arange(1, 65)
    tables = native_ops.tables(spans, pages, np.zeros(65, np.int64), 1)
    size = stored_size(lanes, FP8)
    k_rows, v_rows = torch.zeros(1, 65, size, dtype=torch.uint8), torch.zeros(1, 65, size, dtype=torch.uint8)
    cos, sin = torch.ones(64, 2), torch.zeros(64, 2)
    native_ops.rope_and_store(qkv, 1, cos, sin, (k_rows, v_rows), tables, full=True)
    expected = to_rows(v, torch.uint8)
    fine = torch.arange(64) != 4
    assert torch.equal(v_rows[0, 1:][fine], expected[fine])
    assert from_rows(v_rows[0, 5], torch.float32).isnan().all()
    out = native_ops.attention(
        torch.ones(1, lanes), 1, (k_rows, v_rows),
        native_ops.tables(np.array([[0, 0, 1, 7]]), pages, np.zeros(65, np.int64), 1),
        full=True, scale=1.0, window=None, sink=None,
    )  # fmt: skip
    torch.testing.assert_close(out, from_rows(expected[7:8], torch.float32), atol=0, rtol=1e-6)
