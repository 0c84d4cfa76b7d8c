from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transom.encoder.models import attention
from transom.encoder.models.attention import Segments, Window, segment_attention


def naive(q, k, v, lens, window, sink, first_key_sink):
    """One query, one head, one segment at a time, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    groups = q.shape[1] // k.shape[1]
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    start = 0
    for length in lens:
        for head in range(q.shape[1]):
            for i in range(length):
                low = 0 if window.back is None else max(0, i - window.back)
                high = length - 1 if window.ahead is None else min(length - 1, i + window.ahead)
                keys = k[start + low : start + high + 1, head // groups]
                logits = keys @ q[start + i, head] / math.sqrt(q.shape[2])
                extra = torch.zeros(1, dtype=torch.float64)
                if sink is not None and first_key_sink and low == 0:
                    logits = torch.cat((logits[:1] + sink[head].double(), logits[1:]))
                weights = logits.exp()
                if sink is not None and not first_key_sink:
                    extra = sink[head].double().exp()
                weights = weights / (weights.sum() + extra)
                out[start + i, head] = weights @ v[start + low : start + high + 1, head // groups]
        start += length
    return out


def inputs(tokens, heads=4, kv_heads=2, dim=8, v_dim=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((tokens, heads, dim), (tokens, kv_heads, dim), (tokens, kv_heads, v_dim))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q, k, v, torch.randn(heads, generator=generator)


limits = st.one_of(st.none(), st.integers(0, 9))


@settings(max_examples=60, deadline=None)
@given(
    lens=st.lists(st.integers(1, 14), min_size=1, max_size=5),
    back=limits,
    ahead=limits,
    sink_kind=st.sampled_from(["none", "first_key", "denominator"]),
    v_dim=st.sampled_from([4, 8, 20]),
)
def test_equals_a_loop_over_queries(lens, back, ahead, sink_kind, v_dim):
    segments, order = Segments.sort(lens)
    lens = [lens[index] for index in order]
    q, k, v, sink = inputs(sum(lens), v_dim=v_dim)
    sink = None if sink_kind == "none" else sink
    first = sink_kind == "first_key"
    got = segment_attention(q, k, v, segments, Window(back, ahead), sink, first)
    expected = naive(q, k, v, lens, Window(back, ahead), sink, first)
    torch.testing.assert_close(got.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("length", [129, 256, 300])
@pytest.mark.parametrize("window", [Window(5, 5), Window(20, 0), Window(0, 7), Window(70, 70)])
@pytest.mark.parametrize("first_key_sink", [True, False])
def test_banded_form_equals_the_dense_one(monkeypatch, length, window, first_key_sink):
    segments = Segments(((2, length),))
    q, k, v, sink = inputs(2 * length)
    tensors = [t.requires_grad_() for t in (q, k, v, sink)]
    weight = torch.randn(2 * length, 4, 8, generator=torch.Generator().manual_seed(3))
    results = []
    for threshold in (10_000, 150 if window.back == 70 else 100):
        monkeypatch.setattr(attention, "BAND_FROM_LEN", threshold)
        out = segment_attention(q, k, v, segments, window, sink, first_key_sink)
        results.append((out, torch.autograd.grad((out * weight).sum(), tensors)))
    (dense, dense_grads), (banded, banded_grads) = results
    torch.testing.assert_close(banded, dense, atol=2e-6, rtol=1e-5)
    for got, expected in zip(banded_grads, dense_grads, strict=True):
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


def test_banded_memory_is_linear_in_the_length(monkeypatch):
    calls = []
    real = torch.nn.functional.scaled_dot_product_attention

    def spy(q, k, v, **kwargs):
        calls.append((tuple(q.shape), tuple(k.shape)))
        return real(q, k, v, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    q, k, v, sink = inputs(4096)
    segment_attention(q, k, v, Segments(((1, 4096),)), Window(16, 16), sink)
    assert calls == [((32, 4, 128, 16), (32, 4, 160, 16))]


def test_masks_made_in_inference_mode_serve_training():
    segments = Segments(((1, 11),))
    q, k, v, sink = inputs(11)
    with torch.inference_mode():
        segment_attention(q, k, v, segments, Window(2, 2), sink)
    q.requires_grad_()
    out = segment_attention(q, k, v, segments, Window(2, 2), sink)
    assert torch.autograd.grad(out.sum(), q)[0].abs().sum() > 0
