"""Any way of cutting requests into steps gives the hidden states of the uncached run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transom.llm import paged_attention
from transom.llm.model.attention import PackedAttention
from transom.llm.model.mimo_v2 import MiMoV2ForCausalLM
from transom.llm.paged_attention import PagedAttention, Span
from transom.llm.pools import DualPools, RequestKV

Pools = Callable[..., DualPools]


def run_in_steps(
    model: MiMoV2ForCausalLM, pools: DualPools, prompts: list[torch.Tensor], cuts: list[list[int]]
) -> list[torch.Tensor]:
    """Run prompts through the pools, request r taking cuts[r][s] tokens in step s; single tokens go first."""
    kvs = [RequestKV() for _ in prompts]
    done = [torch.empty(0, model.config.hidden_size, dtype=model.norm.weight.dtype) for _ in prompts]
    for step in range(max(len(c) for c in cuts)):
        counts = {r: c[step] for r, c in enumerate(cuts) if step < len(c) and c[step]}
        order = sorted(counts, key=lambda r: (counts[r] > 1, -kvs[r].length))
        spans = []
        for r in order:
            pools.extend(kvs[r], kvs[r].length + counts[r])
            spans.append(Span(kvs[r], kvs[r].length, counts[r]))
        if not spans:
            continue
        ids = torch.cat([prompts[r][s.begin : s.begin + s.count] for r, s in zip(order, spans)])
        positions = torch.cat([torch.arange(s.begin, s.begin + s.count) for s in spans])
        attn = PagedAttention(pools, spans, model.config.layers)
        hidden = model(model.embed(ids), positions, attn)
        for r, part in zip(order, hidden.split([s.count for s in spans])):
            done[r] = torch.cat([done[r], part])
            kvs[r].length += len(part)
            pools.slide(kvs[r])
        pools.check_integrity(kvs)
    for kv in kvs:
        pools.release(kv)
    return done


def uncached(model: MiMoV2ForCausalLM, prompt: torch.Tensor) -> torch.Tensor:
    return model(model.embed(prompt), torch.arange(len(prompt)), PackedAttention([len(prompt)]))


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 3, 8, 9, 10, 17, 45])
def test_every_chunk_size(model: MiMoV2ForCausalLM, make_pools: Pools, page_size: int, chunk: int) -> None:
    prompt = torch.randint(0, 96, (45,), generator=torch.Generator().manual_seed(1))
    cuts = [min(chunk, 45 - begin) for begin in range(0, 45, chunk)]
    with torch.inference_mode():
        (hidden,) = run_in_steps(model, make_pools(model.config, page_size=page_size), [prompt], [cuts])
        torch.testing.assert_close(hidden, uncached(model, prompt), atol=2e-5, rtol=1e-4)


def test_the_mask_of_a_long_prompt_is_bounded(
    model: MiMoV2ForCausalLM, make_pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_attention, "_MASK_ELEMENTS", 400)
    largest = 0
    attend = paged_attention.paged_attention

    def watched(*args: Any, **more: Any) -> torch.Tensor:
        nonlocal largest
        bias = args[4]
        largest = max(largest, 0 if bias is None or len(bias) > 1 else bias.numel())
        return attend(*args, **more)

    monkeypatch.setattr(paged_attention, "paged_attention", watched)
    prompt = torch.randint(0, 96, (90,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        (hidden,) = run_in_steps(model, make_pools(model.config, page_size=4), [prompt], [[40, 50]])
        torch.testing.assert_close(hidden, uncached(model, prompt), atol=2e-5, rtol=1e-4)
    assert 0 < largest <= 400 + 4 * 10


@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=6), min_size=1, max_size=6), st.booleans())
@settings(max_examples=25, deadline=None)
def test_batched_steps(
    model: MiMoV2ForCausalLM,
    make_model: Callable[..., MiMoV2ForCausalLM],
    make_pools: Pools,
    cuts: list[list[int]],
    sinks_everywhere: bool,
) -> None:
    if sinks_everywhere:
        model = make_model(add_full_attention_sink_bias=True)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 96, (sum(c),), generator=generator) for c in cuts]
    with torch.inference_mode():
        pools = make_pools(model.config)
        for prompt, hidden in zip(prompts, run_in_steps(model, pools, prompts, cuts)):
            if len(prompt):
                torch.testing.assert_close(hidden, uncached(model, prompt), atol=2e-5, rtol=1e-4)
        assert pools.full_pages.used == pools.swa_pages.used == 0


def test_decode_batch_of_uneven_lengths(model: MiMoV2ForCausalLM, make_pools: Pools) -> None:
    lengths = [300, 1, 80, 5, 140, 299]
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 96, (length + 4,), generator=generator) for length in lengths]
    with torch.inference_mode():
        pools = make_pools(model.config, swa=400)
        cuts = [[length, 1, 1, 1, 1] for length in lengths]
        for prompt, hidden in zip(prompts, run_in_steps(model, pools, prompts, cuts)):
            torch.testing.assert_close(hidden, uncached(model, prompt), atol=2e-5, rtol=1e-4)


def test_stale_garbage_never_reaches_a_later_owner(model: MiMoV2ForCausalLM, make_pools: Pools) -> None:
    """NaN of a former owner stays out of every later prompt."""
    prompt = torch.randint(0, 96, (21,), generator=torch.Generator().manual_seed(4))
    with torch.inference_mode():
        pools = make_pools(model.config, full=10, swa=10)
        for store in (pools.full, pools.swa):
            store.k[:, :, 1:] = float("nan")
            store.v[:, :, 1:] = float("inf")
        (hidden,) = run_in_steps(model, pools, [prompt], [[10, 1, 10]])
        torch.testing.assert_close(hidden, uncached(model, prompt), atol=2e-5, rtol=1e-4)


def test_bfloat16(make_model: Callable[..., MiMoV2ForCausalLM], make_pools: Pools) -> None:
    """Half-precision weights and KV: as close to fp32 as the uncached bfloat16 run is."""
    exact, model = make_model(), make_model().to(torch.bfloat16)
    for name, parameter in exact.named_parameters():
        if ".gate.weight" in name:  # routers stay fp32, as the loader leaves them
            model.get_parameter(name).data = parameter.clone()
    prompt = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(6))
    with torch.inference_mode():
        pools = make_pools(model.config, dtype=torch.bfloat16)
        (hidden,) = run_in_steps(model, pools, [prompt], [[17, 1, 1, 21]])
        error = (hidden.float() - uncached(exact, prompt)).abs().mean()
        error_uncached = (uncached(model, prompt).float() - uncached(exact, prompt)).abs().mean()
    assert hidden.dtype == torch.bfloat16
    assert error < 2 * error_uncached + 1e-2
