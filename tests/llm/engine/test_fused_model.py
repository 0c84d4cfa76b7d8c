"""The model on fused kernels: the torch model's tokens, whatever the batch, the chunks and the cache do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transom.kernels.native_ops import NativeOps
from transom.kernels.ops import FusedOps
from transom.llm.model.attention import PackedAttention
from transom.llm.model.causal_lm import CausalLM
from transom.llm.model.fused import FusedModel
from transom.llm.model.mimo_v2 import MiMoV2ForCausalLM
from transom.llm.model.registry import config_from_dict, new_model
from transom.llm.pools import DualPools, RequestKV

Pools = Callable[..., DualPools]
Fuse = Callable[..., FusedModel]


def uncached(model: CausalLM, prompt: torch.Tensor) -> torch.Tensor:
    hidden: torch.Tensor = model(
        model.embed(prompt), torch.arange(len(prompt)), PackedAttention([len(prompt)])
    )
    return hidden


def run_in_steps(
    native: FusedModel, pools: DualPools, prompts: list[torch.Tensor], cuts: list[list[int]], order: list[int]
) -> list[torch.Tensor]:
    """Request r takes cuts[r][s] tokens in step s; requests stand in a step in the given order."""
    kvs = [RequestKV() for _ in prompts]
    done: list[list[torch.Tensor]] = [[] for _ in prompts]
    for step in range(max(len(c) for c in cuts)):
        spans, ids, members = [], [], []
        for r in order:
            count = cuts[r][step] if step < len(cuts[r]) else 0
            if count:
                pools.extend(kvs[r], kvs[r].length + count)
                spans.append((kvs[r], kvs[r].length, count))
                ids.append(prompts[r][kvs[r].length : kvs[r].length + count])
                members.append(r)
        if not spans:
            continue
        x = native.embed(torch.cat(ids))
        hidden = native.forward(x, native.place(pools, spans), np.arange(len(x)))
        for r, part in zip(members, hidden.split([count for _, _, count in spans])):
            done[r].append(part)
            kvs[r].length += len(part)
            pools.slide(kvs[r])
    for kv in kvs:
        pools.release(kv)
    return [torch.cat(parts) if parts else torch.empty(0) for parts in done]


@given(
    st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=5), min_size=1, max_size=5),
    st.sampled_from([1, 4, 16]),
    st.randoms(use_true_random=False),
)
@settings(max_examples=25, deadline=None)
def test_hidden_states_do_not_depend_on_chunks_or_batch(
    model: MiMoV2ForCausalLM,
    native: FusedModel,
    make_pools: Pools,
    cuts: list[list[int]],
    page_size: int,
    random: Any,
) -> None:
    """Bit by bit: each prompt in one piece and alone against any cuts beside any others."""
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, 96, (sum(c),), generator=generator) for c in cuts]
    order = list(range(len(prompts)))
    random.shuffle(order)
    with torch.inference_mode():
        pools = make_pools(model.config, full=1000, swa=1000, page_size=page_size, clear_pages=False)
        for store in (pools.full, pools.swa):
            store.k[:, :, 1:] = store.v[:, :, 1:] = float("nan")
        batched = run_in_steps(native, pools, prompts, cuts, order)
        for prompt, hidden in zip(prompts, batched):
            if len(prompt):
                (alone,) = run_in_steps(native, pools, [prompt], [[len(prompt)]], [0])
                assert torch.equal(hidden, alone)
                torch.testing.assert_close(hidden, uncached(model, prompt), atol=3e-5, rtol=1e-4)
        pools.check_integrity(())


@pytest.mark.parametrize("rows", [[], [6], [0, 3, 11], list(range(12))])
def test_only_the_rows_asked_for(native: FusedModel, make_pools: Pools, rows: list[int]) -> None:
    """The last layer skips the other rows but stores their KV: later tokens see it."""
    generator = torch.Generator().manual_seed(6)
    prompts = [torch.randint(0, 96, (n,), generator=generator) for n in (7, 5)]
    with torch.inference_mode():
        found = []
        for wanted in (rows, list(range(12))):
            pools = make_pools(native.config)
            kvs = [RequestKV(), RequestKV()]
            spans = []
            for kv, prompt in zip(kvs, prompts):
                pools.extend(kv, len(prompt) + 1)
                spans.append((kv, 0, len(prompt)))
            x = native.embed(torch.cat(prompts))
            hidden = native.forward(x, native.place(pools, spans), np.array(wanted, np.int64))
            after = [(kv, len(prompt), 1) for kv, prompt in zip(kvs, prompts)]
            last = native.forward(
                native.embed(torch.tensor([1, 2])), native.place(pools, after), np.arange(2)
            )
            found.append((hidden, last))
    assert torch.equal(found[0][0], found[1][0][rows])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("cached", [False, True])
def test_greedy_tokens_are_those_of_the_uncached_torch_run(
    model: MiMoV2ForCausalLM,
    native: FusedModel,
    make_harness: Callable[..., Any],
    assert_greedy: Callable[..., None],
    cached: bool,
) -> None:
    """Chunked, batched, retracted for want of pages, prefixes reused: the same tokens."""
    harness = make_harness(native, full=60, swa=40, cached=cached, batch_tokens=24)
    generator = torch.Generator().manual_seed(8)
    head = torch.randint(0, 94, (30,), generator=generator).tolist()
    prompts = {
        f"r{i}": [*head[: 30 * (i % 2)], *torch.randint(0, 94, (5 + 9 * i,), generator=generator).tolist()]
        for i in range(6)
    }
    for name, prompt in prompts.items():
        harness.submit(name, prompt, max_tokens=12)
    harness.run()
    assert harness.errors == {}
    for name, prompt in prompts.items():
        assert_greedy(harness.tokens[name], model, prompt, 12)
    harness.assert_nothing_left()


def test_triton(
    make_model: Callable[..., MiMoV2ForCausalLM], triton_ops: FusedOps, make_pools: Pools, fuse: Fuse
) -> None:
    """The same model code over Triton's kernels: a chunk, a token, and rows of the last layer left out."""
    model = make_model(num_hidden_layers=2, hybrid_layer_pattern=[1, 0], moe_layer_freq=[0, 1])
    prompt = torch.randint(0, 96, (14,), generator=torch.Generator().manual_seed(9))
    expected = uncached(model, prompt)
    model, device = model.to(triton_ops.device), triton_ops.device
    pools = make_pools(model.config, device=device, clear_pages=False)
    for store in (pools.full, pools.swa):
        store.k[:, :, 1:] = store.v[:, :, 1:] = float("nan")
    native, kv = fuse(model, triton_ops), RequestKV()
    with torch.inference_mode():
        for begin, end, rows in ((0, 10, [3, 9]), (10, 11, [0]), (11, 14, [2])):
            pools.extend(kv, end)
            x = native.embed(prompt[begin:end].to(device))
            hidden = native.forward(x, native.place(pools, [(kv, begin, end - begin)]), np.array(rows))
            wanted = expected[[begin + row for row in rows]]
            torch.testing.assert_close(hidden.cpu(), wanted, atol=3e-5, rtol=1e-4)
            kv.length = end
            pools.slide(kv)
        torch.testing.assert_close(native.logits(hidden).cpu(), model.logits(hidden).cpu())


def test_a_dense_model_with_sinks_everywhere(
    make_model: Callable[..., MiMoV2ForCausalLM], native_ops: NativeOps, make_pools: Pools, fuse: Fuse
) -> None:
    model = make_model(
        moe_layer_freq=[0] * 5, add_full_attention_sink_bias=True, hybrid_layer_pattern=[1, 0, 1, 1, 0],
        norm_topk_prob=False,
    )  # fmt: skip
    prompt = torch.randint(0, 96, (50,), generator=torch.Generator().manual_seed(9))
    with torch.inference_mode():
        (hidden,) = run_in_steps(
            fuse(model, native_ops), make_pools(model.config), [prompt], [[20, 1, 29]], [0]
        )
        torch.testing.assert_close(hidden, uncached(model, prompt), atol=3e-5, rtol=1e-4)


def test_gemma_3(native_ops: NativeOps, make_pools: Pools, fuse: Fuse) -> None:
    """Norms of queries and keys, norms behind both parts, GeGLU, scaled embeddings, tied head."""
    config = {
        "model_type": "gemma3_text", "vocab_size": 96, "hidden_size": 48, "intermediate_size": 72,
        "num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "query_pre_attn_scalar": 24, "sliding_window": 8, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6, "eos_token_id": 1, "tie_word_embeddings": True,
    }  # fmt: skip
    torch.manual_seed(3)
    model = new_model(config_from_dict(config)).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(std=0.2)
    prompt = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(9))
    native = fuse(model, native_ops)
    with torch.inference_mode():
        (hidden,) = run_in_steps(native, make_pools(model.config), [prompt], [[13, 1, 26]], [0])
        expected = uncached(model, prompt)
        torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(native.logits(hidden), model.logits(expected), atol=1e-3, rtol=1e-3)


def test_bfloat16(
    make_model: Callable[..., MiMoV2ForCausalLM], native_ops: NativeOps, make_pools: Pools, fuse: Fuse
) -> None:
    """Half-precision weights and KV: as close to fp32 as torch's bfloat16 run is."""
    exact, half = make_model(), make_model().to(torch.bfloat16)
    for name, parameter in exact.named_parameters():
        if ".gate.weight" in name:  # routers stay fp32, as the loader leaves them
            half.get_parameter(name).data = parameter.clone()
    prompt = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(6))
    with torch.inference_mode():
        pools = make_pools(half.config, dtype=torch.bfloat16)
        (hidden,) = run_in_steps(fuse(half, native_ops), pools, [prompt], [[17, 1, 1, 21]], [0])
        error = (hidden.float() - uncached(exact, prompt)).abs().mean()
        torch_error = (uncached(half, prompt).float() - uncached(exact, prompt)).abs().mean()
    assert hidden.dtype == torch.bfloat16
    assert error < 1.2 * torch_error + 1e-2


def test_a_checkpoint_in_bf16_is_kept_in_bf16(
    make_model: Callable[..., MiMoV2ForCausalLM], native_ops: NativeOps, fuse: Fuse
) -> None:
    """Run in fp32 its weights lose nothing by it, and take half the memory traffic."""
    model = make_model()
    for name, parameter in model.named_parameters():
        if ".gate.weight" not in name:
            parameter.data = parameter.to(torch.bfloat16).float()
    assert fuse(model, native_ops).weight_bytes < fuse(make_model(), native_ops).weight_bytes
