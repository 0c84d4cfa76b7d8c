"""What a decode worker generated comes back into the prefix cache: a next turn does not compute it anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from transom.llm.model.mimo_v2 import MiMoV2ForCausalLM
from transom.llm.pools import HostKV
from transom.llm.request import KeepAnswer, ReturnWish, TokenEvent

Make = Callable[..., Any]
Check = Callable[..., None]

PAGE = 4


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 90, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class Pair:
    """A prefill engine with a cache and a decode engine, and what their stages would pass between them."""

    def __init__(
        self, make_harness: Make, model: MiMoV2ForCausalLM, *, page: int = PAGE, **more: Any
    ) -> None:
        self.prefill = make_harness(model, cached=True, answers=True, margin=2 * PAGE, **more)
        self.decode = make_harness(model, page_size=page, margin=2 * page)

    def serve(self, name: str, prompt: list[int], max_tokens: int, **fields: Any) -> list[int]:
        """Return the answer; its KV is back in the prefill engine then."""
        self.begin(name, prompt, max_tokens, **fields)
        self.give_back(name)
        return self.answer(name)

    def begin(self, name: str, prompt: list[int], max_tokens: int, **fields: Any) -> None:
        self.prefill.submit(name, prompt, hands_off=True, max_tokens=max_tokens, **fields)
        self.prefill.run()
        if name in self.prefill.finished:
            return
        event = self.prefill.prefilled[name]
        self.decode.prefilled_elsewhere |= {name}
        wish = None if event.return_from is None else ReturnWish(event.return_from, PAGE, "prefill")
        self.decode.submit(
            name,
            prompt,
            output_ids=[event.first_token],
            host_kv=event.host_kv,
            max_tokens=max_tokens,
            wish=wish,
        )
        self.decode.run()

    def give_back(self, name: str) -> None:
        back = self.decode.answers.get(name)
        if back is not None:
            self.prefill.engine.submit(KeepAnswer(name, back.output_ids, back.host_kv))
            self.prefill.engine.step()
            self.prefill.assert_nothing_left()

    def answer(self, name: str) -> list[int]:
        tokens: list[int] = self.prefill.tokens[name] + self.decode.tokens.get(name, [])
        return tokens

    def cached(self, name: str) -> int:
        return next(
            e.cached_tokens for e in self.prefill.events if isinstance(e, TokenEvent) and e.request_id == name
        )


@pytest.mark.parametrize("page", [4, 8])
@pytest.mark.parametrize(
    ("prompt_len", "answer_len"), [(22, 15), (3, 30), (41, 5), (40, 9), (17, 4), (30, 2)]
)
def test_answers_are_not_prefilled_again(
    model: MiMoV2ForCausalLM,
    make_harness: Make,
    assert_greedy: Check,
    page: int,
    prompt_len: int,
    answer_len: int,
) -> None:
    pair = Pair(make_harness, model, page=page, batch_tokens=16)
    prompt, stored = prompt_of(prompt_len), 0
    for turn in range(4):
        answer = pair.serve(f"t{turn}", prompt, answer_len)
        assert_greedy(answer, model, prompt, answer_len)
        assert pair.cached(f"t{turn}") == stored // PAGE * PAGE
        stored = len(prompt) + answer_len - 1  # the last token was never fed in
        prompt = [*prompt, *answer, *prompt_of(9, turn)]
    pair.decode.assert_nothing_left()
    assert pair.prefill.engine.load()["cache_answer_tokens"] > 0


def test_a_window_that_was_evicted_meanwhile_heals(
    model: MiMoV2ForCausalLM, make_harness: Make, assert_greedy: Check
) -> None:
    pair = Pair(make_harness, model)
    prompt = prompt_of(40)
    pair.begin("a", prompt, 6)
    pair.prefill.cache.make_room(0, pair.prefill.pools.swa_pages.capacity)
    assert pair.prefill.pools.swa_pages.used == 0
    pair.give_back("a")
    longer = [*prompt, *pair.answer("a"), *prompt_of(5, 1)]
    assert_greedy(pair.serve("b", longer, 8), model, longer, 8)
    # Evicting the window of a leaf takes the leaf: there is no prompt left for the answer to join.
    assert pair.cached("b") == 0


@pytest.mark.parametrize("lost", ["prompt", "answer", "both pools"])
def test_what_is_lost_on_the_way_costs_time_only(
    model: MiMoV2ForCausalLM, make_harness: Make, assert_greedy: Check, lost: str
) -> None:
    pair = Pair(make_harness, model, full=60, swa=24)
    prompt = prompt_of(40)
    pair.begin("a", prompt, 20)
    if lost == "prompt":
        pair.prefill.cache.make_room(60, 24)
    elif lost == "both pools":
        for seed in range(5):
            pair.serve(f"other {seed}", prompt_of(90, 50 + seed), 2)
    if lost != "answer":
        pair.give_back("a")
    longer = [*prompt, *pair.answer("a"), *prompt_of(5, 1)]
    assert_greedy(pair.serve("b", longer, 8), model, longer, 8)
    assert pair.cached("b") == (40 if lost == "answer" else 0)


def test_tenants_and_pictures_stay_apart(
    model: MiMoV2ForCausalLM, make_harness: Make, assert_greedy: Check
) -> None:
    pair = Pair(make_harness, model)
    prompt = prompt_of(30)
    answer = pair.serve("a", prompt, 20, cache_salt="a")
    longer = [*prompt, *answer, *prompt_of(5, 1)]
    pair.serve("b", longer, 8, cache_salt="b")
    pair.serve("again", longer, 8, cache_salt="a")
    assert (pair.cached("b"), pair.cached("again")) == (0, 48)


def test_answers_that_do_not_fit_are_refused(
    model: MiMoV2ForCausalLM, make_harness: Make, assert_greedy: Check
) -> None:
    """Another request's KV, a part of a page, NaN: nothing of it may reach the tree."""
    pair = Pair(make_harness, model)
    prompt = prompt_of(30)

    def spoil(kind: str, host: HostKV) -> HostKV:
        if kind == "begin":
            return replace(
                host, begin=host.begin + PAGE, full_k=host.full_k[:, PAGE:], full_v=host.full_v[:, PAGE:]
            )
        if kind == "end":
            return replace(host, length=host.length - 1)
        return replace(host, full_k=torch.full_like(host.full_k, float("nan")))

    for kind in ("begin", "end", "nan"):
        pair.begin(kind, prompt, 20, cache_salt=kind)
        back = pair.decode.answers[kind]
        pair.prefill.engine.submit(KeepAnswer(kind, back.output_ids, spoil(kind, back.host_kv)))
        pair.prefill.engine.submit(KeepAnswer("stranger", back.output_ids, back.host_kv))
        pair.prefill.engine.step()
        pair.prefill.assert_nothing_left()
        longer = [*prompt, *pair.answer(kind), *prompt_of(5, 1)]
        assert_greedy(pair.serve(f"{kind} next", longer, 8, cache_salt=kind), model, longer, 8)
        assert pair.cached(f"{kind} next") == 28
    assert pair.prefill.engine.load()["cache_answer_tokens"] == 3 * 8


turns = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 14), st.integers(1, 18), st.booleans(), st.integers(0, 12)),
    min_size=3,
    max_size=14,
)


@given(turns, st.integers(30, 70), st.integers(10, 24))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_conversations_over_a_tiny_pool(
    model: MiMoV2ForCausalLM,
    make_harness: Make,
    assert_greedy: Check,
    turns: list[tuple[int, int, int, bool, int]],
    full: int,
    swa: int,
) -> None:
    """Turns of several conversations, some answers late or lost, windows and prompts evicted in between."""
    pair = Pair(make_harness, model, full=full, swa=swa, batch_tokens=16, context_len=100)
    history = {number: prompt_of(10 * number + 3, number) for number in range(4)}
    late: list[str] = []
    for turn, (number, text, steps, prompt_back, evicted) in enumerate(turns):
        prompt = [*history[number], *prompt_of(text, turn)]
        if len(prompt) + steps >= min(100, full * PAGE - 8):
            history[number] = prompt_of(5, turn)
            continue
        name = f"t{turn}"
        pair.begin(name, prompt, steps)
        pair.prefill.cache.make_room(pair.prefill.pools.full_pages.available + evicted % 4, 0)
        pair.prefill.cache.make_room(0, pair.prefill.pools.swa_pages.available + evicted // 4)
        late.append(name)
        if prompt_back:
            for earlier in late:
                pair.give_back(earlier)
            late.clear()
        answer = pair.answer(name)
        assert_greedy(answer, model, prompt, steps)
        history[number] = [*prompt, *answer]
    pair.prefill.assert_nothing_left()
    pair.decode.assert_nothing_left()
