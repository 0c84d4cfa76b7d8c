"""Requests that begin alike and arrive together compute it once, whatever becomes of the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from transom.llm.model.mimo_v2 import MiMoV2ForCausalLM
from transom.llm.request import Drop, Extend, Start

Make = Callable[..., Any]
Check = Callable[..., None]

PAGE = 4
PAD = 91


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 90, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("policy", ["fewest-uncached", "fcfs", "longest-prefix"])
@pytest.mark.parametrize(("chunk", "overlap"), [(7, False), (7, True), (32, False), (64, True)])
def test_a_shared_prefix_is_computed_once(
    model: MiMoV2ForCausalLM,
    make_harness: Make,
    assert_greedy: Check,
    chunk: int,
    overlap: bool,
    policy: str,
) -> None:
    """Four arrive in one step; where the prefix ends is known to nobody but from comparing them."""
    harness = make_harness(model, batch_tokens=chunk, cached=True, policy=policy, overlap=overlap)
    prompts = {f"r{i}": prompt_of(61) + prompt_of(9 + i, 10 + i) for i in range(4)}
    for name, prompt in prompts.items():
        harness.submit(name, prompt)
    harness.run()
    computed = harness.engine.load()["computed_tokens"]
    own = [len(prompt) - 60 for prompt in prompts.values()]  # 60: the last page that all share
    assert computed == 60 + sum(own) + 4 * 7
    for name, prompt in prompts.items():
        assert_greedy(harness.tokens[name], model, prompt, 8)
    harness.assert_nothing_left()


def test_the_same_prompt_several_times_at_once(
    model: MiMoV2ForCausalLM, make_harness: Make, assert_greedy: Check
) -> None:
    harness = make_harness(model, batch_tokens=16, cached=True)
    prompt = prompt_of(41)
    for i in range(5):
        harness.submit(f"r{i}", prompt, hands_off=True)
    harness.run()
    # The others compute the last token, and the page it stands on.
    assert harness.engine.load()["computed_tokens"] == 41 + 4 * (41 - 40)
    for i in range(5):
        assert_greedy(harness.tokens[f"r{i}"], model, prompt, 1)
    harness.assert_nothing_left()


@pytest.mark.parametrize("end", ["cancelled", "failed"])
@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_a_follower_goes_on_where_the_first_was_stopped(
    make_model: Make,
    make_harness: Make,
    assert_greedy: Check,
    monkeypatch: pytest.MonkeyPatch,
    end: str,
    after: int,
) -> None:
    """What the first had computed until then counts; the rest is computed by the next one, once."""
    model = make_model()
    harness = make_harness(model, batch_tokens=16, cached=True)
    shared = prompt_of(80)
    harness.submit("first", [*shared, *prompt_of(15, 1)])
    for i in range(2):
        harness.submit(f"r{i}", [*shared, *prompt_of(20, 2 + i)])
    for _ in range(after):
        harness.engine.step()
    if end == "cancelled":
        harness.engine.submit(Drop("first"))
    else:
        embed: Callable[[torch.Tensor], torch.Tensor] = model.embed

        def poisoned(ids: torch.Tensor) -> torch.Tensor:
            if harness.engine._requests.get("first") is not None:
                raise RuntimeError("poison")
            return embed(ids)

        monkeypatch.setattr(model, "embed", poisoned)
    harness.run()
    for i in range(2):
        assert_greedy(harness.tokens[f"r{i}"], model, [*shared, *prompt_of(20, 2 + i)], 8)
    # A page may be lost where the first stopped inside of it.
    assert harness.engine.load()["computed_tokens"] <= 80 + 2 * 20 + 2 * 7 + PAGE
    harness.assert_nothing_left()


def test_the_same_picture_twice_at_once(
    model: MiMoV2ForCausalLM, make_harness: Make, assert_greedy: Check
) -> None:
    """Both run already when the rows come: the second follows from inside of its prompt."""
    harness = make_harness(model, batch_tokens=16, cached=True)
    head, tail = prompt_of(10, 1), prompt_of(9, 2)
    rows = torch.randn(40, 32, generator=torch.Generator().manual_seed(3))
    ids = [*head, *[PAD] * 40, *tail]
    for name in "ab":
        harness.engine.submit(Start(harness.request(name, prompt_ids=list(head), max_tokens=8)))
    harness.engine.step()
    for name in "ab":
        harness.engine.submit(Extend(name, [PAD] * 40, list(range(40)), rows, False, "key"))
        harness.engine.submit(Extend(name, tail, [], None, True))
    harness.run()
    for name in "ab":
        assert_greedy(harness.tokens[name], model, ids, 8, rows, list(range(10, 50)))
    # Once the prompt, twice the head (both began before anything was known) and the last page.
    assert harness.engine.load()["computed_tokens"] <= len(ids) + 9 + 3 + 2 * 7
    harness.assert_nothing_left()


def test_other_tenants_share_nothing(model: MiMoV2ForCausalLM, make_harness: Make) -> None:
    harness = make_harness(model, cached=True)
    for salt in "ab":
        harness.submit(salt, prompt_of(40), hands_off=True, cache_salt=salt)
    harness.engine.step()
    assert (
        harness.engine.load()["computed_tokens"] == 40 + 17
    )  # both at once, no one waits: a step has 64, of which 7 only to end a prompt
    harness.run()
    assert harness.engine.load()["computed_tokens"] == 80


def test_an_empty_end_of_a_prompt_samples(
    model: MiMoV2ForCausalLM, make_harness: Make, assert_greedy: Check
) -> None:
    """Everything may be computed when the last, empty piece says that nothing follows."""
    for cached in (False, True):
        harness = make_harness(model, cached=cached)
        for length in (1, 8, 41):
            prompt, name = prompt_of(length), f"n{length}"
            harness.engine.submit(Start(harness.request(name, prompt_ids=list(prompt))))
            for _ in range(3):
                harness.engine.step()
            harness.engine.submit(Extend(name, [], [], None, True))
            harness.run()
            assert_greedy(harness.tokens[name], model, prompt, 8)
        harness.assert_nothing_left()
