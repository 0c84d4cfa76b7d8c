"""Expert routing and the grouped experts against one token at a time."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from transom.kernels.moe import route_tokens, run_experts


def token_by_token(
    x: torch.Tensor,
    logits: torch.Tensor,
    bias: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    top_k: int,
) -> torch.Tensor:
    rows = []
    intermediate = down.shape[2]
    for token, scores in zip(x, logits.sigmoid()):
        biased = (scores.detach() + bias).tolist()
        ranked = sorted(range(len(bias)), key=biased.__getitem__, reverse=True)[:top_k]
        total = sum(scores[e] for e in ranked)
        row = torch.zeros_like(token)
        for e in ranked:
            gate, up = gate_up[e, :intermediate] @ token, gate_up[e, intermediate:] @ token
            row = row + scores[e] / total * (down[e] @ (functional.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 4, 2), (40, 8, 2), (40, 4, 4), (3, 16, 1)])
def test_values_and_gradients(tokens: int, experts: int, top_k: int) -> None:
    generator = torch.Generator().manual_seed(tokens + experts)
    shapes = [(tokens, 12), (tokens, experts), (experts, 2 * 5, 12), (experts, 12, 5)]
    inputs = [
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes
    ]
    x, logits, gate_up, down = inputs
    bias = torch.randn(experts, generator=generator, dtype=torch.float64)

    weights, chosen = route_tokens(logits, bias, top_k, normalise=True, scale=1.0)
    out = run_experts(x, weights, chosen, gate_up, down)
    expected = token_by_token(x, logits, bias, gate_up, down, top_k)
    torch.testing.assert_close(out, expected)

    probe = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    for got, want in zip(
        torch.autograd.grad((out * probe).sum(), inputs),
        torch.autograd.grad((expected * probe).sum(), inputs),
    ):
        torch.testing.assert_close(got, want)


def test_the_bias_selects_but_does_not_weigh() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    weights, chosen = route_tokens(logits, torch.tensor([0.0, 0.0, 0.0, 9.0]), 2, normalise=False, scale=1.0)
    found = dict(zip(chosen[0].tolist(), weights[0].tolist()))
    assert found == pytest.approx({3: logits[0, 3].sigmoid().item(), 0: logits[0, 0].sigmoid().item()})


def test_scale_and_normalisation() -> None:
    logits = torch.randn(5, 6)
    weights, _ = route_tokens(logits, torch.zeros(6), 3, normalise=True, scale=2.5)
    torch.testing.assert_close(weights.sum(-1), torch.full((5,), 2.5))


def test_no_tokens() -> None:
    out = run_experts(
        torch.zeros(0, 12),
        torch.zeros(0, 2),
        torch.zeros(0, 2, dtype=torch.int64),
        torch.zeros(4, 10, 12),
        torch.zeros(4, 12, 5),
    )
    assert out.shape == (0, 12)


@pytest.mark.parametrize("tokens", [8, 9])
def test_few_rows_and_many_rows_agree(tokens: int) -> None:
    """Up to twice as many rows as experts take a path of their own."""
    generator = torch.Generator().manual_seed(tokens)
    x, logits, gate_up, down = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((tokens, 12), (tokens, 4), (4, 10, 12), (4, 12, 5))
    )
    bias = torch.zeros(4, dtype=torch.float64)
    weights, chosen = route_tokens(logits, bias, 2, normalise=True, scale=1.0)
    out = run_experts(x, weights, chosen, gate_up, down)
    torch.testing.assert_close(out, token_by_token(x, logits, bias, gate_up, down, 2))
