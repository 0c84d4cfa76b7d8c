"""The engine's output equals the uncached run token for token, however work is cut, shared or interrupted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from transom.llm.model.mimo_v2 import MiMoV2ForCausalLM
from transom.llm.request import Drop, Extend, Start
from transom.messages import Sampling

Make = Callable[..., Any]
Reference = Callable[..., list[int]]
Check = Callable[..., None]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 90, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("chunk", [1, 3, 8, 9, 10, 16, 41, 64])
def test_chunked_prefill_at_every_boundary(
    model: MiMoV2ForCausalLM, make_harness: Make, assert_greedy: Check, chunk: int
) -> None:
    harness = make_harness(model, batch_tokens=chunk)
    prompt = prompt_of(41)
    harness.submit("a", prompt, max_tokens=20)
    harness.run()
    assert_greedy(harness.tokens["a"], model, prompt, 20)
    assert harness.finished["a"] == "length"
    harness.assert_nothing_left()


def test_batched_with_others(model: MiMoV2ForCausalLM, make_harness: Make, assert_greedy: Check) -> None:
    harness = make_harness(model, batch_tokens=24)
    prompts = {f"r{i}": prompt_of(1 + 13 * i % 50, seed=i) for i in range(9)}
    for i, (name, prompt) in enumerate(prompts.items()):
        harness.submit(name, prompt, max_tokens=5 + i)
        harness.engine.step()
    harness.run()
    for i, (name, prompt) in enumerate(prompts.items()):
        assert_greedy(harness.tokens[name], model, prompt, 5 + i)
    harness.assert_nothing_left()


@pytest.mark.parametrize("prompt_len", [1, 7, 8, 9, 33])
def test_handed_over_between_engines(
    model: MiMoV2ForCausalLM, make_harness: Make, assert_greedy: Check, prompt_len: int
) -> None:
    prefill, decode = make_harness(model), make_harness(model, page_size=8)
    prompt = prompt_of(prompt_len)
    prefill.submit("a", prompt, hands_off=True, max_tokens=20)
    prefill.run()
    prefill.assert_nothing_left()
    handed = prefill.prefilled["a"]
    assert handed.host_kv.swa_len == min(prompt_len, 8)
    decode.prefilled_elsewhere = frozenset({"a"})
    decode.submit(
        "a", handed.prompt_ids, output_ids=[handed.first_token], host_kv=handed.host_kv, max_tokens=20
    )
    decode.run()
    assert_greedy(prefill.tokens["a"] + decode.tokens["a"], model, prompt, 20)
    decode.assert_nothing_left()


def test_retracted_and_resumed(model: MiMoV2ForCausalLM, make_harness: Make, assert_greedy: Check) -> None:
    """Four requests that need 4 x 15 pages share 24: some are retracted, all end, nothing changes."""
    harness = make_harness(model, full=24, swa=24)
    prompts = {f"r{i}": prompt_of(20, seed=i) for i in range(4)}
    for name, prompt in prompts.items():
        harness.submit(name, prompt, max_tokens=40)
    retractions = 0
    retract = harness.engine._retract

    def counting(request: Any) -> None:
        nonlocal retractions
        retractions += 1
        retract(request)

    harness.engine._retract = counting
    harness.run()
    assert retractions > 0
    for name, prompt in prompts.items():
        assert_greedy(harness.tokens[name], model, prompt, 40)
    harness.assert_nothing_left()


def test_prompts_that_fill_the_pool_make_way(
    model: MiMoV2ForCausalLM, make_harness: Make, assert_greedy: Check
) -> None:
    """Growing prompts hold all pages between them; the first one gets through by restarting the others."""
    harness = make_harness(model, full=12, swa=12, batch_tokens=16)
    prompts = {f"r{i}": prompt_of(40, seed=i) for i in range(3)}
    for name, prompt in prompts.items():
        harness.engine.submit(Start(harness.request(name, prompt_ids=prompt[:15], max_tokens=3)))
        harness.engine.step()
    for name, prompt in prompts.items():
        harness.engine.submit(Extend(name, prompt[15:], [], None, True))
    harness.run()
    for name, prompt in prompts.items():
        assert_greedy(harness.tokens[name], model, prompt, 3)
    harness.assert_nothing_left()


def test_media_rows_arrive_in_pieces(
    model: MiMoV2ForCausalLM, make_harness: Make, assert_greedy: Check
) -> None:
    """Two requests whose embeddings arrive alternately, cut inside chunks; a text request overtakes both."""
    harness = make_harness(model, batch_tokens=7)
    generator = torch.Generator().manual_seed(5)
    prompts = {name: prompt_of(37, seed=i) for i, name in enumerate("ab")}
    rows = {name: torch.randn(20, 32, generator=generator) for name in "ab"}
    at = list(range(10, 30))
    for name in "ab":
        harness.engine.submit(Start(harness.request(name, prompt_ids=prompts[name][:10], max_tokens=6)))
    harness.submit("text", prompts["a"], max_tokens=6)
    cuts = {"a": [10, 13, 25, 30], "b": [10, 11, 29, 30]}
    for piece in range(3):
        for name in "ba":
            low, high = cuts[name][piece : piece + 2]
            ids = prompts[name][low:high]
            part = rows[name][low - 10 : high - 10]
            harness.engine.submit(Extend(name, ids, list(range(high - low)), part, False))
            harness.engine.step()
            harness.engine.step()
    for name in "ab":
        assert name not in harness.tokens
        harness.engine.submit(Extend(name, prompts[name][30:], [], None, True))
    harness.run()
    for name in "ab":
        assert_greedy(harness.tokens[name], model, prompts[name], 6, rows[name], at)
    assert_greedy(harness.tokens["text"], model, prompts["a"], 6)
    harness.assert_nothing_left()


def test_swa_slots_stay_bounded(model: MiMoV2ForCausalLM, make_harness: Make) -> None:
    """4,000 tokens of prompt and 200 of output in an SWA pool that holds window + chunk only."""
    chunk, page_size, window = 64, 4, model.config.layers[1].window
    assert window is not None
    bound = window + chunk + 2 * page_size
    harness = make_harness(model, full=1100, swa=60, batch_tokens=chunk)
    harness.submit("long", prompt_of(4000), max_tokens=200)
    peak_full = peak_swa = 0.0
    while "long" not in harness.finished:
        harness.engine.step()
        load = harness.engine.load()
        peak_full = max(peak_full, load["full_used_slots"])
        peak_swa = max(peak_swa, load["swa_used_slots"])
    assert peak_full >= 4196
    assert peak_swa <= bound
    harness.assert_nothing_left()


def test_drop_at_every_stage(model: MiMoV2ForCausalLM, make_harness: Make) -> None:
    for after in range(12):
        harness = make_harness(model, batch_tokens=8)
        harness.submit("a", prompt_of(30), max_tokens=20)
        for _ in range(after):
            harness.engine.step()
        harness.engine.submit(Drop("a"))
        harness.engine.submit(Drop("unknown"))
        harness.run()
        assert "a" not in harness.finished
        assert not harness.errors
        harness.assert_nothing_left()


def test_nan_fails_its_own_request_only(
    model: MiMoV2ForCausalLM, make_harness: Make, assert_greedy: Check
) -> None:
    harness = make_harness(model, full=30, swa=30)
    prompt = prompt_of(12)
    harness.engine.submit(Start(harness.request("bad", prompt_ids=[1])))
    harness.engine.submit(Extend("bad", [2, 3], [0, 1], torch.full((2, 32), float("nan")), True))
    harness.submit("good", prompt, max_tokens=10)
    harness.run()
    assert harness.errors["bad"].status == 500
    assert "not finite" in harness.errors["bad"].message
    assert_greedy(harness.tokens["good"], model, prompt, 10)
    harness.submit("later", prompt, max_tokens=10)
    harness.run()
    assert harness.tokens["later"] == harness.tokens["good"]
    harness.assert_nothing_left()


def test_wrong_rows_fail_their_own_request_only(
    model: MiMoV2ForCausalLM, make_harness: Make, assert_greedy: Check
) -> None:
    """More placeholders than embeddings."""
    harness = make_harness(model)
    prompt = prompt_of(12)
    harness.engine.submit(Start(harness.request("bad", prompt_ids=[1])))
    harness.submit("good", prompt)
    harness.engine.submit(Extend("bad", [2, 3], [0, 1], torch.zeros(2, 31), True))
    harness.run()
    assert "expected (2, 32)" in harness.errors["bad"].message
    assert_greedy(harness.tokens["good"], model, prompt, 8)
    harness.assert_nothing_left()


def test_a_batch_that_raises_is_tried_one_by_one(
    make_model: Make, make_harness: Make, assert_greedy: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    harness = make_harness(model)
    embed = model.embed

    def poisoned(ids: torch.Tensor) -> torch.Tensor:
        if (ids == 93).any():
            raise RuntimeError("poison")
        return embed(ids)

    monkeypatch.setattr(model, "embed", poisoned)
    harness.submit("bad", [93, 1, 2])
    harness.submit("good", prompt_of(12))
    harness.run()
    assert "poison" in harness.errors["bad"].message
    assert_greedy(harness.tokens["good"], model, prompt_of(12), 8)
    harness.assert_nothing_left()


def test_eos_and_stop_tokens_end_a_request(
    model: MiMoV2ForCausalLM, make_harness: Make, reference: Reference
) -> None:
    prompt = prompt_of(12)
    expected = reference(model, prompt, 10)
    stop = expected[4]
    harness = make_harness(model)
    sampling = Sampling(max_tokens=10, temperature=0.0, stop_token_ids=(stop,), ignore_eos=True)
    harness.submit("a", prompt, sampling=sampling)
    harness.run()
    assert harness.tokens["a"] == expected[: expected.index(stop) + 1]
    assert harness.finished["a"] == "stop"
    assert [e.emit for e in harness.events][-1] is False


def test_limits_become_typed_errors(model: MiMoV2ForCausalLM, make_harness: Make) -> None:
    now = [0.0]
    harness = make_harness(model, context_len=20, clock=lambda: now[0])
    harness.submit("long", prompt_of(20))
    harness.submit("clamped", prompt_of(18), max_tokens=50)
    harness.submit("late", prompt_of(5), deadline_s=5.0, max_tokens=15)
    harness.submit("foreign", [5, 96])
    harness.engine.step()
    now[0] = 6.0
    harness.run()
    assert harness.errors["long"].code == "context_length_exceeded"
    assert harness.finished == {"clamped": "length"}
    assert len(harness.tokens["clamped"]) == 2
    assert harness.errors["late"].code == "deadline_exceeded"
    assert "vocabulary" in harness.errors["foreign"].message
    harness.assert_nothing_left()


def test_a_request_without_deadline_may_wait(model: MiMoV2ForCausalLM, make_harness: Make) -> None:
    harness = make_harness(model)
    harness.engine.submit(Start(harness.request("a", prompt_ids=[1], deadline_s=float("inf"))))
    harness.engine.step()
    harness.engine.step()
    harness.engine.submit(Drop("a"))
    assert harness.engine.step(wait_s=None)
    harness.assert_nothing_left()
