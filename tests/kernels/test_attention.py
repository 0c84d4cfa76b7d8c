"""The batched attention reference against one query at a time in float64, gradients included."""

from __future__ import annotations

import math

import pytest
import torch

from transom.kernels.attention import dense_attention


def one_query_at_a_time(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    batch, length, heads, _ = q.shape
    group = heads // k.shape[2]
    rows = []
    for b in range(batch):
        for t in range(length):
            first = 0 if window is None else max(0, t - window + 1)
            for h in range(heads):
                keys, values = k[b, first : t + 1, h // group], v[b, first : t + 1, h // group]
                exps = (keys @ q[b, t, h] * scale).exp()
                total = exps.sum() if sink is None else exps.sum() + sink[h].exp()
                rows.append((exps[:, None] * values).sum(0) / total)
    return torch.stack(rows).view(batch, length, heads, v.shape[-1])


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize(
    ("length", "window"), [(1, None), (9, None), (9, 1), (9, 5), (9, 12), (12, 5), (13, 5), (23, 1), (30, 6)]
)
def test_values_and_gradients(length: int, window: int | None, with_sink: bool) -> None:
    generator = torch.Generator().manual_seed(length)
    q, k, v = (
        torch.randn(2, length, heads, dim, generator=generator, requires_grad=True)
        for heads, dim in ((6, 8), (2, 8), (2, 5))
    )
    sink = torch.randn(6, generator=generator, requires_grad=True) if with_sink else None
    inputs = [x for x in (q, k, v, sink) if x is not None]
    scale = 1 / math.sqrt(8)

    out = dense_attention(q, k, v, scale=scale, window=window, sink=sink)
    probe = torch.randn(out.shape, generator=generator)
    grads = torch.autograd.grad((out * probe).sum(), inputs)

    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = one_query_at_a_time(*exact[:3], scale, window, exact[3] if with_sink else None)
    expected_grads = torch.autograd.grad((expected * probe.double()).sum(), exact)

    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    for got, want in zip(grads, expected_grads):
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def test_a_huge_sink_silences_attention_and_a_tiny_one_changes_nothing() -> None:
    q, k, v = torch.randn(1, 7, 2, 4), torch.randn(1, 7, 2, 4), torch.randn(1, 7, 2, 4)
    silent = dense_attention(q, k, v, scale=0.5, window=3, sink=torch.full((2,), 200.0))
    plain = dense_attention(q, k, v, scale=0.5, window=3)
    same = dense_attention(q, k, v, scale=0.5, window=3, sink=torch.full((2,), -200.0))
    assert silent.abs().max() < 1e-30
    torch.testing.assert_close(same, plain)
