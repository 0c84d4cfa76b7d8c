"""Whatever happens to requests at whatever moment, the survivors' tokens are right and nothing is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from transom.llm.model.mimo_v2 import MiMoV2ForCausalLM
from transom.llm.policies import POLICIES
from transom.llm.request import Drop, Extend, Hold, Start
from transom.llm.waits import WAIT_FIGURES

Make = Callable[..., Any]
Check = Callable[..., None]

HEAD = list(range(24))  # how every other prompt begins
DEADLINE_S = 40.0

actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 45), st.integers(1, 25)),
        st.tuples(st.just("grow"), st.integers(0, 20), st.integers(1, 20)),
        st.tuples(st.just("drop"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 6), st.just(0)),
        st.tuples(st.just("hand over"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("hold"), st.integers(0, 1), st.just(0)),
    ),
    min_size=5,
    max_size=30,
)


@given(actions, st.integers(18, 40), st.booleans(), st.booleans(), st.sampled_from(sorted(POLICIES)))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_random_traffic(
    model: MiMoV2ForCausalLM,
    make_harness: Make,
    assert_greedy: Check,
    steps: list[tuple[str, int, int]],
    pages: int,
    cached: bool,
    overlap: bool,
    policy: str,
) -> None:
    """Two engines with little memory: requests start, grow, are dropped, expire, are handed over, retracted.

    They have priorities, common beginnings and salts. A step takes a second.
    """
    now_s = 0.0
    memory = {"full": pages, "swa": pages // 2, "context_len": 72, "cached": cached, "overlap": overlap}
    how = {"policy": policy, "clock": lambda: now_s}
    first = make_harness(model, batch_tokens=16, **memory, **how)
    second = make_harness(model, batch_tokens=8, **memory, **how)
    prompts: dict[str, list[int]] = {}
    outputs: dict[str, int] = {}
    growing: dict[str, list[int]] = {}
    dropped: set[str] = set()
    handed: set[str] = set()
    deadlines: dict[str, float] = {}

    def step() -> None:
        nonlocal now_s
        now_s += 1
        for harness in (first, second):
            harness.engine.step()
            load = harness.engine.load()
            # Whoever was retracted in this step gets a reason in the next one.
            assert sum(load[key] for key in WAIT_FIGURES) <= load["waiting_requests"]

    def drain(harness: Any) -> None:
        load = harness.engine.load()
        while load["running_requests"] + load["waiting_requests"]:
            assert now_s < 3000, harness.engine.waiting_reason
            step()
            load = harness.engine.load()

    def hand_over(name: str) -> None:
        event = first.prefilled[name]
        handed.add(name)
        second.prefilled_elsewhere = frozenset(handed)
        ids = {"prompt_ids": event.prompt_ids, "prompt_complete": True, "output_ids": [event.first_token]}
        more = {"max_tokens": outputs[name], "deadline_s": deadlines[name], "priority": outputs[name] % 3}
        request = second.request(name, host_kv=event.host_kv, **more, **ids)
        second.engine.submit(Start(request))

    for action, number, count in steps:
        if action == "submit":
            name = f"r{len(prompts)}"
            generator = torch.Generator().manual_seed(number * 31 + count)
            own = torch.randint(0, 90, (number,), generator=generator).tolist()
            prompts[name] = [*HEAD, *own][:number] if count % 2 else own
            outputs[name] = count
            deadlines[name] = now_s + DEADLINE_S if count % 7 == 0 else 1e12
            more = {
                "max_tokens": count, "deadline_s": deadlines[name], "priority": number % 3,
                "cache_salt": "salt" * (count % 5 == 0),
            }  # fmt: skip
            shown = prompts[name][: number // 2]
            growing[name] = prompts[name][number // 2 :]
            first.engine.submit(
                Start(first.request(name, prompt_ids=shown, hands_off=number % 2 == 0, **more))
            )
        elif action == "grow" and growing:
            name = list(growing)[number % len(growing)]
            piece, rest = growing[name][:count], growing[name][count:]
            first.engine.submit(Extend(name, piece, [], None, not rest))
            growing[name] = rest
            if not rest:
                del growing[name]
        elif action == "drop" and prompts:
            name = list(prompts)[number % len(prompts)]
            dropped.add(name)
            for harness in (first, second):
                harness.engine.submit(Drop(name))
        elif action == "hand over":
            waiting = [n for n in first.prefilled if n not in handed | dropped]
            if waiting:
                hand_over(waiting[number % len(waiting)])
        elif action == "hold":
            first.engine.submit(Hold("host memory: full" * number))
        elif action == "step":
            for _ in range(number):
                step()
    first.engine.submit(Hold(""))
    for name, rest in growing.items():
        first.engine.submit(Extend(name, rest, [], None, True))
    step()
    drain(first)
    for name in first.prefilled:
        if name not in handed | dropped:
            hand_over(name)
    step()
    drain(second)
    expired = first.errors | second.errors
    assert all(deadlines[name] <= now_s and expired[name].status == 504 for name in expired)
    for name, prompt in prompts.items():
        tokens = first.tokens.get(name, []) + second.tokens.get(name, [])
        if name not in dropped and name not in expired:
            assert name in first.finished or name in second.finished
            assert_greedy(tokens, model, prompt, outputs[name])
        elif tokens:
            assert_greedy(tokens, model, prompt, len(tokens))
    first.assert_nothing_left()
    second.assert_nothing_left()
