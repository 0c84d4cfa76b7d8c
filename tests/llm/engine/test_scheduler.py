"""The scheduling policy in a simulation without model or pools: bounds hold, everyone gets through."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.patience import PATIENCE_S
from transom.errors import ConfigError
from transom.llm.policies import POLICIES, fewest_uncached_first, first_come_first_served, make_order
from transom.llm.scheduler import Follow, FreePages, Limits, Order, Plan, RequestView
from transom.llm.scheduler import plan_step as plan_step_in_order
from transom.llm.waits import Wait, WaitReason

PAGE_SIZE, WINDOW = 4, 9


def pages(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE)


def plan_step(*args: Any, order: Order = first_come_first_served, **more: Any) -> Plan:
    return plan_step_in_order(*args, order=order, **more)


@dataclass
class Simulated:
    """A request with its pages; `offloaded` KV is in host memory."""

    name: str
    arrived_s: float
    prompt_len: int
    output_len: int
    hands_off: bool
    known_prompt: int
    stored: int = 0
    out: int = 0
    full: int = 0
    swa: int = 0
    priority: int = 0
    first_s: float = -1.0  # when its first token came
    shares: Mapping[str, int] = field(default_factory=dict)

    @property
    def decoding(self) -> bool:
        return self.out > 0 and self.stored >= self.prompt_len

    def view(self) -> RequestView:
        known = self.known_prompt + self.out
        ready = known - self.stored
        return RequestView(
            self.name,
            self.arrived_s,
            self.priority,
            self.stored,
            known,
            ready,
            self.decoding,
            self.full,
            self.swa,
            shares=tuple(self.shares.items()),
        )


class Simulation:
    def __init__(self, full: int, swa: int, limits: Limits, order: Order = first_come_first_served) -> None:
        self.limits = limits
        self.order = order
        self.capacity = FreePages(full, swa)
        self.requests: dict[str, Simulated] = {}
        self.running: list[str] = []
        self.finished: list[str] = []
        self.now_s = 0.0

    def free(self) -> FreePages:
        live = self.requests.values()
        return FreePages(
            self.capacity.full - sum(r.full for r in live), self.capacity.swa - sum(r.swa for r in live)
        )

    def step(self) -> int:
        """Do one step as the engine would; return how many tokens were computed."""
        self.now_s += 1
        plan = plan_step(
            [self.requests[name].view() for name in self.running],
            [r.view() for r in self.requests.values() if r.name not in self.running],
            self.free(),
            self.limits,
            now_s=self.now_s,
            order=self.order,
        )
        for name in plan.retract:
            request = self.requests[name]
            self.running.remove(name)
            request.full = request.swa = 0
            if not request.decoding:
                request.stored = 0
        for name in plan.admit:
            request = self.requests[name]
            assert request.full == 0
            self.running.append(name)
            if request.stored:
                request.full = pages(request.stored)
                request.swa = request.full - max(request.stored - WINDOW + 1, 0) // PAGE_SIZE
        assert sum(plan.steps.values()) <= self.limits.batch_tokens
        assert len(plan.steps) <= self.limits.running_requests
        for name, count in plan.steps.items():
            self._compute(self.requests[name], count)
        return sum(plan.steps.values())

    def _compute(self, request: Simulated, count: int) -> None:
        assert 0 < count <= request.known_prompt + request.out - request.stored
        new = pages(request.stored + count) - request.full
        request.full += new
        request.swa += new
        free = self.free()
        assert free.full >= 0
        assert free.swa >= 0
        request.stored += count
        request.swa = min(request.swa, request.full - max(request.stored - WINDOW + 1, 0) // PAGE_SIZE)
        if request.known_prompt == request.prompt_len and request.stored == request.prompt_len + request.out:
            request.out += 1
            request.first_s = self.now_s if request.first_s < 0 else request.first_s
            if request.out == request.output_len or request.hands_off:
                self.finished.append(request.name)
                self.running.remove(request.name)
                del self.requests[request.name]


shapes = st.lists(
    st.tuples(st.integers(1, 70), st.integers(1, 25), st.booleans(), st.integers(0, 5)),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize("policy", POLICIES)
@given(
    shapes, st.integers(25, 60), st.integers(8, 30), st.integers(1, 40), st.integers(1, 6), st.integers(1, 3)
)
@settings(max_examples=40, deadline=None)
def test_everyone_gets_through_in_any_memory(
    policy: str,
    shapes: list[tuple[int, int, bool, int]],
    full: int,
    swa: int,
    batch_tokens: int,
    running: int,
    priorities: int,
) -> None:
    """Each request alone fits; together they may need many times the pools. Prompts arrive in two parts."""
    limits = Limits(batch_tokens, min(running, batch_tokens), PAGE_SIZE, WINDOW)
    simulation = Simulation(full, swa, limits, make_order(policy, lambda: 5.0))
    late: dict[int, list[Simulated]] = {}
    for i, (prompt_len, output_len, hands_off, delay) in enumerate(shapes):
        known = prompt_len if delay == 0 else prompt_len // 2
        request = Simulated(f"r{i}", float(i), prompt_len, output_len, hands_off, known)
        request.priority = i % priorities
        simulation.requests[request.name] = request
        late.setdefault(delay, []).append(request)
    idle = 0
    for step in range(20_000):
        for request in late.pop(step, ()):
            request.known_prompt = request.prompt_len
        computed = simulation.step()
        if not simulation.requests:
            break
        idle = 0 if computed or late else idle + 1
        assert idle < 3, "nothing is computed although requests are left"
    assert len(simulation.finished) == len(shapes)
    assert simulation.free() == simulation.capacity


def view(name: str, **fields: object) -> RequestView:
    defaults: dict[str, object] = {
        "arrived_s": 0.0, "priority": 0, "stored_len": 0, "known_len": 10, "ready_len": 10, "decoding": False,
        "full_pages": 0, "swa_pages": 0,
    }  # fmt: skip
    return RequestView(request_id=name, **{**defaults, **fields})  # type: ignore[arg-type]


LIMITS = Limits(16, 4, PAGE_SIZE, WINDOW)


@pytest.mark.parametrize(
    ("free", "limits", "hold", "wait"),
    [
        (FreePages(2, 9), LIMITS, "", Wait(WaitReason.FULL_POOL, "full pool: 3 pages wanted, 1 spare")),
        (FreePages(9, 0), LIMITS, "", Wait(WaitReason.SWA_POOL, "SWA pool: 1 pages wanted, 0 free")),
        (
            FreePages(9, 9),
            Limits(16, 1, PAGE_SIZE, WINDOW),
            "",
            Wait(WaitReason.RUNNING_REQUESTS, "1 of 1 requests are running"),
        ),
        (
            FreePages(9, 9),
            Limits(1, 4, PAGE_SIZE, WINDOW),
            "",
            Wait(WaitReason.BATCH_TOKENS, "the step's 1 tokens are spent"),
        ),
        (FreePages(9, 9), LIMITS, "host memory", Wait(WaitReason.HOST_MEMORY, "host memory")),
        (FreePages(9, 9), LIMITS, "", None),
    ],
)
def test_the_reason_to_wait_is_told(free: FreePages, limits: Limits, hold: str, wait: Wait | None) -> None:
    busy = view("busy", stored_len=4, known_len=5, ready_len=1, decoding=True, full_pages=2, swa_pages=2)
    plan = plan_step([busy], [view("next", arrived_s=1.0)], free, limits, now_s=2.0, hold=hold)
    assert plan.waiting == wait
    assert plan.waiting_reason == (wait.text if wait else "")
    assert plan.admit == (() if wait else ("next",))


@pytest.mark.parametrize(
    ("free", "reason"), [(FreePages(0, 1), WaitReason.FULL_POOL), (FreePages(1, 0), WaitReason.SWA_POOL)]
)
def test_the_pool_that_ran_out_is_told(free: FreePages, reason: WaitReason) -> None:
    """Two answers need a page each for their next token: one makes way, which keeps the next waiting."""
    fields = {"stored_len": 4, "known_len": 5, "ready_len": 1, "decoding": True}
    running = [view(name, full_pages=1, swa_pages=1, **fields) for name in ("first", "last")]
    plan = plan_step(running, [view("next", arrived_s=1.0)], free, LIMITS, now_s=2.0)
    assert (plan.retract, plan.admit) == (("last",), ())
    assert plan.waiting == Wait(reason, "pages ran out: 1 requests were retracted")


def test_the_last_tokens_of_a_prompt_cost_no_step_of_their_own() -> None:
    """A ninth of a step is for ends of prompts: not for middle chunks, nor for what waits for media."""
    limits = Limits(36, 4, PAGE_SIZE, WINDOW)  # chunks of 32
    free = FreePages(99, 99)

    def steps(*line: RequestView) -> dict[str, int]:
        return plan_step([], list(line), free, limits, now_s=9.0).steps

    assert steps(view("ends", known_len=36, ready_len=36)) == {"ends": 36}
    assert steps(view("long", known_len=37, ready_len=37)) == {"long": 32}
    assert steps(view("picture", known_len=60, ready_len=36)) == {"picture": 32}
    long, short = view("long", known_len=70, ready_len=70), view("short", known_len=4, ready_len=4)
    assert steps(long, short) == {"long": 32, "short": 4}
    # In line nobody is passed by: the second long one waits, and so does what comes after it.
    line = [
        view("first", known_len=32, ready_len=32),
        replace(long, arrived_s=1.0),
        replace(short, arrived_s=2.0),
    ]
    plan = plan_step([], line, free, limits, now_s=9.0)
    assert plan.steps == {"first": 32}
    assert plan.waiting_reason == "the step's 36 tokens are spent"
    running = [
        view("long", known_len=70, stored_len=4, ready_len=66, full_pages=1, swa_pages=1),
        view("tail", known_len=43, stored_len=40, ready_len=3, full_pages=10, swa_pages=3),
    ]
    assert plan_step(running, [], free, limits, now_s=9.0).steps == {"long": 32, "tail": 3}


def test_a_wait_for_embeddings_blocks_nobody() -> None:
    """What waits for its picture is skipped in line and gives its pages up when another needs them."""
    parked = view("parked", ready_len=0, stored_len=10, full_pages=3, swa_pages=3)
    unready = view("unready", arrived_s=1.0, ready_len=0)
    text = view("text", arrived_s=2.0)
    plan = plan_step([parked], [unready, text], FreePages(5, 5), LIMITS, now_s=3.0)
    assert plan.admit == ("text",)
    plan = plan_step([parked], [unready, text], FreePages(2, 2), LIMITS, now_s=3.0)
    assert plan.retract == ("parked",)
    plan = plan_step([], [parked, unready, text], FreePages(5, 5), LIMITS, now_s=3.0)
    assert plan.admit == ("text",)


def test_what_was_admitted_keeps_a_claim_on_the_rest_of_its_pages() -> None:
    """Two prompts of 10 pages, 12 free: the second waits although the first has taken only two so far."""
    line = [view(name, known_len=40, ready_len=8) for name in ("first", "second")]
    plan = plan_step([], line, FreePages(12, 12), LIMITS, now_s=1.0)
    assert plan.steps == {"first": 8}
    assert plan.waiting_reason == "full pool: 10 pages wanted, 2 spare"
    half = view("first", known_len=40, stored_len=8, ready_len=8, full_pages=2, swa_pages=2)
    plan = plan_step([half], line[1:], FreePages(10, 10), LIMITS, now_s=1.0)
    assert plan.steps == {"first": 8}
    assert plan.waiting_reason == "full pool: 10 pages wanted, 2 spare"


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("fcfs", ["urgent", "long", "cached", "short"]),
        ("fewest-uncached", ["urgent", "cached", "short", "long"]),
        ("longest-prefix", ["urgent", "cached", "long", "short"]),
        ("deadline", ["urgent", "short", "long", "cached"]),
    ],
)
def test_orders(policy: str, expected: list[str]) -> None:
    views = [
        view("long", known_len=500, deadline_s=90.0),
        view("cached", arrived_s=5.0, known_len=500, stored_len=490),
        view("short", arrived_s=6.0, known_len=40, deadline_s=20.0),
        view("urgent", arrived_s=9.0, known_len=900, priority=1),
    ]
    order = make_order(policy, lambda: 10.0)
    assert [v.request_id for v in order(views, 10.0)] == expected
    with pytest.raises(ConfigError, match="schedule_policy 'best'"):
        make_order("best", lambda: 1.0)


@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(1, 80)), min_size=1, max_size=40),
    st.integers(20, 400),
    st.sampled_from([0.5, 2.0, 8.0]),
)
@settings(max_examples=60, deadline=None)
def test_the_wait_of_a_long_prompt_is_bounded(
    shorts: list[tuple[int, int]], long_len: int, credit: float
) -> None:
    """Whoever arrives more than tokens / credit after it never comes first, however short and many they are.

    Hence it ends at the latest when its own tokens and those of all who came before are computed.
    """
    batch = 16
    simulation = Simulation(
        10_000, 10_000, Limits(batch, batch, PAGE_SIZE, WINDOW), fewest_uncached_first(lambda: credit)
    )
    arrivals = [
        (at, Simulated(f"r{i}", float(at), length, 1, True, length)) for i, (at, length) in enumerate(shorts)
    ]
    long = Simulated("long", 0.0, long_len, 1, True, long_len)
    simulation.requests["long"] = long
    last_to_pass = long_len / credit
    while long.first_s < 0:
        for at, request in arrivals:
            if at == simulation.now_s:
                simulation.requests[request.name] = request
        simulation.step()
        if long.stored < long.prompt_len:
            assert not any(r.stored for at, r in arrivals if at > last_to_pass)
    ahead = sum(r.prompt_len for at, r in arrivals if at <= min(last_to_pass, long.first_s))
    # A step that begins empty-handed computes less than a batch: at most one for each arrival.
    assert long.first_s <= last_to_pass + 1 + (long_len + ahead) / batch + len(arrivals)


def test_short_prompts_pass_a_long_one_under_way() -> None:
    long = view("long", known_len=16_000, stored_len=512, ready_len=15_488, full_pages=128, swa_pages=10)
    short = view("short", arrived_s=1.0, known_len=12, ready_len=12)
    plans = [
        plan_step(
            [long], [short], FreePages(9999, 9999), LIMITS, now_s=1.0, order=make_order(policy, lambda: 100.0)
        )
        for policy in ("fewest-uncached", "fcfs")
    ]
    assert [plan.steps for plan in plans] == [{"short": 12, "long": 3}, {"long": 15}]
    waited = replace(long, arrived_s=-200.0)
    order = make_order("fewest-uncached", lambda: 100.0)
    plan = plan_step([waited], [short], FreePages(9999, 9999), LIMITS, now_s=1.0, order=order)
    assert plan.steps == {"long": 15}
    assert plan.waiting_reason == "the step's 16 tokens are spent"


def test_higher_priority_takes_the_pages_of_lower_ones() -> None:
    running = [
        view(
            name,
            arrived_s=at,
            stored_len=17,
            known_len=18,
            ready_len=1,
            decoding=True,
            full_pages=5,
            swa_pages=5,
        )
        for name, at in (("old", 0.0), ("young", 1.0))
    ]
    urgent = view("urgent", arrived_s=2.0, priority=1)
    plan = plan_step(running, [urgent], FreePages(1, 1), LIMITS, now_s=3.0)
    assert (plan.retract, plan.admit, plan.waiting_reason) == (("young",), ("urgent",), "")
    equal = plan_step(running, [replace(urgent, priority=0)], FreePages(1, 1), LIMITS, now_s=3.0)
    assert (equal.retract, equal.admit) == ((), ())
    hopeless = plan_step(running, [replace(urgent, known_len=80)], FreePages(1, 1), LIMITS, now_s=3.0)
    assert (hopeless.retract, hopeless.admit) == ((), ())


def test_pages_shared_with_whoever_made_way_are_not_counted_twice() -> None:
    """They come free with the retraction and are pinned by the admission: that waits for the next look."""
    limits = Limits(8, 3, 5, 19)
    low = view("low", known_len=56, stored_len=35, ready_len=21, full_pages=7, swa_pages=2)
    urgent = view(
        "urgent", priority=1, known_len=61, stored_len=30, ready_len=31, swa_pages=1, shared_pages=6
    )
    order = make_order("fcfs", lambda: 1.0)
    plan = plan_step([low], [urgent], FreePages(2, 1), limits, now_s=1.0, order=order)
    assert (plan.retract, plan.admit, plan.steps) == (("low",), (), {})
    assert plan.waiting == Wait(
        WaitReason.FULL_POOL, "1 requests were retracted that may have shared its pages"
    )
    alone = replace(urgent, full_pages=6, swa_pages=3, shared_pages=0)
    plan = plan_step([], [alone], FreePages(14, 7), limits, now_s=1.0, order=order)
    assert (plan.admit, plan.steps) == (("urgent",), {"urgent": 8})


def test_prompts_that_begin_alike_follow_the_first() -> None:
    first = view("first", known_len=40, ready_len=40, shares=(("second", 20), ("other", 8)))
    second = view("second", arrived_s=1.0, known_len=30, ready_len=30, shares=(("first", 20), ("other", 8)))
    other = view("other", arrived_s=2.0, shares=(("first", 8), ("second", 8)))
    wide = Limits(64, 4, PAGE_SIZE, WINDOW)
    plan = plan_step([], [first, second, other], FreePages(99, 99), wide, now_s=3.0)
    # What is shared with the third one is less than a window: it would wait longer than it saves.
    assert plan.steps == {"first": 40, "other": 10}
    assert plan.follows == {"second": Follow("first", 20)}
    assert plan.waiting == Wait(WaitReason.SHARED_PROMPT, "first is computing 20 tokens that it shares")
    parked = replace(first, ready_len=0, stored_len=5, full_pages=2, swa_pages=2)
    assert plan_step([parked], [second], FreePages(99, 99), wide, now_s=3.0).steps == {"second": 30}


def test_the_policy_needs_no_torch() -> None:
    code = (
        "import sys, transom.llm.policies, transom.llm.config, transom.llm.capacity, transom.llm.prompt;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_S).returncode == 0
