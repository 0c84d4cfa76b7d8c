"""fp8 block scales and the interleaved qkv layout, spelt out in loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transom.errors import CheckpointError
from transom.kernels.weights import dequantise, fused_qkv_order, grid_shape


@settings(deadline=None, max_examples=50)
@given(
    grid=st.lists(st.integers(1, 11), min_size=1, max_size=4),
    columns=st.integers(1, 11),
    block=st.tuples(st.integers(1, 5), st.integers(1, 5)),
)
def test_dequantise(grid: list[int], columns: int, block: tuple[int, int]) -> None:
    rows = sum(grid)
    shape = grid_shape(grid, (rows, columns), block)
    weight = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    scale = torch.rand(shape) + 0.1
    expected = torch.empty(rows, columns)
    row = scale_row = 0
    for segment in grid:
        for r in range(segment):
            for c in range(columns):
                factor = scale[scale_row + r // block[0], c // block[1]]
                expected[row + r, c] = weight[row + r, c].float() * factor
        row += segment
        scale_row += -(-segment // block[0])
    assert scale_row == shape[0]
    torch.testing.assert_close(dequantise(weight, scale, grid, block), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("sizes", "shards", "expected"),
    [
        ((64 * 192, 4 * 192, 4 * 128), 4, (108, 32)),  # V2.5, full layers
        ((64 * 192, 8 * 192, 8 * 128), 4, (116, 32)),  # V2.5, SWA layers
    ],
)
def test_published_scale_shapes(sizes: tuple[int, int, int], shards: int, expected: tuple[int, int]) -> None:
    rows = sum(sizes)
    assert grid_shape((rows // shards,) * shards, (rows, 4096), (128, 128)) == expected


@given(
    shards=st.integers(1, 5),
    per_shard=st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4)),
)
def test_fused_order_gathers_each_shard(shards: int, per_shard: tuple[int, int, int]) -> None:
    q, k, v = (
        [f"{name}{shard}.{i}" for shard in range(shards) for i in range(count)]
        for name, count in zip("qkv", per_shard)
    )
    stored = []
    for shard in range(shards):
        for rows, count in zip((q, k, v), per_shard):
            stored += rows[shard * count : (shard + 1) * count]
    order = fused_qkv_order([len(q), len(k), len(v)], shards)
    assert [stored[i] for i in order.tolist()] == q + k + v


def test_rows_must_divide_into_shards() -> None:
    with pytest.raises(CheckpointError, match="3 shards"):
        fused_qkv_order([6, 3, 4], 3)
