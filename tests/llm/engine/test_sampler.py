"""Sampling against brute force, and its independence of the batch."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transom.errors import RequestError
from transom.llm.sampler import SamplerState, check_sampling, filtered, sample, uniform
from transom.messages import Sampling

VOCAB = 12
CPU = torch.device("cpu")


def make(**fields: Any) -> Sampling:
    return Sampling(**{"max_tokens": 5, **fields})


def state(**fields: Any) -> SamplerState:
    return SamplerState(make(**fields), VOCAB, CPU)


samplings = st.builds(
    make,
    temperature=st.floats(0.1, 3),
    top_k=st.integers(0, VOCAB + 2),
    top_p=st.floats(0, 1),
    min_p=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
)
# Multiples of 1/4, so that ties are common; the filters' own arithmetic is what is tested, not its rounding.
rows_of_logits = st.lists(st.integers(-16, 16).map(lambda n: n / 4), min_size=VOCAB, max_size=VOCAB)


def brute_force(logits: list[float], sampling: Sampling) -> tuple[set[int], set[int]]:
    """Return which tokens must stay and which may: rounding decides at the edges of top-p and min-p."""
    weights = [math.exp((x - max(logits)) / sampling.temperature) for x in logits]
    order = sorted(range(VOCAB), key=lambda i: (-weights[i], i))[: sampling.top_k or VOCAB]
    total = sum(weights[i] for i in order)
    must, may = set(), set()
    before = 0.0
    for rank, token in enumerate(order):
        share = before / total
        if rank == 0 or share < sampling.top_p - 1e-5:
            must.add(token)
        if rank == 0 or share < sampling.top_p + 1e-5:
            may.add(token)
        before += weights[token]
    must = {i for i in must if weights[i] > sampling.min_p + 1e-5 or i == order[0]}
    may = {i for i in may if weights[i] >= sampling.min_p - 1e-5}
    return must, may


@given(st.lists(st.tuples(rows_of_logits, samplings), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_filters_equal_brute_force(cases: list[tuple[list[float], Sampling]]) -> None:
    kept = filtered(torch.tensor([row for row, _ in cases]), [sampling for _, sampling in cases]) > 0
    for row, (logits, sampling) in zip(kept, cases):
        must, may = brute_force(logits, sampling)
        assert must <= set(row.nonzero()[:, 0].tolist()) <= may


@given(
    st.lists(st.tuples(rows_of_logits, samplings, st.integers(0, 1000)), min_size=1, max_size=6), st.data()
)
@settings(max_examples=40, deadline=None)
def test_a_token_depends_on_its_own_row_only(
    cases: list[tuple[list[float], Sampling, int]], data: st.DataObject
) -> None:
    def run(chosen: list[tuple[list[float], Sampling, int]]) -> list[int | None]:
        states = [SamplerState(sampling, VOCAB, CPU) for _, sampling, _ in chosen]
        logits = torch.tensor([row for row, _, _ in chosen])
        return [d.token for d in sample(logits, states, [index for _, _, index in chosen]).draws()]

    together = run(cases)
    order = data.draw(st.permutations(range(len(cases))))
    assert run([cases[i] for i in order]) == [together[i] for i in order]
    assert [run([case])[0] for case in cases] == together


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0] + [-30.0] * (VOCAB - 4))
    states = [state(seed=7)] * 4000
    drawn = Counter(d.token for d in sample(logits.expand(4000, -1), states, list(range(4000))).draws())
    for token, share in enumerate(logits.softmax(-1).tolist()[:4]):
        assert abs(drawn[token] / 4000 - share) < 5 * math.sqrt(share / 4000)


def test_uniform_numbers_are_spread() -> None:
    numbers = [uniform(seed, index) for seed in (0, 1, -1, 2**62) for index in range(500)]
    assert len(set(numbers)) == 2000
    assert all(0 <= x < 1 for x in numbers)
    assert abs(sum(numbers) / 2000 - 0.5) < 0.03


def test_greedy_ignores_filters_and_seed() -> None:
    logits = torch.tensor([[float(i % 7) for i in range(VOCAB)]])
    assert sample(logits, [state(temperature=0, top_k=3, top_p=0.1, seed=3)], [0]).draws()[0].token == 6


def test_penalties_and_bias() -> None:
    logits = torch.full((1, VOCAB), -1.0)
    logits[0, :3] = torch.tensor([2.0, 1.9, -0.5])
    greedy = {"temperature": 0.0}

    def pick(**fields: Any) -> int | None:
        chosen = state(**greedy, **fields)
        chosen.observe_prompt([0])
        chosen.observe([1, 1])
        return sample(logits, [chosen], [2]).draws()[0].token

    assert pick() == 0
    assert pick(frequency_penalty=0.5) == 0
    assert pick(repetition_penalty=1.01, presence_penalty=-1.0) == 1  # a bonus for what was put out
    assert pick(repetition_penalty=5.0, presence_penalty=0.0) == 0  # 2.0 / 5 and 1.9 / 5 stay in order
    assert pick(repetition_penalty=5.0, logit_bias={2: 1.0}) == 2
    assert pick(logit_bias={0: -100.0}) == 1
    assert pick(frequency_penalty=-0.2) == 1  # 1.9 + 2 * 0.2


def test_log_probabilities_are_the_models() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    states = [
        state(temperature=0, top_logprobs=0),
        state(temperature=0, top_logprobs=3, logit_bias={4: 50.0}),
        state(temperature=0),
    ]
    first, second, third = sample(logits, states, [0, 0, 0]).draws()
    expected = logits.log_softmax(-1)
    assert first.logprob is not None
    assert second.logprob is not None
    assert third.logprob is None
    assert first.logprob.top == []
    assert first.logprob.logprob == pytest.approx(float(expected[0].max()))
    assert second.logprob.token_id == 4
    assert second.logprob.logprob == pytest.approx(float(expected[1, 4]))
    assert [token for token, _ in second.logprob.top] == expected[1].topk(3).indices.tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_only_the_row_that_is_not_finite_fails(bad: float) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, 5] = 1
    logits[1, 3] = bad
    draws = sample(
        logits, [state(temperature=0, top_logprobs=1), state(), state(temperature=0)], [0, 0, 0]
    ).draws()
    assert [d.token for d in draws] == [5, None, 5]
    assert draws[1].logprob is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 6}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias"),
    ],
)
def test_impossible_values_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_sampling(make(**fields), VOCAB)
    assert caught.value.param == param


def test_the_smallest_temperatures_do_not_overflow() -> None:
    logits = torch.tensor([[100.0 - i for i in range(VOCAB)]])
    for temperature in (1e-30, 1e-5, 1e-4, 1e-3):
        assert sample(logits, [state(temperature=temperature)], [0]).draws()[0].token == 0


@given(
    row=rows_of_logits,
    eos=st.lists(st.integers(0, VOCAB - 1), max_size=3),
    stops=st.lists(st.integers(0, VOCAB - 1), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    index=st.integers(0, 4),
    temperature=st.sampled_from([0.0, 1.0, 2.0]),
)
@settings(max_examples=60, deadline=None)
def test_nothing_ends_an_answer_before_min_tokens(
    row: list[float],
    eos: list[int],
    stops: tuple[int, ...],
    ignore_eos: bool,
    index: int,
    temperature: float,
) -> None:
    """The tokens that would end it are as if they weren't there, in this row and up to this index only."""
    fields: dict[str, Any] = {
        "temperature": temperature, "stop_token_ids": stops, "ignore_eos": ignore_eos, "seed": 7,
        "top_logprobs": 2,
    }  # fmt: skip
    held = SamplerState(make(min_tokens=3, **fields), VOCAB, CPU, eos_ids=eos)
    free = SamplerState(make(**fields), VOCAB, CPU, eos_ids=eos)
    ends = {*(() if ignore_eos else eos), *stops}
    logits = torch.tensor([row, row, row])
    before, early, after = sample(logits, [free, held, free], [index] * 3).draws()
    assert before == after == sample(logits[:1], [free], [index]).draws()[0]
    if index >= 3:
        assert early == before
        return
    biased = SamplerState(make(logit_bias=dict.fromkeys(ends, -1000.0), **fields), VOCAB, CPU)
    assert early.token not in ends
    assert early.token == sample(logits[:1], [biased], [index]).draws()[0].token
    assert early.logprob is not None
    assert before.logprob is not None
    assert early.logprob.top == before.logprob.top, "log-probabilities are the model's own"


def test_where_only_an_end_is_left_it_ends() -> None:
    only = {token: -1000.0 for token in range(VOCAB) if token != 4}
    held = SamplerState(make(min_tokens=3, logit_bias=only), VOCAB, CPU, eos_ids=range(VOCAB))
    assert sample(torch.zeros(1, VOCAB), [held], [0]).draws()[0].token == 4
