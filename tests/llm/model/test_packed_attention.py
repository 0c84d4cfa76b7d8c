"""Packing requests together must not change any of them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transom.llm.model.attention import PackedAttention
from transom.llm.model.spec import LayerSpec

SPEC = LayerSpec(
    full=False, heads=4, kv_heads=2, head_dim=8, v_head_dim=6, rotary_dim=4, rope_theta=1e4, window=4,
    has_sink=True, moe=False, intermediate=1, scale=0.3,
)  # fmt: skip


@settings(deadline=None)
@given(st.lists(st.integers(1, 24), min_size=1, max_size=8), st.booleans())
def test_packed_equals_alone(seq_lens: list[int], full: bool) -> None:
    spec = dataclasses.replace(SPEC, full=True, window=None, has_sink=False) if full else SPEC
    generator = torch.Generator().manual_seed(sum(seq_lens))
    total = sum(seq_lens)
    q = torch.randn(total, 4, 8, generator=generator)
    k = torch.randn(total, 2, 8, generator=generator)
    v = torch.randn(total, 2, 6, generator=generator)
    sink = None if full else torch.randn(4, generator=generator)
    packed = PackedAttention(seq_lens).attend(0, spec, q, k, v, sink)
    alone = torch.cat(
        [
            PackedAttention([len(rows)]).attend(0, spec, q[rows], k[rows], v[rows], sink)
            for rows in torch.arange(total).split(seq_lens)
        ]
    )
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seq_lens", [[], [3, 0]])
def test_empty_requests_are_refused(seq_lens: list[int]) -> None:
    with pytest.raises(ValueError, match="positive"):
        PackedAttention(seq_lens)
