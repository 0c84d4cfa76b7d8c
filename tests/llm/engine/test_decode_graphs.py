"""Decode steps in fixed buffers, and recorded: tokens and KV of the plain run, whatever pads a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from transom.errors import ConfigError
from transom.kernels.kv_rows import FP8
from transom.kernels.native_ops import NativeOps
from transom.kernels.triton_ops import DeviceTables, TritonOps
from transom.llm.build import build_engine
from transom.llm.config import PrefillConfig
from transom.llm.decode_graphs import DecodeGraphs
from transom.llm.graph_sizes import capture_within, graph_sizes, padded_size
from transom.llm.model.fused import FusedModel
from transom.llm.model.mimo_v2 import MiMoV2ForCausalLM
from transom.llm.pools import DualPools, RequestKV
from transom.llm.request import Drop, Request, Start
from transom.messages import Sampling

Make = Callable[..., Any]
Check = Callable[..., None]
Pools = Callable[..., DualPools]
Fuse = Callable[..., FusedModel]
Models = Callable[..., MiMoV2ForCausalLM]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 90, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


# Which sizes.


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_sizes_hold_every_batch_and_waste_little(most: int, rows: int) -> None:
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == most
    assert len(sizes) <= 4 + 2 * most.bit_length()
    size = padded_size(sizes, rows)
    if rows > most:
        assert size is None
    else:
        assert size is not None
        assert size - rows < max(size / 3, 4)


@given(st.integers(1, 600), st.integers(0, 2000), st.integers(1, 9), st.integers(0, 60))
def test_as_many_sizes_as_the_memory_holds(most: int, limit: int, per_row: int, own: int) -> None:
    """All share the rows' memory of the largest, each has some of its own."""
    held: list[int] = []

    def cost() -> int:
        return max(held, default=0) * per_row + own * len(held)

    def capture(size: int) -> int:
        held.append(size)
        return cost()

    sizes = graph_sizes(most)
    kept = capture_within(sizes, limit, capture, held.remove)
    assert sorted(held) == kept
    assert cost() <= limit
    larger = [size for size in sizes if size > max(kept, default=0)]
    assert all(size * per_row + own > limit for size in larger)
    if kept and kept != [size for size in sizes if size <= kept[-1]]:
        assert cost() + own > limit


# The same tokens, and KV where the plain run has it.

traffic = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 40), st.integers(1, 30)),
        st.tuples(st.just("drop"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 12), st.just(0)),
    ),
    min_size=5,
    max_size=30,
)


def stored(pools: DualPools) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield each tensor of the pools and its page count without the scratch page."""
    for store, pages in ((pools.full, pools.plan.full_pages), (pools.swa, pools.plan.swa_pages)):
        yield store.k, pages
        yield store.v, pages


@given(
    steps=traffic,
    most=st.integers(1, 9),
    pages=st.integers(20, 60),
    page_size=st.sampled_from([1, 3, 4]),
    cached=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, FP8]),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_slot_is_that_of_the_plain_run(
    native: FusedModel,
    make_harness: Make,
    steps: list[tuple[str, int, int]],
    most: int,
    pages: int,
    page_size: int,
    cached: bool,
    dtype: torch.dtype,
) -> None:
    """Two engines in step, of which one pads: not a bit of the pools differs after any step."""
    fields = {"full": pages * 4 // page_size, "swa": pages * 2 // page_size, "page_size": page_size}
    fields |= {"cached": cached, "dtype": dtype, "context_len": 72, "batch_tokens": 24}
    plain, padded = make_harness(native, **fields), make_harness(native, padded=most, **fields)
    for harness in (plain, padded):
        for tensor, count in stored(harness.pools):
            tensor[:, :, 1:count] = 0
    names = 0

    def compare() -> None:
        for (one, count), (other, _) in zip(stored(plain.pools), stored(padded.pools)):
            assert torch.equal(one[:, :, :count], other[:, :, :count])

    for action, number, count in steps:
        if action == "submit":
            for harness in (plain, padded):
                harness.submit(f"r{names}", prompt_of(number, names), max_tokens=count)
            names += 1
        elif action == "drop":
            for harness in (plain, padded):
                harness.engine.submit(Drop(f"r{number % max(names, 1)}"))
        else:
            for _ in range(number):
                plain.engine.step()
                padded.engine.step()
                compare()
    plain.run()
    padded.run()
    compare()
    assert padded.tokens == plain.tokens
    assert padded.finished == plain.finished
    assert not padded.errors
    padded.assert_nothing_left()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("most", [7, 16])
def test_tokens_of_the_uncached_run_with_retractions_and_windows_crossed(
    model: MiMoV2ForCausalLM,
    native: FusedModel,
    make_harness: Make,
    assert_greedy: Check,
    overlap: bool,
    most: int,
) -> None:
    """Batches of all sizes, some larger than any buffer; the draws of a step in flight feed the next."""
    harness = make_harness(native, full=26, swa=22, padded=most, overlap=overlap, batch_tokens=24)
    prompts = {f"r{i}": prompt_of(3 + 7 * i % 30, i) for i in range(9)}
    for i, (name, prompt) in enumerate(prompts.items()):
        harness.submit(name, prompt, max_tokens=5 + 4 * i)
        harness.engine.step()
    harness.run()
    assert not harness.errors
    for i, (name, prompt) in enumerate(prompts.items()):
        assert_greedy(harness.tokens[name], model, prompt, 5 + 4 * i)
    load = harness.engine.load()
    assert load["retractions"] > 0
    assert load["graph_steps"] > 10
    assert load["graph_padded_rows"] > 0
    assert load["graph_bytes"] > 0
    harness.assert_nothing_left()


def test_drawn_tokens_and_logprobs(native: FusedModel, make_harness: Make) -> None:
    """What the sampler is given is bit for bit that of the plain run."""
    events = []
    for padded in (0, 4):
        harness = make_harness(native, padded=padded)
        for i in range(3):
            sampling = Sampling(
                max_tokens=9, temperature=1.1, seed=i, top_p=0.9, top_logprobs=4, ignore_eos=True
            )
            harness.submit(f"r{i}", prompt_of(5 + i, i), sampling=sampling)
        harness.run()
        events.append([(e.request_id, e.token_id, e.logprob) for e in harness.events])
    assert events[0] == events[1]


def test_tables_too_long_for_the_buffer_run_plainly(native: FusedModel, make_pools: Pools) -> None:
    pools = make_pools(native.config, full=4, swa=4, scratch=True)
    graphs = DecodeGraphs(native, pools, 1000, 8)
    kv = RequestKV()
    pools.extend(kv, 16)
    assert graphs.place([(kv, 15, 1)] * 2) is not None
    assert graphs.place([(kv, 15, 1)] * 3) is None  # 12 pages, twice those of the pool are 8
    assert graphs.place([(kv, 15, 1)] * 9) is None


# Triton's tables, and what a recording forbids.


class NoQuestions(TorchDispatchMode):
    """Fails when an op's result is asked for on the host, or decides on a shape."""

    ASKS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount", "repeat_interleave")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(name in func.name() for name in self.ASKS), f"{func.name()} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, FP8], ids=str)
def test_triton_takes_a_padded_batch_and_asks_the_host_for_nothing(
    make_model: Models,
    triton_ops: TritonOps,
    make_pools: Pools,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    fuse: Fuse,
) -> None:
    """Experts, both kinds of layers, more than one page and a window behind: as the plain step has it."""
    model = make_model(num_hidden_layers=2, hybrid_layer_pattern=[1, 0], moe_layer_freq=[0, 1])
    native, device = fuse(model.to(triton_ops.device), triton_ops), triton_ops.device
    prompts = [prompt_of(n, n) for n in (13, 6, 2)]
    found: list[Any] = []
    uploads: list[Any] = []
    with torch.inference_mode():
        for padded in (False, True):
            pools = make_pools(model.config, device=device, clear_pages=False, scratch=True, dtype=dtype)
            for tensor, _ in stored(pools):
                tensor.zero_()
            graphs = DecodeGraphs(native, pools, 100, 6)
            kvs = [RequestKV() for _ in prompts]
            for kv, prompt in zip(kvs, prompts):
                pools.extend(kv, len(prompt) - 1)
                ids = torch.tensor(prompt[:-1], device=device)
                native.forward(
                    native.embed(ids), native.place(pools, [(kv, 0, len(ids))]), np.arange(len(ids))
                )
                kv.length = len(ids)
                pools.slide(kv)
                pools.extend(kv, len(prompt))
            spans = [(kv, kv.length, 1) for kv in kvs]
            last = torch.tensor([prompt[-1] for prompt in prompts], device=device)
            if not padded:
                hidden = native.forward(native.embed(last), native.place(pools, spans), np.arange(3))
            else:
                rows = graphs.place(spans)
                assert rows is not None
                step = graphs._steps[4]
                step.fill(last, rows)
                monkeypatch.setattr(DeviceTables, "_upload", lambda *args: uploads.append(args))
                with NoQuestions():
                    hidden = step.forward()[:3]
                assert not uploads
                assert torch.equal(graphs.forward(last, rows), hidden)
            written = [(tensor[:, :, :pages] != 0).any(-1) for tensor, pages in stored(pools)]
            found.append((hidden, written))
    # torch's products round differently with another number of rows, and fp8 enlarges that.
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(found[1][0], found[0][0], atol=tolerance, rtol=tolerance)
    for one, other in zip(found[0][1], found[1][1]):
        assert torch.equal(one, other)


# Settings.


def run_one(engine: Any) -> None:
    engine.submit(
        Start(
            Request(
                "a",
                Sampling(max_tokens=6, temperature=0.0, ignore_eos=True),
                1e12,
                0.0,
                prompt_ids=[3, 5, 8],
                prompt_complete=True,
            )
        )
    )
    while engine.load()["computed_tokens"] < 8:
        engine.step()


@pytest.mark.parametrize(
    ("setting", "kernels", "padded"),
    [("auto", "auto", False), ("padded", "auto", True), ("padded", "torch", False)],
)
def test_the_setting_on_a_cpu(native_ops: NativeOps, setting: str, kernels: str, padded: bool) -> None:
    config = PrefillConfig(
        model="mimo-nano", device="cpu", cuda_graphs=setting, kernels=kernels, kv_memory_gb=0.01
    )
    engine, _ = build_engine(config, lambda events: None)
    run_one(engine)
    load = engine.load()
    assert ("graph_steps" in load) == padded
    assert load.get("graph_steps", 0) == (5 if padded else 0)


def test_on_without_cuda_is_refused() -> None:
    config = PrefillConfig(model="mimo-nano", device="cpu", cuda_graphs="on")
    with pytest.raises(ConfigError, match="graphs need CUDA"):
        build_engine(config, lambda events: None)


def test_scratch_pages_are_within_the_budget(native_ops: NativeOps) -> None:
    """The pools and what pads use take no more than `kv_memory_gb`."""
    held = {}
    for setting in ("off", "padded"):
        config = PrefillConfig(model="mimo-nano", device="cpu", cuda_graphs=setting, kv_memory_gb=0.01)
        engine, _ = build_engine(config, lambda events: None)
        pools = engine._holdings._pools
        held[setting] = sum(t.numel() * t.element_size() for t, _ in stored(pools))
        pools.check_integrity(())
    assert held["padded"] <= 0.01e9
    assert held["off"] - held["padded"] < 0.01e9 / 100


# Recorded.

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")


@cuda
def test_recorded_steps_give_the_tokens_of_the_plain_run(
    make_model: Models, triton_ops: TritonOps, make_pools: Pools, make_harness: Make, fuse: Fuse
) -> None:
    """Captured, replayed in all sizes amid retractions and prompts; a cap leaves sizes out."""
    native = fuse(make_model().to(triton_ops.device), triton_ops)
    prompts = {f"r{i}": prompt_of(3 + 7 * i % 30, i) for i in range(9)}
    outputs = []
    for padded in (0, 16):
        harness = make_harness(
            native, full=26, swa=22, padded=padded, overlap=True, batch_tokens=24, device=triton_ops.device
        )
        if harness.graphs is not None:
            harness.graphs.capture(1 << 30, must=True)
            assert harness.graphs.sizes == graph_sizes(16)
            assert 0 < harness.graphs.bytes <= 1 << 30
        for i, (name, prompt) in enumerate(prompts.items()):
            harness.submit(name, prompt, max_tokens=5 + 4 * i)
            harness.engine.step()
        harness.run()
        harness.assert_nothing_left()
        outputs.append(harness.tokens)
    assert outputs[0] == outputs[1]
    pools = make_pools(native.config, device=triton_ops.device, scratch=True)
    graphs = DecodeGraphs(native, pools, 1000, 16)
    graphs.capture(graphs.bytes, must=True)
    assert graphs.sizes == []
    assert graphs.place([(RequestKV(), 0, 1)]) is None
