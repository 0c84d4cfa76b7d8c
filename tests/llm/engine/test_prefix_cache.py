"""With the prefix cache the engine computes less and says the same as the plain uncached run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from transom.llm import prefix_cache
from transom.llm.model.mimo_v2 import MiMoV2ForCausalLM
from transom.llm.policies import POLICIES
from transom.llm.request import Drop, Extend, Start, TokenEvent

Make = Callable[..., Any]
Check = Callable[..., None]

PAGE = 4
TURN_END = 94
PAD = 91


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 90, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def rows_of(seed: int, count: int = 13) -> torch.Tensor:
    return torch.randn(count, 32, generator=torch.Generator().manual_seed(seed))


def pages_below(length: int) -> int:
    """Return the tokens that a repeat may reuse: whole pages, and the last token must be computed."""
    return (length - 1) // PAGE * PAGE


def cached_of(harness: Any, name: str) -> int:
    return next(
        e.cached_tokens
        for e in harness.events
        if isinstance(e, TokenEvent) and e.request_id == name and e.index == 0
    )


def serve(harness: Any, name: str, prompt: Sequence[int], **fields: Any) -> int:
    """Run one request alone; return its cached tokens, which must be what was not computed."""
    before = harness.engine.load()["computed_tokens"]
    harness.submit(name, prompt, **fields)
    harness.run()
    cached = cached_of(harness, name)
    computed = harness.engine.load()["computed_tokens"] - before
    assert computed == len(prompt) - cached + len(harness.tokens[name]) - 1
    harness.assert_nothing_left()
    return cached


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("length", [1, 4, 5, 12, 41])
def test_the_same_prompt_again(
    model: MiMoV2ForCausalLM, make_harness: Make, assert_greedy: Check, length: int, chunk: int
) -> None:
    """A hit reads what the first run stored, however both were cut into chunks."""
    harness = make_harness(model, batch_tokens=chunk, cached=True)
    prompt = prompt_of(length)
    assert serve(harness, "cold", prompt, max_tokens=12) == 0
    for name in ("second", "third"):
        assert serve(harness, name, prompt, max_tokens=12) == pages_below(length)
        assert_greedy(harness.tokens[name], model, prompt, 12)
    assert_greedy(harness.tokens["cold"], model, prompt, 12)
    assert harness.engine.load()["cache_hit_tokens"] == 2 * pages_below(length)


@pytest.mark.parametrize("length", [3, 9, 16, 33])
def test_what_a_hit_hands_over_is_what_a_cold_run_does(
    model: MiMoV2ForCausalLM, make_harness: Make, length: int
) -> None:
    harness = make_harness(model, cached=True)
    prompt = prompt_of(length)
    assert serve(harness, "cold", prompt, hands_off=True) == 0
    assert serve(harness, "hit", prompt, hands_off=True) == pages_below(length)
    cold, hit = (harness.prefilled[name].host_kv for name in ("cold", "hit"))
    assert (hit.length, hit.swa_len) == (cold.length, cold.swa_len) == (length, min(length, 8))
    for ours, theirs in zip(hit.tensors, cold.tensors, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_truncated_prompt(model: MiMoV2ForCausalLM, make_harness: Make, assert_greedy: Check) -> None:
    """Cut anywhere it is right; cut where a turn ends it hits, as the window there was kept."""
    harness = make_harness(model, batch_tokens=16, cached=True)
    prompt = [*prompt_of(30), TURN_END, *prompt_of(33, 1), TURN_END, *prompt_of(40, 2)]
    serve(harness, "whole", prompt)
    for cut in (31, 65):
        shortened = prompt[:cut] + prompt_of(3, 9)
        assert serve(harness, f"turn {cut}", shortened) == cut // PAGE * PAGE
        assert_greedy(harness.tokens[f"turn {cut}"], model, shortened, 8)
    for cut in range(1, len(prompt), 9):
        serve(harness, f"cut {cut}", prompt[:cut])
        assert_greedy(harness.tokens[f"cut {cut}"], model, prompt[:cut], 8)


def test_a_shared_system_prompt(model: MiMoV2ForCausalLM, make_harness: Make, assert_greedy: Check) -> None:
    """The second user hits; where no turn ends, the branch is learnt and the third one hits."""
    harness = make_harness(model, cached=True)
    marked, unmarked = [*prompt_of(40, 1), TURN_END], prompt_of(41, 2)
    hits: dict[str, list[int]] = {"marked": [], "unmarked": []}
    for kind, system in (("marked", marked), ("unmarked", unmarked)):
        for user in range(3):
            prompt = system + prompt_of(20, 100 + user)
            name = f"{kind} {user}"
            hits[kind].append(serve(harness, name, prompt))
            assert_greedy(harness.tokens[name], model, prompt, 8)
    assert hits == {"marked": [0, 40, 40], "unmarked": [0, 0, 40]}


def test_turns_with_the_answers_in_the_history(
    model: MiMoV2ForCausalLM, make_harness: Make, assert_greedy: Check
) -> None:
    """Answers are not computed again, but for their last token, which was never fed in."""
    harness = make_harness(model, batch_tokens=16, cached=True)
    prompt = prompt_of(22)
    stored = 0
    for turn in range(4):
        name = f"turn {turn}"
        assert serve(harness, name, prompt, max_tokens=15) == stored // PAGE * PAGE
        answer = harness.tokens[name]
        assert_greedy(answer, model, prompt, 15)
        stored = len(prompt) + len(answer) - 1
        prompt = [*prompt, *answer, *prompt_of(9, turn)]


def test_cache_salt_isolates(model: MiMoV2ForCausalLM, make_harness: Make, assert_greedy: Check) -> None:
    harness = make_harness(model, cached=True)
    prompt = prompt_of(30)
    assert serve(harness, "a", prompt, cache_salt="a") == 0
    assert serve(harness, "b", prompt, cache_salt="b") == 0
    assert serve(harness, "none", prompt) == 0
    assert serve(harness, "a again", prompt, cache_salt="a") == 28
    assert_greedy(harness.tokens["a again"], model, prompt, 8)


class Pictures:
    """Prompts of text, one picture whose rows come in two chunks, and text."""

    head, tail = prompt_of(10, 1), prompt_of(9, 2)
    ids = [*head, *[PAD] * 13, *tail]
    at = list(range(10, 23))

    def __init__(self, harness: Any) -> None:
        self.harness = harness

    def start(self, name: str) -> None:
        request = self.harness.request(name, prompt_ids=list(self.head), max_tokens=8)
        self.harness.engine.submit(Start(request))

    def finish(self, name: str, rows: torch.Tensor, key: str, steps: int = 0) -> None:
        submit = self.harness.engine.submit
        for part in (rows[:6], rows[6:]):
            submit(Extend(name, [PAD] * len(part), list(range(len(part))), part, False, key))
            for _ in range(steps):
                self.harness.engine.step()
        submit(Extend(name, self.tail, [], None, True))

    def serve(self, name: str, rows: torch.Tensor, key: str, steps: int = 0) -> int:
        self.start(name)
        for _ in range(steps):
            self.harness.engine.step()
        self.finish(name, rows, key, steps)
        self.harness.run()
        self.harness.assert_nothing_left()
        return cached_of(self.harness, name)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_pictures_are_told_apart_by_their_content(
    model: MiMoV2ForCausalLM, make_harness: Make, assert_greedy: Check, steps: int
) -> None:
    """Equal token ids, and keys with an equal end; also when rows come while the text runs."""
    pictures = Pictures(make_harness(model, batch_tokens=8, cached=True))
    cat, dog = rows_of(1), rows_of(2)
    keys = {"cat": "00ff" * 7 + "abcd", "dog": "11ff" * 7 + "abcd"}
    hits = [
        pictures.serve(name, rows, keys[name.split()[0]], steps)
        for name, rows in [("cat", cat), ("dog", dog), ("cat again", cat), ("dog again", dog)]
    ]
    whole = pages_below(len(pictures.ids))
    # Before the picture 8 tokens of text are common to all; they hit where their window is live still.
    assert hits[0] == 0
    assert hits[1] in (0, 8)
    # Where the prompt pauses, what fills no page is computed at once.
    least = whole - (2 * (PAGE - 1) if steps else 0)
    assert all(least <= hit <= whole for hit in hits[2:])
    for name, rows in [("cat", cat), ("dog", dog), ("cat again", cat), ("dog again", dog)]:
        assert_greedy(pictures.harness.tokens[name], model, pictures.ids, 8, rows, pictures.at)
    assert pictures.harness.tokens["cat"] != pictures.harness.tokens["dog"]


def test_how_rows_are_cut_into_chunks_makes_no_difference(
    model: MiMoV2ForCausalLM, make_harness: Make, assert_greedy: Check
) -> None:
    """A long video that was streamed in chunks the first time comes in one piece from a cache."""
    harness = make_harness(model, cached=True)
    rows, tail = rows_of(1, 700), prompt_of(10)
    for name, cuts in (("streamed", [0, 100, 255, 258, 600, 700]), ("whole", [0, 700])):
        harness.engine.submit(Start(harness.request(name, max_tokens=4)))
        for low, high in pairwise(cuts):
            at = list(range(high - low))
            harness.engine.submit(Extend(name, [PAD] * len(at), at, rows[low:high], False, "video"))
        harness.engine.submit(Extend(name, tail, [], None, True))
        harness.run()
        ids = [PAD] * 700 + tail
        assert_greedy(harness.tokens[name], model, ids, 4, rows, range(700))
    assert cached_of(harness, "whole") == pages_below(710)


def test_text_runs_before_its_picture_comes_and_is_not_lost(
    model: MiMoV2ForCausalLM, make_harness: Make, assert_greedy: Check
) -> None:
    harness = make_harness(model, cached=True)
    pictures = Pictures(harness)
    pictures.start("a")
    harness.engine.step()
    load = harness.engine.load()
    assert load["computed_tokens"] == load["ahead_tokens"] == 9  # the last one is kept back
    pictures.finish("a", rows_of(1), "key")
    harness.run()
    assert harness.engine.load()["computed_tokens"] == len(pictures.ids) + 7
    assert cached_of(harness, "a") == 0
    assert_greedy(harness.tokens["a"], model, pictures.ids, 8, rows_of(1), pictures.at)


def test_without_a_content_key_nothing_is_cached(
    model: MiMoV2ForCausalLM, make_harness: Make, assert_greedy: Check
) -> None:
    """Plain placeholders would match those of any other picture."""
    pictures = Pictures(make_harness(model, cached=True))
    for name, seed in (("a", 1), ("b", 2)):
        assert pictures.serve(name, rows_of(seed), "") <= 8
        assert_greedy(pictures.harness.tokens[name], model, pictures.ids, 8, rows_of(seed), pictures.at)


def test_nan_is_not_cached(model: MiMoV2ForCausalLM, make_harness: Make, assert_greedy: Check) -> None:
    """Embeddings that came out wrong once must not fail the same picture for ever."""
    pictures = Pictures(make_harness(model, batch_tokens=8, cached=True))
    pictures.start("bad")
    pictures.finish("bad", torch.full((13, 32), float("nan")), "key", steps=2)
    pictures.harness.run()
    assert "not finite" in pictures.harness.errors["bad"].message
    pictures.serve("good", rows_of(1), "key")
    assert_greedy(pictures.harness.tokens["good"], model, pictures.ids, 8, rows_of(1), pictures.at)


def test_much_evictable_and_little_free(
    model: MiMoV2ForCausalLM, make_harness: Make, assert_greedy: Check
) -> None:
    """A full cache makes way for a request that needs nearly everything."""
    harness = make_harness(model, full=60, swa=24, batch_tokens=16, cached=True)
    for seed in range(12):
        serve(harness, f"fill {seed}", prompt_of(50, seed), max_tokens=2)
    assert harness.pools.full_pages.available < 20
    prompt = prompt_of(200, 99)
    serve(harness, "big", prompt)
    assert_greedy(harness.tokens["big"], model, prompt, 8)
    assert serve(harness, "big again", prompt) == pages_below(200)
    assert_greedy(harness.tokens["big again"], model, prompt, 8)


def test_missing_windows_are_told(
    model: MiMoV2ForCausalLM,
    make_harness: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A hit rate of nothing although everything is cached shows in a counter and in the log."""
    monkeypatch.setattr(prefix_cache, "_FIRST_JUDGED", 8)
    harness = make_harness(model, swa=12, batch_tokens=16, cached=True)
    shared = prompt_of(60)
    for user in range(9):
        serve(harness, f"u{user}", shared + prompt_of(60, user + 1), hands_off=True)
    load = harness.engine.load()
    assert load["cache_hit_tokens"] < load["cache_cut_tokens"]
    assert [r.levelname for r in caplog.records if "SWA pool is too small" in r.message] == ["WARNING"]


def test_swa_slots_of_a_running_request_stay_bounded(model: MiMoV2ForCausalLM, make_harness: Make) -> None:
    """4,000 tokens of prompt, turns in it, and 200 of output in an SWA pool of window + chunk."""
    chunk, window = 64, model.config.layers[1].window
    assert window is not None
    harness = make_harness(model, full=1100, swa=60, batch_tokens=chunk, cached=True)
    prompt = prompt_of(4000)
    prompt[500::500] = [TURN_END] * len(prompt[500::500])
    harness.submit("long", prompt, max_tokens=200)
    peak = 0.0
    while "long" not in harness.finished:
        harness.engine.step()
        peak = max(peak, harness.engine.load()["swa_used_slots"])
    assert peak <= window + chunk + 3 * PAGE
    harness.assert_nothing_left()


def test_abort_at_any_time_leaves_only_what_is_evictable(
    model: MiMoV2ForCausalLM, make_harness: Make, assert_greedy: Check
) -> None:
    for after in range(14):
        harness = make_harness(model, batch_tokens=8, cached=True)
        prompt = prompt_of(50)
        serve(harness, "other", prompt[:21], max_tokens=3)
        harness.submit("a", prompt, max_tokens=20)
        harness.submit("b", prompt[:30], max_tokens=20)
        for _ in range(after):
            harness.engine.step()
        harness.engine.submit(Drop("a"))
        harness.run()
        assert_greedy(harness.tokens["b"], model, prompt[:30], 20)
        harness.assert_nothing_left()
        harness.cache.make_room(harness.pools.full_pages.capacity, harness.pools.swa_pages.capacity)
        assert harness.pools.full_pages.used == harness.pools.swa_pages.used == 0
        harness.cache.check_integrity()


actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 400), st.integers(1, 60)),
        st.tuples(st.just("continue"), st.integers(0, 400), st.integers(1, 12)),
        st.tuples(st.just("grow"), st.integers(0, 30), st.integers(1, 30)),
        st.tuples(st.just("drop"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 9), st.just(0)),
    ),
    min_size=8,
    max_size=40,
)


class Traffic:
    """Prompts that begin like earlier ones, some with pictures, which grow, are dropped and retracted.

    A token PAD stands for a row; which one follows from its position and the request's picture.
    """

    def __init__(self, harness: Any) -> None:
        self.harness = harness
        self.prompts: dict[str, list[int]] = {}
        self.picture: dict[str, int] = {}
        self.wanted: dict[str, int] = {}
        self.shown: dict[str, int] = {}
        self.dropped: set[str] = set()

    def rows(self, name: str) -> tuple[torch.Tensor, list[int]]:
        at = [i for i, token in enumerate(self.prompts[name]) if token == PAD]
        return rows_of(self.picture[name], 60)[: len(at)], at

    def submit(self, prompt: list[int], number: int) -> None:
        name = f"r{len(self.prompts)}"
        self.prompts[name] = prompt
        self.picture[name] = number % 2
        self.wanted[name] = 1 + number % 14
        self.shown[name] = 0
        request = self.harness.request(
            name,
            max_tokens=self.wanted[name],
            hands_off=number % 3 == 0,
            cache_salt=str(number % 5 // 4),
            priority=number % 2,
        )
        self.harness.engine.submit(Start(request))
        self.grow(name, len(prompt) if number % 4 else 1 + len(prompt) // 2)

    def grow(self, name: str, count: int) -> None:
        """Show up to `count` further tokens, text and pads in pieces of their own."""
        prompt, begin = self.prompts[name], self.shown[name]
        rows, at = self.rows(name)
        stop = min(begin + count, len(prompt))
        while begin < stop:
            media = prompt[begin] == PAD
            end = begin + 1
            while end < stop and (prompt[end] == PAD) == media:
                end += 1
            part = rows[at.index(begin) : at.index(begin) + end - begin] if media else None
            offsets = list(range(end - begin)) if media else []
            key = f"picture {self.picture[name]}" if media else ""
            self.harness.engine.submit(
                Extend(name, prompt[begin:end], offsets, part, end == len(prompt), key)
            )
            begin = end
        self.shown[name] = stop

    def step(self) -> None:
        self.harness.engine.step()
        running = self.harness.engine._running.values()
        self.harness.cache.check_integrity([request.kv for request in running])

    def do(self, action: str, number: int, count: int) -> None:
        names = list(self.prompts)
        if action == "submit":
            tree = [*prompt_of(12, 1), TURN_END, *[PAD] * 11, *prompt_of(9, 2), TURN_END, *prompt_of(30, 3)]
            cut = number % len(tree)
            self.submit([*tree[:cut], *prompt_of(count, number % 3)][:60], number)
        elif action == "continue" and names:
            name = names[number % len(names)]
            history = self.prompts[name] + self.harness.tokens.get(name, [])
            # Only text follows, so that the picture's rows stay those of the earlier request.
            self.submit([*history, *prompt_of(count, number)][:70], number // 2 * 2 + self.picture[name])
        elif action == "grow" and names:
            self.grow(names[number % len(names)], count)
        elif action == "drop" and names:
            self.dropped.add(names[number % len(names)])
            self.harness.engine.submit(Drop(names[number % len(names)]))
        elif action == "step":
            for _ in range(number):
                self.step()


@given(
    actions, st.integers(24, 60), st.integers(8, 24), st.sampled_from([5, 16, 64]), st.sampled_from(POLICIES)
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_random_traffic_over_a_tiny_pool(
    model: MiMoV2ForCausalLM,
    make_harness: Make,
    assert_greedy: Check,
    steps: list[tuple[str, int, int]],
    full: int,
    swa: int,
    chunk: int,
    policy: str,
) -> None:
    """Every token is right, and at every step each page has one owner and no live window is lost."""
    harness = make_harness(
        model, full=full, swa=swa, batch_tokens=chunk, context_len=90, cached=True, policy=policy
    )
    traffic = Traffic(harness)
    for step in steps:
        traffic.do(*step)
    for name, prompt in traffic.prompts.items():
        if name not in traffic.dropped:
            traffic.grow(name, len(prompt))
    harness.run()
    assert not harness.errors
    for name, prompt in traffic.prompts.items():
        tokens = harness.tokens.get(name, [])
        if name not in traffic.dropped:
            assert name in harness.finished or name in harness.prefilled
            assert len(tokens) == (1 if name in harness.prefilled else traffic.wanted[name])
        if tokens:
            assert_greedy(tokens, model, prompt, len(tokens), *traffic.rows(name))
    harness.assert_nothing_left()
