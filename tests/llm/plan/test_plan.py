"""The planner against the published figures, the real pools, and what must hold for any budget."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transom.bench.kv_capacity import fill_dual, fill_single
from transom.errors import ConfigError
from transom.llm.capacity import answer_margin, swa_live_tokens
from transom.llm.plan import (
    GB,
    PlanOptions,
    dual_fit,
    dual_pool_plan,
    find_model,
    known_models,
    kv_bytes,
    plan_capacity,
    request_bytes,
    single_fit,
    weight_bytes,
)
from transom.llm.pools import DualPools, PoolExhaustedError, RequestKV

K = 1024
NANO = find_model("mimo-nano")
PRO = find_model("mimo-v2.5-pro")


def options(context_len: int, **changes: object) -> PlanOptions:
    return dataclasses.replace(PlanOptions(gpu_memory_bytes=141 * GB, context_len=context_len), **changes)


@pytest.mark.parametrize(
    ("name", "layers", "full_layers", "heads", "kv_heads", "experts"),
    [
        ("mimo-v2-flash", 48, [0, 5, 11, 17, 23, 29, 35, 41, 47], 64, (4, 8), 256),
        ("mimo-v2.5", 48, [0, 5, 11, 17, 23, 29, 35, 41, 47], 64, (4, 8), 256),
        ("mimo-v2.5-pro", 70, [0, 7, 15, 23, 31, 39, 47, 55, 62, 69], 128, (8, 8), 384),
    ],
)
def test_known_configs(
    name: str, layers: int, full_layers: list[int], heads: int, kv_heads: tuple[int, int], experts: int
) -> None:
    config = find_model(name).config
    assert config.num_layers == layers
    assert [i for i, full in enumerate([spec.full for spec in config.layers]) if full] == full_layers
    full, swa = config.layers[0], config.layers[1]
    assert (full.kv_heads, swa.kv_heads) == kv_heads
    assert full.heads == swa.heads == heads
    assert config.num_experts == experts
    assert swa.window == 129


@pytest.mark.parametrize(
    ("name", "full", "swa", "fixed", "token"),
    [
        ("mimo-v2-flash", 9 * 2_560, 39 * 5_120, 25_559_040, 222_720),
        ("mimo-v2.5", 23_040, 199_680, 25_559_040, 222_720),
        ("mimo-v2.5-pro", 51_200, 307_200, 39_321_600, 358_400),
    ],
)
def test_published_kv_bytes(name: str, full: int, swa: int, fixed: int, token: int) -> None:
    kv = kv_bytes(find_model(name).config, "bf16")
    assert (kv.full_token, kv.swa_token, kv.swa_fixed, kv.token) == (full, swa, fixed, token)
    assert kv.mtp_fixed == 3 * 5120 * 128
    # fp8: a byte a value, and 4 for the scale of each row of 192 (K) or 128 (V) of them.
    quantised = kv_bytes(find_model(name).config, "fp8")
    assert (quantised.full_token, quantised.swa_fixed) == (full * 328 // 640, fixed * 328 // 640)


@pytest.mark.parametrize(
    ("name", "context_len", "ratio", "tolerance"),
    [
        # Published as 5.90; the formula gives 5.895.
        ("mimo-v2.5-pro", 4 * K, 5.90, 0.006),
        ("mimo-v2.5-pro", 16 * K, 6.69, 0.005),
        ("mimo-v2.5-pro", K * K, 6.995, 0.0005),
        ("mimo-v2.5", 32 * K, 9.35, 0.005),
        ("mimo-v2-flash", 32 * K, 9.35, 0.005),
    ],
)
def test_published_ratios(name: str, context_len: int, ratio: float, tolerance: float) -> None:
    found = request_bytes(find_model(name).config, options(context_len))
    assert found.ratio_theory == pytest.approx(ratio, abs=tolerance)


@pytest.mark.parametrize(("name", "limit"), [("mimo-v2.5", 9.67), ("mimo-v2.5-pro", 7.0)])
def test_ratio_without_end(name: str, limit: float) -> None:
    kv = kv_bytes(find_model(name).config, "bf16")
    assert kv.token / kv.full_token == pytest.approx(limit, abs=0.005)


@settings(deadline=None)
@given(context_len=st.integers(1, K * K), kv_dtype=st.sampled_from(["bf16", "fp8", "fp32"]))
def test_a_request_never_takes_more_in_dual_pools(context_len: int, kv_dtype: str) -> None:
    found = request_bytes(PRO.config, options(context_len, kv_dtype=kv_dtype))
    length, window = context_len, 128
    assert found.ratio_theory == length * 358_400 / (length * 51_200 + min(length, window) * 307_200)
    assert found.dual_theory <= found.single_theory
    assert found.dual <= found.single
    assert found.single_theory <= found.single < found.single_theory + 16 * 1_433_600 // 2
    assert found.dual_theory <= found.dual


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8", "fp32"])
def test_planned_bytes_and_pages_are_the_real_pools(page_size: int, kv_dtype: str) -> None:
    asked = options(1000, page_size=page_size, kv_dtype=kv_dtype)
    budget = 8_000_000
    plan = dual_pool_plan(NANO.config, asked, budget)
    dtype = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "fp32": torch.float32}[kv_dtype]
    pools = DualPools(NANO.config, plan, dtype=dtype, device=torch.device("cpu"))
    allocated = sum(x.nbytes for store in (pools.full, pools.swa) for x in (store.k, store.v))
    fit = dual_fit(NANO.config, asked, budget, 1)
    assert fit.pool_bytes == allocated <= budget
    assert fit.tokens == pools.full_pages.capacity * page_size
    assert (fit.full_pages - 1, fit.swa_pages - 1) == (pools.full_pages.capacity, pools.swa_pages.capacity)


@pytest.mark.parametrize(
    ("context_len", "page_size", "chunk", "budget"),
    [
        (4096, 16, 512, 40_000_000),
        (4096, 16, 512, 18_000_001),
        (1000, 16, 512, 12_000_000),
        (1000, 64, 512, 12_000_000),
        (777, 1, 100, 6_000_000),
        (20, 16, 512, 6_000_000),
        (8192, 16, 2048, 72_000_000),
    ],
)
def test_planned_requests_are_what_real_pools_admit(
    context_len: int, page_size: int, chunk: int, budget: int
) -> None:
    asked = options(context_len, page_size=page_size, chunk=chunk)
    dual, single = fill_dual(NANO.config, asked, budget), fill_single(NANO.config, asked, budget)
    assert dual.requests == dual_fit(NANO.config, asked, budget, 1).requests
    assert single.requests == single_fit(NANO.config, asked, budget, 1).requests
    assert single.pool_bytes == single_fit(NANO.config, asked, budget, 1).pool_bytes
    assert single.request_bytes == request_bytes(NANO.config, asked).single
    assert dual.request_bytes <= request_bytes(NANO.config, asked).dual


@pytest.mark.parametrize(("page_size", "interval"), [(1, 1), (1, 16), (16, 16), (16, 6), (64, 16), (8, 40)])
def test_the_most_a_decoding_request_holds_is_exact(page_size: int, interval: int) -> None:
    """Decode token by token as a decode worker does; the plan's figure is reached and never passed."""
    asked = options(1000, page_size=page_size, release_interval=interval)
    plan = dual_pool_plan(NANO.config, asked, 6_000_000)
    margin = answer_margin(page_size)
    pools = DualPools(NANO.config, plan, dtype=torch.bfloat16, device=torch.device("cpu"), margin=margin)
    kv, most = RequestKV(), 0
    for length in range(1, 500):
        pools.extend(kv, length)
        most = max(most, kv.swa_count)
        kv.length = length
        if length % interval == 0:
            pools.slide(kv)
    assert most * page_size == swa_live_tokens(pools.kept, page_size, interval, 0)
    kv_bytes_swa = kv_bytes(NANO.config, "bf16").swa_token * most * page_size
    full = -(-1000 // page_size) * page_size
    planned = request_bytes(NANO.config, asked)
    assert planned.dual == full * kv_bytes(NANO.config, "bf16").full_token + kv_bytes_swa
    pools.check_integrity([kv])


budgets = st.integers(0, 40_000_000)


@settings(max_examples=200, deadline=None)
@given(
    budget=budgets,
    more=budgets,
    context_len=st.integers(1, 20_000),
    page_size=st.sampled_from([1, 7, 16, 64]),
    interval=st.integers(1, 64),
    chunk=st.integers(1, 2048),
)
def test_more_memory_never_holds_less_and_no_budget_is_passed(
    budget: int, more: int, context_len: int, page_size: int, interval: int, chunk: int
) -> None:
    asked = options(context_len, page_size=page_size, release_interval=interval, chunk=chunk)
    small, large = (dual_fit(NANO.config, asked, size, 1) for size in (budget, budget + more))
    assert small.pool_bytes <= budget
    assert large.pool_bytes <= budget + more
    assert small.full_pages <= large.full_pages
    assert small.swa_pages <= large.swa_pages
    assert small.requests <= large.requests
    one = single_fit(NANO.config, asked, budget, 1)
    assert one.pool_bytes <= budget
    assert one.requests <= single_fit(NANO.config, asked, budget + more, 1).requests


@settings(max_examples=25, deadline=None)
@given(
    memory_gb=st.integers(1, 400),
    more_gb=st.integers(0, 100),
    context_len=st.integers(1, K * K),
    mtp=st.booleans(),
    tp=st.sampled_from([1, 2, 4]),
)
def test_plans_grow_with_the_gpus_memory(
    memory_gb: int, more_gb: int, context_len: int, mtp: bool, tp: int
) -> None:
    asked = options(context_len, gpu_memory_bytes=memory_gb * GB, weight_dtype="fp8", mtp=mtp, tp=tp)
    small = plan_capacity(PRO, asked)
    large = plan_capacity(
        PRO, dataclasses.replace(asked, gpu_memory_bytes=(memory_gb + more_gb) * GB, concurrency=1)
    )
    for before, after in zip(small.sizes, large.sizes, strict=True):
        for fit in (before.single, before.dual):
            assert before.weights.total + small.activation_bytes + fit.pool_bytes <= 0.9 * memory_gb * GB or (
                fit.pool_bytes == 0
            )
        assert before.single.requests <= after.single.requests
        assert before.dual.requests <= after.dual.requests
    if small.smallest_single is not None and context_len > 4 * K:
        assert small.smallest_dual is not None
        assert small.smallest_dual <= small.smallest_single
    assert (large.smallest_dual or 999) <= (small.smallest_dual or 999)


def test_dual_pools_halve_the_group_for_long_contexts() -> None:
    """128K requests on 141 GB GPUs: 16 GPUs hold what a single pool needs 32 for; below, no weights fit."""
    plan = plan_capacity(PRO, options(128 * K, weight_dtype="fp8", concurrency=16))
    assert (plan.smallest_dual, plan.smallest_single) == (16, 32)
    assert [size.kv_bytes > 0 for size in plan.sizes] == [size.ep >= 16 for size in plan.sizes]
    sixteen = next(size for size in plan.sizes if size.ep == 16)
    assert (sixteen.single.requests, sixteen.dual.requests) == (0, 64)
    assert sixteen.single.tokens > 0


def test_mtp_counts_as_further_swa_layers() -> None:
    without, with_mtp = (
        plan_capacity(PRO, options(32 * K, mtp=mtp, weight_dtype="fp8")) for mtp in (False, True)
    )
    assert (
        with_mtp.request.dual_theory - without.request.dual_theory == without.kv.mtp_fixed == 3 * 5120 * 128
    )
    assert with_mtp.request.single_theory - without.request.single_theory == 32 * K * 3 * 5120
    for before, after in zip(without.sizes, with_mtp.sizes, strict=True):
        assert after.weights.total > before.weights.total
        assert after.weights.experts == before.weights.experts


def test_tp_splits_attention_and_kv_heads() -> None:
    one, two = (
        plan_capacity(PRO, options(32 * K, tp=tp, ep=(32,), weight_dtype="fp8")).sizes[0] for tp in (1, 2)
    )
    assert two.weights.attention == -(-one.weights.attention // 2)
    assert two.weights.experts == one.weights.experts
    # Half the KV heads a rank: one pool of two GPUs holds about as much as two pools.
    assert two.dual.requests == pytest.approx(one.dual.requests, rel=0.25)
    assert two.dual.requests >= one.dual.requests


def test_activation_reserve_is_taken_or_estimated() -> None:
    estimated = plan_capacity(PRO, options(4 * K, weight_dtype="fp8", ep=(32,)))
    # chunk * (2 * hidden + 8 experts * (3 * 2048 + 2 * hidden)) * bf16 + 64 rows of fp32 logits
    assert estimated.activation_bytes == 576 * (2 * 6144 + 8 * (3 * 2048 + 2 * 6144)) * 2 + 64 * 152_576 * 4
    given_bytes = plan_capacity(PRO, options(4 * K, weight_dtype="fp8", ep=(32,), activation_bytes=0))
    assert given_bytes.activation_bytes == 0
    gained = given_bytes.sizes[0].kv_bytes - estimated.sizes[0].kv_bytes
    assert gained == estimated.activation_bytes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_len": 0}, "--context: 0 is less than 1"),
        ({"context_len": 2 * K * K}, "--context: 2097152 is more than the 1048576"),
        ({"gpu_memory_bytes": 0}, "--gpu-memory: 0"),
        ({"memory_fraction": 1.5}, "--memory-fraction: 1.5"),
        ({"concurrency": 0}, "--concurrency: 0"),
        ({"tp": 4, "ep": (6,)}, "--ep 6: must be a multiple of --tp 4"),
        ({"ep": (0,)}, "--ep: 0"),
        ({"kv_dtype": "int4"}, "--kv-dtype: 'int4'"),
        ({"weight_dtype": "int4"}, "--weight-dtype: 'int4'"),
        ({"activation_bytes": -1}, "--activation-gb: -1"),
    ],
)
def test_bad_questions(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_capacity(PRO, dataclasses.replace(options(4 * K, weight_dtype="fp8"), **changes))


def test_models_from_folders(tmp_path: Path) -> None:
    source = json.loads(
        (Path(find_model.__code__.co_filename).parent / "model/known/mimo-v2.5.json").read_text()
    )
    (tmp_path / "config.json").write_text(json.dumps(source))
    found = find_model(str(tmp_path))
    assert found.config == find_model("mimo-v2.5").config
    assert found.quantized
    (tmp_path / "config.json").write_text(json.dumps({**source, "num_nextn_predict_layers": 0}))
    with pytest.raises(ConfigError, match="counts no MTP modules"):
        plan_capacity(find_model(str(tmp_path)), options(4 * K, mtp=True))
    (tmp_path / "config.json").write_text(json.dumps({**source, "hybrid_layer_pattern": [0] * 48}))
    with pytest.raises(ConfigError, match="hybrid"):
        plan_capacity(find_model(str(tmp_path)), options(4 * K))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        find_model(str(tmp_path))
    with pytest.raises(ConfigError, match="neither a checkpoint folder nor one of mimo-nano, mimo-v2-flash"):
        find_model(str(tmp_path / "absent"))


def test_a_filled_pool_refuses_the_next_page() -> None:
    plan = dual_pool_plan(NANO.config, options(500), 4_000_000)
    pools = DualPools(NANO.config, plan, dtype=torch.bfloat16, device=torch.device("cpu"))
    with pytest.raises(PoolExhaustedError):
        pools.extend(RequestKV(), plan.full_tokens + 1)


def test_every_known_model_plans_at_its_longest_context() -> None:
    for name in known_models():
        model = find_model(name)
        asked = options(model.config.max_position_embeddings, gpu_memory_bytes=2000 * GB, weight_dtype="fp8")
        plan = plan_capacity(model, asked)
        assert plan.smallest_dual == 1
        assert plan.sizes[0].weights == weight_bytes(model.config, "fp8")
