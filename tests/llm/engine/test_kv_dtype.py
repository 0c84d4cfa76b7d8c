"""KV in bf16 and fp8: how far from fp32 the logits are, and that nothing else changes a token."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from transom.errors import ConfigError
from transom.hub import resolve_model
from transom.kernels.kv_rows import FP8
from transom.kernels.native_ops import NativeOps
from transom.llm.build import build_engine, pick_kv_dtype
from transom.llm.config import DecodeConfig, PrefillConfig
from transom.llm.kv_transfer import pack_kv, unpack_kv, unpack_return
from transom.llm.model.causal_lm import CausalLM
from transom.llm.model.config import MiMoV2Config
from transom.llm.model.export import save_language_model
from transom.llm.model.fused import FusedModel, fused
from transom.llm.model.loader import load_language_model
from transom.llm.model.mimo_v2 import MiMoV2ForCausalLM
from transom.llm.paged_attention import PagedAttention, Span
from transom.llm.pools import DualPools, RequestKV
from transom.llm.request import Drop, KeepAnswer, ReturnWish
from transom.messages import KVHandoff, KVReturn, Sampling
from transom.tokenizer import Tokenizer

Pools = Callable[..., DualPools]
Make = Callable[..., Any]

# Root mean square of the logits' errors over that of the logits about their mean.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.05, FP8: 0.15}
TEXT = (
    "Who are you? The second request on a shared prefix hits, and a cut of a cached prompt hits as well."
    " What is red and round? Count from one to ten, then say which word came third in this sentence."
)


@pytest.fixture(scope="module")
def nano() -> CausalLM:
    folder = resolve_model("mimo-nano")
    return load_language_model(folder, dtype=torch.float32, device=torch.device("cpu"), mtp=False)


@pytest.fixture(scope="module")
def nano_ids() -> torch.Tensor:
    return torch.tensor(Tokenizer.from_folder(resolve_model("mimo-nano")).encode(TEXT))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 90, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def logits_of(model: CausalLM | FusedModel, pools: DualPools, ids: torch.Tensor) -> torch.Tensor:
    """Compute a prompt in chunks of 23 and its end token by token; return the logits of all positions."""
    kv, out = RequestKV(), []
    cuts = [*range(0, len(ids) - 6, 23), *range(len(ids) - 6, len(ids) + 1)]
    pools.extend(kv, len(ids))
    with torch.inference_mode():
        for begin, end in pairwise(cuts):
            x, count = model.embed(ids[begin:end]).clone(), end - begin
            if isinstance(model, FusedModel):
                rows = torch.arange(count).numpy()
                hidden = model.forward(x, model.place(pools, [(kv, begin, count)]), rows)
            else:
                attention = PagedAttention(pools, [Span(kv, begin, count)], model.config.layers)
                hidden = model(x, torch.arange(begin, end), attention)
            out.append(model.logits(hidden))
            kv.length = end
            pools.slide(kv)
    pools.check_integrity([kv])
    return torch.cat(out)


def error_of(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm() / (exact - exact.mean(-1, keepdim=True)).norm())


def rescaled(model: MiMoV2ForCausalLM, by: float) -> MiMoV2ForCausalLM:
    """Change `model` to one of the same function whose K and V are `by` times as large."""
    for number, spec in enumerate(model.config.layers):
        attention = f"layers.{number}.self_attn"
        qkv = model.get_parameter(f"{attention}.qkv_proj.weight").data
        q = spec.heads * spec.head_dim
        qkv[:q] /= by
        qkv[q:] *= by
        model.get_parameter(f"{attention}.o_proj.weight").data /= by
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize("compiled", [False, True])
def test_logits_of_nano_stay_within_the_tolerance(
    nano: CausalLM,
    nano_ids: torch.Tensor,
    make_pools: Pools,
    request: pytest.FixtureRequest,
    dtype: torch.dtype,
    compiled: bool,
) -> None:
    model = fused(nano, request.getfixturevalue("native_ops")) if compiled else nano
    assert model is not None
    exact, found = (
        logits_of(model, make_pools(nano.config, page_size=16, dtype=kind), nano_ids)
        for kind in (torch.float32, dtype)
    )
    assert TOLERANCE[torch.float32] < error_of(found, exact) < TOLERANCE[dtype]
    # Text that nano was not trained on: next to a tie, any rounding decides.
    assert (found.argmax(-1) == exact.argmax(-1)).float().mean() > 0.8


@pytest.mark.parametrize("by", [1.0, 2.0**-12, 2.0**12])
def test_fp8_is_as_good_whatever_the_size_of_k_and_v(
    make_model: Callable[..., MiMoV2ForCausalLM], native_ops: NativeOps, make_pools: Pools, by: float
) -> None:
    """Each row has its own scale: without, the small would be lost below 2^-9 and the large cut at 448.

    Without experts: a router that a rounding makes choose another one says nothing about attention.
    """
    model = rescaled(make_model(moe_layer_freq=[0] * 5), by)
    ids = torch.tensor(prompt_of(60))
    exact = logits_of(model, make_pools(model.config), ids)
    for runs in (model, fused(model, native_ops)):
        assert runs is not None
        found = logits_of(runs, make_pools(model.config, dtype=FP8), ids)
        assert error_of(found, exact) < TOLERANCE[FP8]


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_batches_chunks_retraction_and_cache_change_no_token(
    model: MiMoV2ForCausalLM, native_ops: NativeOps, make_harness: Make, dtype: torch.dtype
) -> None:
    """Against each prompt alone in ample pools of the same dtype."""
    runs = fused(model, native_ops)
    head = prompt_of(30, 8)
    prompts = {f"r{i}": [*head, *prompt_of(5 + 9 * i, i)] for i in range(5)}
    plain = make_harness(runs, dtype=dtype)
    for name, prompt in prompts.items():
        plain.submit(name, prompt, max_tokens=25)
        plain.run()
    tight = make_harness(runs, full=60, swa=40, cached=True, batch_tokens=24, dtype=dtype)
    for turn in range(2):
        for name, prompt in prompts.items():
            tight.submit(f"{name} {turn}", prompt, max_tokens=25)
        tight.run()
    for name in prompts:
        assert tight.tokens[f"{name} 0"] == tight.tokens[f"{name} 1"] == plain.tokens[name]
    load = tight.engine.load()
    assert load["retractions"] > 0
    assert load["cache_hit_tokens"] > 0
    assert tight.engine.load()["retracted_bytes"] == 0
    tight.assert_nothing_left()


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_kv_goes_to_decode_and_back_as_it_is_stored(
    model: MiMoV2ForCausalLM, native_ops: NativeOps, make_harness: Make, dtype: torch.dtype
) -> None:
    """Two turns over two engines give the tokens of one, and the second computes no answer anew."""
    runs = fused(model, native_ops)
    prefill = make_harness(runs, cached=True, answers=True, margin=8, dtype=dtype)
    decode = make_harness(runs, margin=8, dtype=dtype)
    one = make_harness(runs, dtype=dtype)
    prompt, cached = prompt_of(41), 0
    for turn in range(2):
        name = f"turn {turn}"
        one.submit(name, prompt, max_tokens=20)
        one.run()
        prefill.submit(name, prompt, hands_off=True, max_tokens=20)
        prefill.run()
        handed = prefill.prefilled[name]
        metas, frames = pack_kv(handed.host_kv)
        assert handed.host_kv.size_bytes == sum(memoryview(frame).nbytes for frame in frames)
        message = KVHandoff(
            request_id=name, prompt_ids=handed.prompt_ids, first_token=handed.first_token,
            prompt_len=handed.host_kv.length, swa_len=handed.host_kv.swa_len, tensors=metas,
            sampling=Sampling(max_tokens=20), deadline_s=1e12, gateway="tcp://g:1",
        )  # fmt: skip
        host_kv = unpack_kv(message, frames, model.config, dtype)
        assert handed.return_from is not None
        decode.prefilled_elsewhere = decode.prefilled_elsewhere | {name}
        decode.submit(
            name, prompt, output_ids=[handed.first_token], host_kv=host_kv, max_tokens=20,
            wish=ReturnWish(handed.return_from, 4, "tcp://p:1"),
        )  # fmt: skip
        decode.run()
        output = [handed.first_token, *decode.tokens[name]]
        assert output == one.tokens[name]
        answer = decode.answers[name]
        metas, frames = pack_kv(answer.host_kv)
        back = KVReturn(
            request_id=name, output_ids=answer.output_ids, begin=answer.host_kv.begin,
            end=answer.host_kv.length, swa_len=answer.host_kv.swa_len, tensors=metas,
        )  # fmt: skip
        kept = unpack_return(back, frames, model.config, dtype)
        prefill.engine.submit(KeepAnswer(name, answer.output_ids, kept))
        prefill.engine.step()
        cached = prefill.engine.load()["cache_answer_tokens"]
        prompt = [*prompt, *output, *prompt_of(7, turn)]
    assert cached > 30
    assert prefill.engine.load()["cache_hit_tokens"] >= 56
    for side in (prefill, decode):
        side.assert_nothing_left()


def test_kv_that_is_not_finite_ends_its_request_alone(
    model: MiMoV2ForCausalLM, native_ops: NativeOps, make_harness: Make
) -> None:
    harness = make_harness(fused(model, native_ops), dtype=FP8)
    harness.submit("good", prompt_of(20), max_tokens=6)
    harness.submit("bad", prompt_of(20, 1), max_tokens=30)
    for _ in range(3):
        harness.engine.step()
    kv = harness.engine._requests["bad"].kv
    harness.pools.full.k[:, :, kv.pages[1], 0, -4:] = torch.tensor([0, 0, 192, 127], dtype=torch.uint8)  # NaN
    harness.run()
    assert "not finite" in harness.errors["bad"].message
    assert len(harness.tokens["good"]) == 6
    harness.engine.submit(Drop("good"))
    harness.assert_nothing_left()


def test_a_start_says_what_kv_costs(caplog: pytest.LogCaptureFixture) -> None:
    """The line of the log and the pools agree; auto is the dtype of the weights."""
    bytes_of = {"auto": 4, "float32": 4, "bfloat16": 2, "fp8": 1}
    for name, value in bytes_of.items():
        config = DecodeConfig(model="mimo-nano", kv_dtype=name, kernels="torch", kv_memory_gb=0.02)
        with caplog.at_level(logging.INFO, "transom.llm.build"):
            engine, _ = build_engine(config, lambda events: None)
        line = caplog.messages[-1]
        full = 3 * 2 * (48 + 32) * value + (3 * 2 * 2 * 4 if value == 1 else 0)
        assert f"KV in {'float32' if name == 'auto' else name}:" in line
        assert f"({full} B each), SWA" in line
        pools = engine._holdings._pools
        held = sum(x.nbytes for store in (pools.full, pools.swa) for x in (store.k, store.v))
        assert held == pools.plan.total_bytes <= 0.02e9


def test_the_setting() -> None:
    assert pick_kv_dtype(PrefillConfig(device="cpu")) == torch.float32
    assert pick_kv_dtype(PrefillConfig(device="cpu", dtype="bfloat16")) == torch.bfloat16
    assert pick_kv_dtype(PrefillConfig(device="cpu", kv_dtype="bfloat16")) == torch.bfloat16
    assert pick_kv_dtype(PrefillConfig(device="cpu", kv_dtype="fp8")) == FP8


def test_heads_whose_scales_would_not_be_aligned_are_refused(tmp_path: Path, tiny_config: Any) -> None:
    config = {**tiny_config, "moe_layer_freq": [0] * 5, "v_head_dim": 10, "swa_v_head_dim": 10}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_language_model(MiMoV2ForCausalLM(MiMoV2Config.from_dict(config)), tmp_path)
    settings = DecodeConfig(model=str(tmp_path), kv_dtype="fp8", kernels="torch", kv_memory_gb=0.02)
    with pytest.raises(ConfigError, match=r"head sizes must be multiples of 4, the model has \[10\]"):
        build_engine(settings, lambda events: None)
