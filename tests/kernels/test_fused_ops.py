"""The fused kernels against torch in float64: odd shapes, both dtypes, several threads, and Triton's too.

Without a GPU Triton runs under its interpreter, which is slow: a few cases instead of random ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from transom.kernels.kv_rows import FP8, from_rows, stored_dtype, to_rows
from transom.kernels.moe import route_tokens, run_experts, swiglu
from transom.kernels.native_ops import NativeOps
from transom.kernels.ops import FusedOps, Norm, Router
from transom.kernels.rope import apply_rope, rope_table

SIZES = st.integers(1, 70)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
KV_DTYPES = st.sampled_from([torch.float32, torch.bfloat16, FP8])
EXAMPLES = settings(max_examples=30, deadline=None)


@pytest.fixture(scope="module", params=[1, 3])
def ops(request: pytest.FixtureRequest, native_ops: NativeOps) -> Iterator[NativeOps]:
    native_ops.set_threads(request.param)
    yield native_ops
    native_ops.set_threads(1)


def random(
    seed: int, *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def assert_near(out: torch.Tensor, expected: torch.Tensor, roundings: int = 1) -> None:
    """Compare with a double-precision result, as close as rounding to its dtype so often allows."""
    tolerance = 2e-5 if out.dtype == torch.float32 else 1.2e-2 * roundings
    torch.testing.assert_close(out.double(), expected.double(), atol=tolerance, rtol=tolerance)


def normed(x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    x = x.double()
    if norm is None:
        return x
    return functional.rms_norm(x, (x.shape[-1],), norm.weight.double(), norm.eps)


def check_linear(
    ops: FusedOps, rows: int, depth: int, columns: int, dtype: torch.dtype, half: bool, extras: bool
) -> None:
    make = partial(random, device=ops.device)
    x, weight = make(1, rows, depth, dtype=dtype), make(2, columns, depth).to(torch.bfloat16).float()
    norm = Norm(make(3, depth), 1e-5) if extras else None
    residual = make(4, rows, columns, dtype=dtype) if extras else None
    expected = normed(x, norm) @ weight.double().T
    if residual is not None:
        expected = expected + residual.double()
    packed = ops.pack(weight, half=half)
    assert_near(ops.linear(x, packed, norm=norm, residual=residual), expected)
    if residual is not None:
        assert ops.linear(x, packed, norm=norm, residual=residual, out=residual) is residual
        assert_near(residual, expected)


def check_gated_mlp(
    ops: FusedOps, rows: int, depth: int, width: int, dtype: torch.dtype, half: bool, activation: str
) -> None:
    make = partial(random, device=ops.device)
    x = make(1, rows, depth, dtype=dtype)
    gate_up, down = make(2, 2 * width, depth) * depth**-0.5, make(3, depth, width) * width**-0.5
    if half:
        gate_up, down = gate_up.to(torch.bfloat16).float(), down.to(torch.bfloat16).float()
    norm = Norm(make(4, depth), 1e-6)
    gate, up = (normed(x, norm) @ gate_up.double().T).chunk(2, dim=-1)
    act = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    expected = x.double() + (act * up) @ down.double().T
    packed = ops.pack_gate_up(gate_up, half=half), ops.pack(down, half=half)
    out = ops.gated_mlp(x, *packed, norm=norm, activation=activation, residual=x, out=x)
    assert_near(out, expected, roundings=3)


def check_moe(
    ops: FusedOps,
    rows: int,
    depth: int,
    width: int,
    experts: int,
    top_k: int,
    dtype: torch.dtype,
    half: bool,
) -> None:
    make = partial(random, device=ops.device)
    top_k = min(top_k, experts)
    x = make(1, rows, depth, dtype=dtype)
    gate_up = make(2, experts, 2 * width, depth) * depth**-0.5
    down = make(3, experts, depth, width) * width**-0.5
    if half:
        gate_up, down = gate_up.to(torch.bfloat16).float(), down.to(torch.bfloat16).float()
    gate, bias = make(4, experts, depth), make(5, experts)
    norm = Norm(make(6, depth), 1e-5)
    n = normed(x, norm)
    weights, chosen = route_tokens(n @ gate.double().T, bias.double(), top_k, normalise=True, scale=1.5)
    expected = x.double() + run_experts(n, weights, chosen, gate_up.double(), down.double())
    router = Router(ops.pack(gate, half=False), bias, top_k, True, 1.5)
    packed = ops.pack_gate_up(gate_up, half=half), ops.pack(down, half=half)
    # Triton's norm, hidden and sum are rounded to bf16 on their way.
    assert_near(ops.moe(x, router, *packed, norm=norm, residual=x), expected, roundings=3)


def check_attention(
    ops: FusedOps,
    spans: list[tuple[int, int]],
    page_size: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    window: int | None,
    sink: bool,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> None:
    make = partial(random, device=ops.device)
    count, kv_heads = heads
    full = window is None
    case = Case(ops, spans, page_size, kv_heads, dims, kv_dtype)
    sinks = make(9, count) if sink else None
    q = make(1, case.rows, count * dims[0], dtype=dtype)
    expected = torch.empty(case.rows, count * dims[1], dtype=torch.float64, device=ops.device)
    for i, (begin, new) in enumerate(spans):
        slots = case.slots(i, full)
        live = slots if window is None else slots[max(begin - window + 1, 0) :]
        case.k[:, live] = to_rows(make(10 + i, kv_heads, len(live), dims[0]), case.k.dtype)
        case.v[:, live] = to_rows(make(20 + i, kv_heads, len(live), dims[1]), case.v.dtype)
        for j in range(new):
            row = int(case.tables.spans[i, 0]) + j
            last = begin + j
            seen = slots[0 if window is None else max(last - window + 1, 0) : last + 1]
            k, v = (
                from_rows(x[:, seen], torch.float64).repeat_interleave(count // kv_heads, 0)
                for x in (case.k, case.v)
            )
            scores = torch.einsum("hd,hkd->hk", q[row].double().view(count, -1), k) * 0.2
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None]], dim=-1)
            weights = scores.softmax(-1)[:, : len(seen)]
            expected[row] = torch.einsum("hk,hkd->hd", weights, v).flatten()
    out = ops.attention(
        q, count, (case.k, case.v), case.tables, full=full, scale=0.2, window=window, sink=sinks
    )
    assert_near(out, expected)


def check_rope_and_store(
    ops: FusedOps,
    spans: list[tuple[int, int]],
    page_size: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    full: bool,
    norms: bool,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> None:
    make = partial(random, device=ops.device)
    count, kv_heads = heads
    case = Case(ops, spans, page_size, kv_heads, dims, kv_dtype)
    sizes = [count * dims[0], kv_heads * dims[0], kv_heads * dims[1]]
    qkv = make(1, case.rows, sum(sizes), dtype=dtype)
    q_norm, k_norm = (Norm(make(i, dims[0]), 1e-6) if norms else None for i in (2, 3))
    cos, sin = rope_table(torch.arange(300, device=ops.device), 1e4, 8)
    positions = torch.cat([torch.arange(begin, begin + new) for begin, new in spans])
    slots = torch.cat([case.slots(i, full)[begin:] for i, (begin, _) in enumerate(spans)])
    q, k, v = qkv.split(sizes, dim=-1)
    turned = [
        apply_rope(normed(x.unflatten(-1, (-1, dims[0])), norm), cos[positions], sin[positions])
        for x, norm in ((q, q_norm), (k, k_norm))
    ]
    value = v.double().unflatten(-1, (-1, dims[1])) * 0.7
    mine = qkv.clone()
    ops.rope_and_store(
        mine, count, cos, sin, (case.k, case.v), case.tables,
        full=full, value_scale=0.7, q_norm=q_norm, k_norm=k_norm,
    )  # fmt: skip
    assert_near(mine[:, : sizes[0]].unflatten(-1, (-1, dims[0])), turned[0])
    for stored, expected in ((case.k, turned[1]), (case.v, value)):
        found = from_rows(stored, torch.float32)
        assert int(found.isfinite().all(-1).sum()) == len(slots) * kv_heads, "other slots were written"
        found = found[:, slots].transpose(0, 1)
        if kv_dtype == FP8:
            # Half a step of e4m3 of each value, and of those near zero of the largest; what rounding to the
            # dtype of qkv adds comes on top.
            most = expected.abs().amax(-1, keepdim=True)
            slack = 0.01 if dtype == torch.bfloat16 else 1e-4
            assert bool(
                ((found - expected).abs() <= expected.abs() * (1 / 16 + slack) + most / 448 / 512).all()
            )
        else:
            assert_near(found.to(min(dtype, kv_dtype, key=lambda kind: kind.itemsize)), expected)
    alone = q.clone()
    ops.rotate_queries(alone, count, cos, sin, case.tables, norm=q_norm)
    assert torch.equal(alone, mine[:, : sizes[0]])


@EXAMPLES
@given(
    rows=st.integers(0, 120),
    depth=SIZES,
    columns=SIZES,
    dtype=DTYPES,
    half=st.booleans(),
    extras=st.booleans(),
)
def test_linear(
    ops: NativeOps, rows: int, depth: int, columns: int, dtype: torch.dtype, half: bool, extras: bool
) -> None:
    check_linear(ops, rows, depth, columns, dtype, half, extras)


@EXAMPLES
@given(
    rows=st.integers(1, 110),
    depth=SIZES,
    width=SIZES,
    dtype=DTYPES,
    half=st.booleans(),
    activation=st.sampled_from(["silu", "gelu_tanh"]),
)
def test_gated_mlp(
    ops: NativeOps, rows: int, depth: int, width: int, dtype: torch.dtype, half: bool, activation: str
) -> None:
    check_gated_mlp(ops, rows, depth, width, dtype, half, activation)


@EXAMPLES
@given(
    rows=st.integers(1, 130),
    depth=SIZES,
    width=SIZES,
    experts=st.integers(1, 20),
    top_k=st.integers(1, 20),
    dtype=DTYPES,
    half=st.booleans(),
)
def test_moe(
    ops: NativeOps,
    rows: int,
    depth: int,
    width: int,
    experts: int,
    top_k: int,
    dtype: torch.dtype,
    half: bool,
) -> None:
    check_moe(ops, rows, depth, width, experts, top_k, dtype, half)


def test_moe_without_normalisation_and_a_bias_that_only_selects(ops: NativeOps) -> None:
    x, gate = torch.ones(1, 4), torch.zeros(4, 4)
    gate_up, down = random(1, 4, 6, 4), random(2, 4, 4, 3)
    router = Router(ops.pack(gate, half=False), torch.tensor([0.0, 0.0, 9.0, 0.0]), 1, False, 2.0)
    packed = ops.pack_gate_up(gate_up, half=False), ops.pack(down, half=False)
    out = ops.moe(x, router, *packed, norm=None, residual=None)
    torch.testing.assert_close(out, 2.0 * 0.5 * functional.linear(swiglu(x @ gate_up[2].T), down[2]))


class Case:
    """Requests of a step with scattered pages; what belongs to nobody holds NaN."""

    def __init__(
        self,
        ops: FusedOps,
        spans: list[tuple[int, int]],
        page_size: int,
        kv_heads: int,
        dims: tuple[int, int],
        dtype: torch.dtype,
    ) -> None:
        self.spans = spans
        self.page_size = page_size
        ends = [begin + count for begin, count in spans]
        counts = [-(-end // page_size) for end in ends]
        order = np.random.default_rng(len(spans)).permutation(sum(counts)) + 1
        self.pages = order.astype(np.int64)
        self.map = np.zeros(len(order) + 1, np.int64)
        self.map[1:] = np.roll(np.arange(1, len(order) + 1), 3)
        self.k, self.v = (
            to_rows(
                torch.full((kv_heads, (len(order) + 1) * page_size, dim), float("nan"), device=ops.device),
                stored_dtype(dtype),
            )
            for dim in dims
        )
        rows, tables, listed = 0, 0, []
        for (begin, count), pages in zip(spans, counts):
            listed.append((rows, begin, count, tables))
            rows += count
            tables += pages
        self.rows = rows
        self.tables = ops.tables(np.array(listed), self.pages, self.map, page_size)

    def slots(self, request: int, full: bool) -> torch.Tensor:
        """Slots of all positions of a request, those of this step included."""
        begin, count = self.spans[request]
        at = np.arange(begin + count)
        pages = self.pages[self.tables.spans[request, 3] + at // self.page_size]
        slots = (pages if full else self.map[pages]) * self.page_size + at % self.page_size
        return torch.from_numpy(slots).to(self.k.device)


SPANS = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 70)), min_size=1, max_size=4)


@EXAMPLES
@given(
    spans=SPANS,
    page_size=st.sampled_from([1, 3, 16, 64]),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1), (8, 8), (16, 1)]),
    dims=st.sampled_from([(8, 8), (24, 16), (12, 20), (64, 64), (33, 5), (192, 128)]),
    window=st.sampled_from([None, 1, 9, 64, 129]),
    sink=st.booleans(),
    dtype=DTYPES,
    kv_dtype=KV_DTYPES,
)
def test_attention(
    ops: NativeOps,
    spans: list[tuple[int, int]],
    page_size: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    window: int | None,
    sink: bool,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> None:
    dims = (32, 8) if kv_dtype == FP8 and dims == (33, 5) else dims
    check_attention(ops, spans, page_size, heads, dims, window, sink, dtype, kv_dtype)


@EXAMPLES
@given(
    spans=SPANS,
    page_size=st.sampled_from([1, 3, 16]),
    heads=st.sampled_from([(1, 1), (4, 2), (8, 8)]),
    dims=st.sampled_from([(8, 8), (24, 16), (12, 20)]),
    full=st.booleans(),
    norms=st.booleans(),
    dtype=DTYPES,
    kv_dtype=KV_DTYPES,
)
def test_rope_and_store(
    ops: NativeOps,
    spans: list[tuple[int, int]],
    page_size: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    full: bool,
    norms: bool,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> None:
    check_rope_and_store(ops, spans, page_size, heads, dims, full, norms, dtype, kv_dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_computed_alike_alone_and_in_any_batch(ops: NativeOps, dtype: torch.dtype) -> None:
    depth, width = 70, 50
    x = random(1, 101, depth, dtype=dtype)
    weight = random(2, 90, depth)
    gate_up, down, gate = random(3, 6, 2 * width, depth), random(4, 6, depth, width), random(5, 6, depth)
    norm = Norm(random(6, depth), 1e-5)
    for half in (False, True):
        router = Router(ops.pack(gate, half=False), random(7, 6), 2, True, 1.0)
        linear = ops.pack(weight, half=half)
        experts = ops.pack_gate_up(gate_up, half=half), ops.pack(down, half=half)
        dense = ops.pack_gate_up(gate_up[0], half=half), ops.pack(down[0], half=half)
        for begin, end in ((0, 1), (3, 5), (10, 17), (50, 101)):
            part = x[begin:end]
            assert torch.equal(
                ops.linear(x, linear, norm=norm)[begin:end], ops.linear(part, linear, norm=norm)
            )
            both = [ops.gated_mlp(rows, *dense, norm=norm, residual=rows) for rows in (x, part)]
            assert torch.equal(both[0][begin:end], both[1])
            both = [ops.moe(rows, router, *experts, norm=norm, residual=rows) for rows in (x, part)]
            assert torch.equal(both[0][begin:end], both[1])


def test_nan_stays_in_its_row(ops: NativeOps) -> None:
    x = random(1, 20, 16)
    x[3] = float("nan")
    packed = ops.pack_gate_up(random(2, 16, 16), half=False), ops.pack(random(3, 16, 8), half=False)
    out = ops.gated_mlp(x, *packed, norm=None, residual=None)
    assert out[3].isnan().all()
    assert torch.cat([out[:3], out[4:]]).isfinite().all()


def test_bf16_panels_only_where_they_are_exact(ops: NativeOps) -> None:
    weight = torch.tensor([[1.0, 0.5], [3.0, -2.0]])
    assert ops.fits_half(weight, weight.to(torch.bfloat16))
    assert not ops.fits_half(weight, weight + 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_with_a_residual(ops: NativeOps, dtype: torch.dtype) -> None:
    x, residual = random(1, 7, 19, dtype=dtype), random(2, 7, 19, dtype=dtype)
    norm = Norm(random(3, 19), 1e-6)
    assert_near(ops.rms_norm(x, norm), normed(x, norm))
    assert_near(ops.rms_norm(x, norm, residual), residual.double() + normed(x, norm))


BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@BOTH
@pytest.mark.parametrize("extras", [False, True])
def test_triton_linear(triton_ops: FusedOps, dtype: torch.dtype, extras: bool) -> None:
    check_linear(triton_ops, 5, 19, 23, dtype, False, extras)


@BOTH
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_triton_gated_mlp(triton_ops: FusedOps, dtype: torch.dtype, activation: str) -> None:
    check_gated_mlp(triton_ops, 3, 20, 37, dtype, True, activation)


@BOTH
@pytest.mark.parametrize(("rows", "experts", "top_k"), [(1, 7, 3), (21, 3, 2), (40, 2, 1), (2, 70, 1)])
def test_triton_moe(triton_ops: FusedOps, dtype: torch.dtype, rows: int, experts: int, top_k: int) -> None:
    check_moe(triton_ops, rows, 21, 70, experts, top_k, dtype, dtype == torch.bfloat16)


# Of the model and of its pools.
PAIRS = pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        (torch.float32, FP8),
        (torch.bfloat16, FP8),
    ],
)


@PAIRS
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("window", [None, 9, 70])
def test_triton_attention(
    triton_ops: FusedOps, dtype: torch.dtype, kv_dtype: torch.dtype, window: int | None, sink: bool
) -> None:
    decode, mixed = [(70, 1), (0, 1), (130, 1)], [(33, 11), (0, 17), (90, 1)]
    check_attention(triton_ops, decode, 3, (6, 2), (20, 12), window, sink, dtype, kv_dtype)
    check_attention(triton_ops, mixed, 16, (4, 1), (24, 16), window, sink, dtype, kv_dtype)


@PAIRS
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_triton_rope_and_store(
    triton_ops: FusedOps, dtype: torch.dtype, kv_dtype: torch.dtype, full: bool, norms: bool
) -> None:
    check_rope_and_store(triton_ops, [(5, 3), (0, 2)], 3, (4, 2), (12, 20), full, norms, dtype, kv_dtype)


@BOTH
def test_triton_rms_norm(triton_ops: FusedOps, dtype: torch.dtype) -> None:
    x, residual = (random(i, 7, 19, dtype=dtype, device=triton_ops.device) for i in (1, 2))
    norm = Norm(random(3, 19, device=triton_ops.device), 1e-6)
    assert_near(triton_ops.rms_norm(x, norm), normed(x, norm))
    assert_near(triton_ops.rms_norm(x, norm, residual), residual.double() + normed(x, norm))
