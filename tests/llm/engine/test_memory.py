"""Little memory: everyone gets through, nothing is lost, and SWA slots stay O(window + chunk)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from transom.hub import resolve_model
from transom.kernels.native_ops import NativeOps
from transom.llm.capacity import PoolPlan, answer_margin, swa_live_tokens
from transom.llm.holdings import Holdings
from transom.llm.model.fused import fused
from transom.llm.model.mimo_v2 import MiMoV2ForCausalLM
from transom.llm.model.registry import read_config
from transom.llm.policies import POLICIES
from transom.llm.pools import DualPools
from transom.llm.request import Drop, Extend, Request, ReturnWish, Start
from transom.llm.runner import Step, pages_of
from transom.messages import Sampling

Make = Callable[..., Any]
Check = Callable[..., None]

PAGE, PAD = 4, 91


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 90, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(
    ("policy", "share", "cached", "overlap"),
    [
        *(("fewest-uncached", share, cached, False) for share in (1.0, 0.5, 0.1) for cached in (False, True)),
        *(("fewest-uncached", share, cached, True) for share in (0.5, 0.1) for cached in (False, True)),
        *((policy, 0.1, True, False) for policy in POLICIES if policy != "fewest-uncached"),
    ],
)
def test_no_deadlock_in_too_little_memory(
    model: MiMoV2ForCausalLM,
    make_harness: Make,
    assert_greedy: Check,
    policy: str,
    share: float,
    cached: bool,
    overlap: bool,
) -> None:
    """Ten requests in the memory that all, half or a tenth of them need at once; one waits for media."""
    lengths = [5 + 7 * i % 60 for i in range(10)]
    needed = sum((length + 12 + PAGE) // PAGE for length in lengths)
    least = (max(lengths) + 12) // PAGE + 3
    pages = max(int(needed * share), least)
    harness = make_harness(
        model,
        full=pages,
        swa=max(pages // 2, 9),
        batch_tokens=16,
        policy=policy,
        cached=cached,
        overlap=overlap,
    )
    rows = torch.randn(10, 32, generator=torch.Generator().manual_seed(3))
    head, tail = prompt_of(20, 50), prompt_of(6, 51)
    harness.engine.submit(Start(harness.request("media", prompt_ids=list(head), max_tokens=5)))
    for i, length in enumerate(lengths):
        harness.submit(f"r{i}", prompt_of(length, i), max_tokens=12, priority=i % 2)
        harness.engine.step()
    for _ in range(40):
        harness.engine.step()
    harness.engine.submit(Extend("media", [PAD] * 10, list(range(10)), rows, False, "key"))
    harness.engine.submit(Extend("media", tail, [], None, True))
    harness.run()
    for i, length in enumerate(lengths):
        assert_greedy(harness.tokens[f"r{i}"], model, prompt_of(length, i), 12)
    assert_greedy(harness.tokens["media"], model, [*head, *[PAD] * 10, *tail], 5, rows, list(range(20, 30)))
    harness.assert_nothing_left()


def test_swa_slots_of_a_64k_token_request(
    make_model: Make, make_harness: Make, native_ops: NativeOps
) -> None:
    """65,000 tokens of prompt and 300 of output in an SWA pool of window + chunk, then half the answer again.

    One full layer with one head: its 2 * 10^9 pairs of query and key are what takes the time.
    """
    chunk, page_size = 2048, 16
    shape = {"num_hidden_layers": 3, "hybrid_layer_pattern": [0, 1, 1], "moe_layer_freq": [0, 1, 1]}
    model = make_model(**shape, num_attention_heads=1, max_position_embeddings=70_000)
    window = model.config.layers[1].window
    bound = (window + chunk) // page_size + 3
    harness = make_harness(
        fused(model, native_ops), full=4200, swa=bound, page_size=page_size, batch_tokens=chunk,
        context_len=70_000, cached=True, overlap=True,
    )  # fmt: skip
    prompt = prompt_of(65_000)

    def run(name: str, ids: Sequence[int], max_tokens: int) -> float:
        """Return the most SWA slots that the request ever held."""
        harness.submit(name, ids, max_tokens=max_tokens)
        peak = 0.0
        while name not in harness.finished:
            harness.engine.step()
            peak = max(peak, harness.engine.load()["swa_used_slots"])
        return peak

    assert chunk * 8 // 9 <= run("long", prompt, 300) <= bound * page_size
    half = harness.tokens["long"][:150]
    # A window, the half that is computed anew behind the cached prompt, and the pages that both end on.
    assert run("again", [*prompt, *half], 150) <= window + 150 + 3 * page_size
    assert harness.tokens["again"] == harness.tokens["long"][150:]
    load = harness.engine.load()
    assert load["retractions"] == 0
    assert load["computed_tokens"] <= 65_299 + 150 + 149 + 2 * page_size
    harness.assert_nothing_left()


@pytest.mark.parametrize(("page_size", "chunk", "interval"), [(16, 512, 16), (1, 700, 5), (64, 2048, 48)])
def test_swa_slots_of_64k_tokens_in_nanos_pools(page_size: int, chunk: int, interval: int) -> None:
    """Nano's layers and real pools, without computing: what a request holds at any time, to the slot."""
    config = read_config(resolve_model("mimo-nano"))
    window = max(spec.window or 0 for spec in config.layers)
    most = swa_live_tokens(window, page_size, interval, chunk)
    assert most <= window + chunk + 2 * page_size + interval
    plan = PoolPlan(page_size, 66_000 // page_size + 2, most // page_size + 1, 0, 0)
    pools = DualPools(config, plan, dtype=torch.bfloat16, device=torch.device("cpu"), clear_pages=False)
    holdings = Holdings(pools, None, interval)
    request = Request(
        "long", Sampling(max_tokens=400), 1e12, 0.0, prompt_ids=[0] * 65_536, prompt_complete=True
    )
    holdings.give_first(request)
    held = []
    for count in [*[chunk] * (65_536 // chunk), 65_536 % chunk, *[1] * 400]:
        decoding = request.computed >= 65_536
        holdings.extend(request, request.computed + count)
        step = Step(request, request.computed, count, samples=False, decoding=decoding, ahead=False)
        held.append(holdings.figures()["swa_used_slots"])
        request.computed += count
        pages_of(request).length = request.computed
        holdings.note(step)
        pools.check_integrity([pages_of(request)])
    assert most - page_size <= max(held) <= most
    assert held[-1] < max(held)
    assert holdings.figures()["full_used_slots"] >= 65_936
    holdings.forget(request)
    pools.check_integrity(())


def test_prompts_of_all_kinds_in_one_tiny_pool(
    model: MiMoV2ForCausalLM, make_harness: Make, assert_greedy: Check
) -> None:
    """Cut anywhere, retracted, cached, evicted, beside a picture: the tokens are those of a plain run."""
    for chunk in (3, 13):
        harness = make_harness(model, full=34, swa=16, batch_tokens=chunk, cached=True)
        rows = torch.randn(10, 32, generator=torch.Generator().manual_seed(3))
        head, tail = prompt_of(12, 1), prompt_of(7, 2)
        media = [*head, *[PAD] * 10, *tail]
        for round in range(2):
            name = f"media {round}"
            harness.engine.submit(Start(harness.request(name, prompt_ids=list(head), max_tokens=6)))
            for i in range(4):
                harness.submit(
                    f"{round} {i}", [*head, *prompt_of(9 + 7 * i, i)], max_tokens=9, hands_off=i == 3
                )
            for _ in range(3):
                harness.engine.step()
            harness.engine.submit(Extend(name, [PAD] * 10, list(range(10)), rows, False, "key"))
            harness.engine.submit(Extend(name, tail, [], None, True))
            harness.run()
            assert_greedy(harness.tokens[name], model, media, 6, rows, list(range(12, 22)))
            for i in range(4):
                steps = 1 if i == 3 else 9
                assert_greedy(harness.tokens[f"{round} {i}"], model, [*head, *prompt_of(9 + 7 * i, i)], steps)
            harness.assert_nothing_left()


@pytest.mark.parametrize("cached", [False, True])
def test_clients_that_leave_while_retracted_leave_nothing(
    model: MiMoV2ForCausalLM, make_harness: Make, cached: bool
) -> None:
    """The KV in host memory goes with its request, at whatever step that ends."""
    for after in (3, 12, 24, 36):
        harness = make_harness(model, full=24, swa=24, cached=cached)
        for i in range(4):
            harness.submit(f"r{i}", prompt_of(20, i), max_tokens=40)
        for _ in range(after):
            harness.engine.step()
        retracted = harness.engine.load()["retracted_bytes"]
        for i in range(4):
            harness.engine.submit(Drop(f"r{i}"))
        harness.run()
        assert harness.engine.load()["retracted_bytes"] == 0
        harness.assert_nothing_left()
        if after > 30:
            assert retracted > 0


@pytest.mark.parametrize(("long_page", "short_page"), [(16, 3), (8, 1), (3, 16)])
def test_a_hand_over_between_pages_of_other_lengths_takes_what_was_counted_for_it(
    model: MiMoV2ForCausalLM, make_harness: Make, assert_greedy: Check, long_page: int, short_page: int
) -> None:
    """Prefill keeps a margin of its pages behind the window; decode has room for its own and no more."""
    margin = answer_margin(short_page)
    least = swa_live_tokens(pools_window(model) + margin, short_page, 4, 1) // short_page
    prefill = make_harness(
        model, page_size=long_page, margin=answer_margin(long_page), cached=True, answers=True
    )
    decode = make_harness(model, page_size=short_page, margin=margin, swa=least)
    decode.prefilled_elsewhere = frozenset({"a", "b"})
    prompt = prompt_of(44)
    for name in "ab":
        prefill.submit(name, prompt, hands_off=True, max_tokens=20)
        prefill.run()
        handed = prefill.prefilled[name]
        decode.submit(name, prompt, output_ids=[handed.first_token], host_kv=handed.host_kv, max_tokens=20)
    decode.run()
    for name in "ab":
        assert_greedy([prefill.tokens[name][0], *decode.tokens[name]], model, prompt, 20)
    decode.assert_nothing_left()


@pytest.mark.parametrize(("first_page", "second_page"), [(1, 16), (3, 8), (4, 4), (16, 3)])
def test_an_answer_that_goes_back_has_only_rows_that_were_stored(
    model: MiMoV2ForCausalLM, make_harness: Make, native_ops: NativeOps, first_page: int, second_page: int
) -> None:
    """Decode pages that begin before what prefill sent have slots that nobody wrote, whatever is in them."""
    fast = fused(model, native_ops)
    prefill = make_harness(
        fast, page_size=first_page, margin=answer_margin(first_page), cached=True, answers=True
    )
    decode = make_harness(fast, page_size=second_page, margin=answer_margin(second_page))
    decode.pools._clear_pages = False
    for store in (decode.pools.full, decode.pools.swa):
        store.k[:, :, 1:] = store.v[:, :, 1:] = float("nan")
    decode.prefilled_elsewhere = frozenset({"a"})
    prefill.submit("a", prompt_of(45), hands_off=True, max_tokens=20)
    prefill.run()
    handed = prefill.prefilled["a"]
    assert handed.return_from is not None
    wish = ReturnWish(handed.return_from, first_page, "prefill")
    fields = {"output_ids": [handed.first_token], "host_kv": handed.host_kv, "wish": wish}
    decode.submit("a", prompt_of(45), max_tokens=20, **fields)
    decode.run()
    assert decode.answers["a"].host_kv.finite
    assert decode.answers["a"].host_kv.swa_len >= pools_window(model) - 1
    decode.assert_nothing_left()


def pools_window(model: MiMoV2ForCausalLM) -> int:
    return max(spec.window or 0 for spec in model.config.layers)


def test_what_was_handed_over_is_a_copy(
    model: MiMoV2ForCausalLM, make_harness: Make, assert_greedy: Check
) -> None:
    """The pages of a request whose KV is still on its way serve others without harm to it."""
    prefill, decode = make_harness(model, full=14, swa=14, cached=True), make_harness(model)
    prompt = prompt_of(40)
    prefill.submit("a", prompt, hands_off=True, max_tokens=20)
    prefill.run()
    handed = prefill.prefilled["a"]
    before = [tensor.clone() for tensor in handed.host_kv.tensors]
    for i in range(3):
        prefill.submit(f"other {i}", prompt_of(45, i + 1), hands_off=True)
        prefill.run()
    assert all(torch.equal(now, then) for now, then in zip(handed.host_kv.tensors, before, strict=True))
    decode.prefilled_elsewhere = frozenset({"a"})
    decode.submit("a", prompt, output_ids=[handed.first_token], host_kv=handed.host_kv, max_tokens=20)
    decode.run()
    assert_greedy([handed.first_token, *decode.tokens["a"]], model, prompt, 20)
