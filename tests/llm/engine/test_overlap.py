"""A step planned while the one before is computed: the same tokens, and nothing left of what was in vain."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from transom.llm.model.mimo_v2 import MiMoV2ForCausalLM
from transom.llm.request import Drop, Event, Extend, Start, TokenEvent
from transom.messages import Sampling

Make = Callable[..., Any]
Reference = Callable[..., list[int]]
Check = Callable[..., None]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 90, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.3, "seed": 5},
    "filtered": {"temperature": 0.9, "top_k": 12, "top_p": 0.9, "seed": 6, "top_logprobs": 3},
    "penalised": {"temperature": 1.0, "seed": 7, "repetition_penalty": 1.4, "frequency_penalty": 0.5},
    "biased": {"temperature": 0.0, "logit_bias": {3: 4.0, 9: -5.0}},
}


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("kinds", [("greedy", "drawn", "filtered"), tuple(SAMPLINGS)])
def test_events_are_those_of_one_step_after_the_other(
    model: MiMoV2ForCausalLM, make_harness: Make, kinds: tuple[str, ...], cached: bool
) -> None:
    """Requests come amid others, with all kinds of samplers, in little memory, and stop at tokens."""

    def run(overlap: bool) -> tuple[dict[str, list[TokenEvent]], Any]:
        harness = make_harness(model, full=60, swa=36, batch_tokens=24, cached=cached, overlap=overlap)
        for i in range(10):
            fields = SAMPLINGS[kinds[i % len(kinds)]]
            sampling = Sampling(max_tokens=4 + 5 * i % 31, stop_token_ids=(7, 33), **fields)
            harness.submit(f"r{i}", prompt_of(3 + 11 * i % 40, seed=i), sampling=sampling)
            harness.engine.step()
            harness.engine.step()
        harness.run()
        harness.assert_nothing_left()
        assert not harness.errors
        events: dict[str, list[TokenEvent]] = {}
        for event in harness.events:
            assert isinstance(event, TokenEvent)
            events.setdefault(event.request_id, []).append(event)
        return events, harness

    expected, _ = run(overlap=False)
    events, _ = run(overlap=True)
    assert {event.finish_reason for row in expected.values() for event in row} == {"stop", "length", None}
    for name, row in expected.items():
        assert len(events[name]) == len(row)
        for one, other in zip(events[name], row):
            assert (one.token_id, one.emit, one.finish_reason) == (
                other.token_id,
                other.emit,
                other.finish_reason,
            )
            if other.logprob is not None:
                assert one.logprob is not None
                assert one.logprob.logprob == pytest.approx(other.logprob.logprob, abs=1e-4)


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_a_sampler_with_a_memory_draws_when_it_knows_the_token_before(
    model: MiMoV2ForCausalLM, make_harness: Make, kind: str
) -> None:
    """Nothing is launched behind such a request's step; behind those of others it is."""
    harness = make_harness(model, overlap=True)
    launch, behind = harness.engine._launch, []

    def launching(steps: Any) -> None:
        behind.append(len(harness.engine._flights))
        launch(steps)

    harness.engine._launch = launching
    harness.submit("a", prompt_of(9), sampling=Sampling(max_tokens=8, ignore_eos=True, **SAMPLINGS[kind]))
    harness.run()
    assert len(harness.tokens["a"]) == 8
    forgets = kind in ("greedy", "drawn", "filtered")
    assert behind[:8] == ([0, 0, *[1] * 6] if forgets else [0] * 8)
    harness.assert_nothing_left()


class Gate:
    """Holds the model back until the test lets it go on, and counts what it is asked for."""

    def __init__(self, model: MiMoV2ForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Semaphore(0)
        self._open = threading.Semaphore(0)
        self.poison: int | None = None  # the batch that fails, counted from 0
        self._batches = 0
        embed: Callable[[torch.Tensor], torch.Tensor] = model.embed

        def held(ids: torch.Tensor) -> torch.Tensor:
            number, self._batches = self._batches, self._batches + 1
            self.begun.release()
            assert self._open.acquire(timeout=30)
            if number == self.poison:
                raise RuntimeError("poison")
            return embed(ids)

        monkeypatch.setattr(model, "embed", held)

    def let(self, batches: int) -> None:
        self._open.release(batches)


@pytest.fixture
def gate(make_model: Make, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[MiMoV2ForCausalLM, Gate]]:
    model = make_model()
    gate = Gate(model, monkeypatch)
    yield model, gate
    gate.let(1000)


def test_the_next_step_is_launched_while_one_is_computed(
    gate: tuple[MiMoV2ForCausalLM, Gate], make_harness: Make
) -> None:
    """The model may not go on, and yet the step after the one that it computes is planned and launched."""
    model, held = gate
    harness = make_harness(model, overlap=True)
    harness.submit("a", prompt_of(12), max_tokens=6)
    harness.engine.step()  # the prompt
    assert held.begun.acquire(timeout=30)
    assert harness.engine.load()["computed_tokens"] == 0
    held.let(1)
    harness.engine.step()  # has to know what the prompt leaves
    assert harness.engine.load()["computed_tokens"] == 12
    assert len(harness.tokens["a"]) == 1
    plan_ahead, planned = harness.engine._launch, []

    def launch(steps: Any) -> None:
        plan_ahead(steps)
        planned.extend(steps)
        held.let(1)  # the step before may end only now

    harness.engine._launch = launch
    harness.engine.step()
    assert [step.begin for step in planned] == [13]
    assert len(harness.tokens["a"]) == 2
    harness.engine._launch = plan_ahead
    held.let(100)
    harness.run()
    assert len(harness.tokens["a"]) == 6
    harness.assert_nothing_left()


def test_keys_are_built_while_a_step_is_computed(
    gate: tuple[MiMoV2ForCausalLM, Gate],
    make_harness: Make,
    assert_greedy: Check,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, held = gate
    harness = make_harness(model, overlap=True, cached=True)
    harness.submit("a", prompt_of(12))
    harness.engine.step()
    harness.submit("b", prompt_of(30, 1))
    prepare = harness.cache.prepare

    def prepared(request: Any) -> None:
        prepare(request)
        held.let(1000)  # until then the prompt of `a` is computed

    monkeypatch.setattr(harness.cache, "prepare", prepared)
    harness.engine._land()
    assert {request.request_id for request, entry in harness.cache._entries.items() if entry.key} == {
        "a",
        "b",
    }
    harness.run()
    assert_greedy(harness.tokens["b"], model, prompt_of(30, 1), 8)
    harness.assert_nothing_left()


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("end", ["dropped", "late", "dropped and sent again"])
def test_a_request_that_leaves_in_flight_keeps_its_pages_until_then(
    model: MiMoV2ForCausalLM, make_harness: Make, assert_greedy: Check, cached: bool, end: str
) -> None:
    for after in range(1, 8):
        now = [0.0]
        harness = make_harness(
            model, batch_tokens=16, overlap=True, cached=cached, clock=partial(now.__getitem__, 0)
        )
        harness.submit("a", prompt_of(30), max_tokens=20, deadline_s=5.0)
        harness.submit("b", prompt_of(9, 1), max_tokens=20)
        for _ in range(after):
            harness.engine.step()
        flying = [step.request for flight in harness.engine._flights for step in flight.steps]
        gone = [request for request in flying if request.request_id == "a"]
        if end == "late":
            now[0] = 6.0
        else:
            harness.engine.submit(Drop("a"))
        if end == "dropped and sent again":
            harness.tokens.pop("a", None)
            harness.submit("a", prompt_of(30), max_tokens=20)
        harness.engine._take_commands(0.0)
        harness.engine._expire()
        assert all(request.kv is not None and request.kv.count for request in gone)
        harness.run()
        assert all(request.kv is None and not request.flying for request in gone)
        assert_greedy(harness.tokens["b"], model, prompt_of(9, 1), 20)
        if end == "dropped and sent again":
            assert_greedy(harness.tokens["a"], model, prompt_of(30), 20)
        else:
            assert "a" not in harness.finished
        harness.assert_nothing_left()


def test_the_step_after_an_end_is_in_vain_and_leaves_nothing(
    model: MiMoV2ForCausalLM, make_harness: Make, reference: Reference
) -> None:
    """A stop token is known a step late; the row behind it is discarded, and what is cached is right."""
    prompt = prompt_of(12)
    expected = reference(model, prompt, 20)
    stop = expected[9]
    end = expected.index(stop)
    sampling = Sampling(max_tokens=20, temperature=0.0, stop_token_ids=(stop,), ignore_eos=True)
    harness = make_harness(model, overlap=True, cached=True)
    harness.submit("a", prompt, sampling=sampling)
    harness.submit("b", prompt_of(12, 1), max_tokens=30)
    harness.run()
    assert harness.tokens["a"] == expected[: end + 1]
    assert harness.finished["a"] == "stop"
    computed = harness.engine.load()["computed_tokens"]
    assert computed == 12 + end + 1 + 12 + 29  # one row in vain
    # The second turn goes on from the answer's whole pages: the tokens show that their KV is right.
    turn = [*prompt, *harness.tokens["a"], *prompt_of(5, 2)]
    harness.submit("c", turn, max_tokens=8)
    harness.run()
    assert harness.tokens["c"] == reference(model, turn, 8)
    assert harness.engine.load()["cache_hit_tokens"] >= (12 + end) // 4 * 4 - 4
    harness.assert_nothing_left()


@pytest.mark.parametrize("batch", range(8))
def test_a_flight_behind_one_that_failed_is_computed_anew(
    make_model: Make,
    make_harness: Make,
    assert_greedy: Check,
    monkeypatch: pytest.MonkeyPatch,
    batch: int,
) -> None:
    """A batch fails once: nobody is to blame when each is tried alone, and what was behind starts anew."""
    model = make_model()
    gate = Gate(model, monkeypatch)
    gate.poison = batch
    gate.let(1000)
    harness = make_harness(model, overlap=True, batch_tokens=32)
    for i in range(3):
        harness.submit(f"r{i}", prompt_of(10 + i, seed=i), max_tokens=9)
    harness.run()
    monkeypatch.undo()
    assert not harness.errors
    for i in range(3):
        assert_greedy(harness.tokens[f"r{i}"], model, prompt_of(10 + i, seed=i), 9)
    harness.assert_nothing_left()


def test_the_culprit_in_a_flight_fails_alone(
    make_model: Make,
    make_harness: Make,
    assert_greedy: Check,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A token drawn in flight makes the next step fail, with one behind it."""
    model = make_model()
    prompts = {name: prompt_of(11, seed) for seed, name in enumerate(("bad", "good"))}
    drawn = reference(model, prompts["bad"], 6)
    poison = next(token for token in drawn[2:] if token not in drawn[:2])
    assert poison not in [*prompts["good"], *reference(model, prompts["good"], 12)]
    embed: Callable[[torch.Tensor], torch.Tensor] = model.embed

    def poisoned(ids: torch.Tensor) -> torch.Tensor:
        if (ids == poison).any():
            raise RuntimeError("poison")
        return embed(ids)

    monkeypatch.setattr(model, "embed", poisoned)
    harness = make_harness(model, overlap=True)
    for name, prompt in prompts.items():
        harness.submit(name, prompt, max_tokens=12)
    harness.run()
    monkeypatch.undo()
    assert "poison" in harness.errors["bad"].message
    assert_greedy(harness.tokens["good"], model, prompts["good"], 12)
    harness.assert_nothing_left()


def test_commands_are_taken_while_a_step_is_computed(
    gate: tuple[MiMoV2ForCausalLM, Gate],
    make_harness: Make,
    assert_greedy: Check,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine waits for a step and for commands alike; `stop` waits for what is in flight."""
    model, held = gate
    harness = make_harness(model, overlap=True)
    ended = threading.Event()
    take = harness.engine._emit

    def emit(events: list[Event]) -> None:
        take(events)
        if any(isinstance(e, TokenEvent) and e.finish_reason for e in events):
            ended.set()

    harness.engine._emit = emit
    taken = threading.Event()
    grow = harness.engine._intake.grow

    def growing(*args: Any) -> None:
        grow(*args)
        taken.set()

    monkeypatch.setattr(harness.engine._intake, "grow", growing)
    failed: list[BaseException] = []
    harness.engine.start(failed.append)
    harness.engine.submit(Start(harness.request("a", prompt_ids=prompt_of(10), max_tokens=5)))
    assert held.begun.acquire(timeout=30)
    harness.engine.submit(Extend("a", prompt_of(6, 1), [], None, True))
    assert taken.wait(timeout=30)  # though the model has not gone on
    held.let(1000)
    assert ended.wait(timeout=30)
    harness.engine.stop()
    monkeypatch.undo()
    assert not failed
    assert_greedy(harness.tokens["a"], model, [*prompt_of(10), *prompt_of(6, 1)], 5)
