"""The MTP modules against an oracle in plain loops, and how a request feeds them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from transom.llm.model.attention import PackedAttention
from transom.llm.model.mimo_v2 import MiMoV2ForCausalLM, MTPModule

LENGTH = 17


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / math.sqrt(float(x.pow(2).mean()) + 1e-5) * weight


def turn(x: torch.Tensor, position: int, theta: float, rotary_dim: int) -> torch.Tensor:
    out = x.clone()
    half = rotary_dim // 2
    for i in range(half):
        angle = position * theta ** (-2 * i / rotary_dim)
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def oracle(module: MTPModule, embeds: torch.Tensor, hidden: torch.Tensor, value_scale: float) -> torch.Tensor:
    """One token, one head, one key at a time, in double precision, from the module's tensors alone."""
    w = {name: tensor.double() for name, tensor in module.state_dict().items()}
    heads, kv_heads, dim, v_dim, rotary, theta, window = 8, 4, 24, 16, 8, 1e4, 7
    q_rows, k_rows = heads * dim, kv_heads * dim
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    outputs = []
    for position, (embed, target) in enumerate(zip(embeds.double(), hidden.double())):
        x = w["eh_proj.weight"] @ torch.cat([norm(embed, w["enorm.weight"]), norm(target, w["hnorm.weight"])])
        qkv = w["self_attn.qkv_proj.weight"] @ norm(x, w["input_layernorm.weight"])
        q = qkv[:q_rows].view(heads, dim)
        k = qkv[q_rows : q_rows + k_rows].view(kv_heads, dim)
        keys.append(torch.stack([turn(row, position, theta, rotary) for row in k]))
        values.append(qkv[q_rows + k_rows :].view(kv_heads, v_dim) * value_scale)
        mixed = []
        for head in range(heads):
            query, kv_head = turn(q[head], position, theta, rotary), head // (heads // kv_heads)
            seen = range(max(0, position - window + 1), position + 1)
            exps = {j: math.exp(float(query @ keys[j][kv_head]) / math.sqrt(dim)) for j in seen}
            total = sum(exps.values()) + math.exp(float(w["self_attn.attention_sink_bias"][head]))
            mixed.append(
                sum((exps[j] / total * values[j][kv_head] for j in seen), torch.zeros(v_dim).double())
            )
        x = x + w["self_attn.o_proj.weight"] @ torch.cat(mixed)
        gate, up = (w["mlp.gate_up_proj.weight"] @ norm(x, w["pre_mlp_layernorm.weight"])).chunk(2)
        x = x + w["mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)
        outputs.append(norm(x, w["final_layernorm.weight"]))
    return torch.stack(outputs)


@pytest.fixture
def model(random_model: Callable[..., MiMoV2ForCausalLM]) -> MiMoV2ForCausalLM:
    return random_model()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 96, (LENGTH + 4,), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def target_states(model: MiMoV2ForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    return model(model.embed(ids), torch.arange(len(ids)), PackedAttention([len(ids)]))


@pytest.mark.parametrize("k", [0, 1, 2])
def test_module_forward(model: MiMoV2ForCausalLM, ids: torch.Tensor, k: int) -> None:
    hidden = target_states(model, ids[:LENGTH])
    with torch.no_grad():
        embeds = model.embed(ids[1 + k : 1 + k + LENGTH])
        out = model.mtp[k](embeds, hidden, torch.arange(LENGTH), PackedAttention([LENGTH]))
        expected = oracle(model.mtp[k], embeds, hidden, 0.707)
        torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-4)
        logits = model.logits(out)
        torch.testing.assert_close(
            logits.double(), expected @ model.lm_head.weight.double().T, atol=1e-3, rtol=1e-4
        )
        swapped = model.mtp[k](hidden, embeds, torch.arange(LENGTH), PackedAttention([LENGTH]))
    assert (swapped - out).abs().max() > 0.1


def test_each_module_keeps_its_own_cache(
    model: MiMoV2ForCausalLM, ids: torch.Tensor, cached_attention: Callable[[], Any]
) -> None:
    """Target and modules share one backend, step by step, and give what they give in one piece."""
    backend = cached_attention()
    hidden_rows, draft_rows = [], [[], [], []]  # type: tuple[list[torch.Tensor], list[list[torch.Tensor]]]
    with torch.no_grad():
        for positions in torch.arange(LENGTH).split([6, 1, 1, 4, 1, 4]):
            hidden = model(model.embed(ids[positions]), positions, backend)
            hidden_rows.append(hidden)
            for k, module in enumerate(model.mtp):
                embeds = model.embed(ids[positions + 1 + k])
                draft_rows[k].append(module(embeds, hidden, positions, backend))
        assert sorted(backend.cache) == list(range(model.config.num_layers + 3))

        whole = target_states(model, ids[:LENGTH])
        torch.testing.assert_close(torch.cat(hidden_rows), whole, atol=1e-4, rtol=1e-4)
        for k, module in enumerate(model.mtp):
            embeds = model.embed(ids[1 + k : 1 + k + LENGTH])
            expected = module(embeds, whole, torch.arange(LENGTH), PackedAttention([LENGTH]))
            torch.testing.assert_close(torch.cat(draft_rows[k]), expected, atol=1e-4, rtol=1e-4)


def test_every_tensor_learns(model: MiMoV2ForCausalLM, ids: torch.Tensor) -> None:
    """The trainer's path: a loss over the target and the drafts reaches every parameter, sinks included."""
    lengths = [LENGTH - 5, 5]
    attn, positions = PackedAttention(lengths), torch.cat([torch.arange(n) for n in lengths])
    hidden = model(model.embed(ids[:LENGTH]), positions, attn)
    loss = torch.nn.functional.cross_entropy(model.logits(hidden), ids[1 : LENGTH + 1])
    for k, module in enumerate(model.mtp):
        states = module(model.embed(ids[1 + k : 1 + k + LENGTH]), hidden, positions, attn)
        loss = loss + torch.nn.functional.cross_entropy(model.logits(states), ids[2 + k : 2 + k + LENGTH])
    torch.autograd.backward(loss)
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert without == []
    assert all(not buffer.requires_grad for buffer in model.buffers())
