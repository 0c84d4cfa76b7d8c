"""What an operator sees of requests that wait: a count for each reason, which together are all that wait."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from transom.llm.model.mimo_v2 import MiMoV2ForCausalLM
from transom.llm.request import Drop, Extend, Hold, Start
from transom.llm.waits import WAIT_FIGURES, WaitReason
from transom.llm.worker import LlmStage
from transom.metrics import LoadCollector, expose, make_registry

Make = Callable[..., Any]


def prompt_of(length: int, seed: int) -> list[int]:
    return torch.randint(0, 90, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def waits(harness: Any) -> dict[str, int]:
    """Return who waits for what, after checking that nobody is left out and nobody counted twice."""
    load = harness.engine.load()
    found = {reason.value: int(load[key]) for key, reason in WAIT_FIGURES.items() if load[key]}
    assert sum(found.values()) == load["waiting_requests"]
    return found


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(
    ("full", "swa", "reason"), [(12, 90, WaitReason.FULL_POOL), (400, 9, WaitReason.SWA_POOL)]
)
def test_the_pool_that_is_full_is_named_and_no_longer_once_it_has_room(
    model: MiMoV2ForCausalLM, make_harness: Make, cached: bool, full: int, swa: int, reason: WaitReason
) -> None:
    """Prompts of 8 pages; of them the window and the chunk of a step need 2 to 6 in the SWA pool."""
    harness = make_harness(
        model, full=full, swa=swa, batch_tokens=16, swa_release_interval=1, cached=cached, policy="fcfs"
    )
    names = [f"r{i}" for i in range(6)]
    for i, name in enumerate(names):
        harness.submit(name, prompt_of(30, seed=i), max_tokens=500, deadline_s=1e12)
    for _ in range(12):
        harness.engine.step()
    running = int(harness.engine.load()["running_requests"])
    assert 1 <= running < 6
    assert waits(harness) == {reason.value: 6 - running}
    assert reason.value.split("_")[0] in harness.engine.waiting_reason.lower()
    for name in names[:-1]:
        harness.engine.submit(Drop(name))
    harness.engine.step()
    assert waits(harness) == {}
    assert harness.engine.load()["running_requests"] == 1
    harness.engine.submit(Drop(names[-1]))
    harness.engine.step()
    harness.assert_nothing_left()


def test_every_other_reason_is_named(model: MiMoV2ForCausalLM, make_harness: Make) -> None:
    harness = make_harness(model, batch_tokens=8, running_requests=3, cached=True, policy="fcfs")

    def then() -> dict[str, int]:
        harness.engine.step()
        return waits(harness)

    # The prompt's first token is kept back until more of it is there.
    harness.engine.submit(Start(harness.request("picture", prompt_ids=[1], max_tokens=99)))
    assert then() == {"embeddings": 1}
    harness.engine.submit(Hold("host memory: too much"))
    harness.submit("long", prompt_of(60, seed=1), max_tokens=99)
    assert then() == {"embeddings": 1, "host_memory": 1}
    harness.engine.submit(Hold(""))
    harness.submit("like it", prompt_of(60, seed=1), max_tokens=99)
    harness.submit("other", prompt_of(60, seed=2), max_tokens=99)
    assert then() == {"embeddings": 1, "shared_prompt": 1, "batch_tokens": 1}
    harness.engine.submit(Extend("picture", [2, 3], [], None, True))
    for _ in range(50):
        if not then():
            break
    harness.submit("late", prompt_of(5, seed=3))
    assert then() == {"running_requests": 1}
    for name in ("picture", "long", "like it", "other", "late"):
        harness.engine.submit(Drop(name))
    assert then() == {}
    harness.assert_nothing_left()


def test_prometheus_gets_one_metric_with_a_fixed_set_of_reasons(
    model: MiMoV2ForCausalLM, make_harness: Make
) -> None:
    engine = make_harness(model, running_requests=1).engine
    collector = LoadCollector("prefill", engine.load, LlmStage.totals, LlmStage.labelled)
    lines = expose(make_registry([collector])).decode().splitlines()
    shown = [line for line in lines if line.startswith("transom_prefill_waiting{")]
    assert shown == [f'transom_prefill_waiting{{reason="{reason}"}} 0.0' for reason in WaitReason]


def test_page_and_pages_of_the_docs_know_every_reason(repository: Path) -> None:
    panels = (repository / "gateway" / "page" / "panels.js").read_text(encoding="utf-8")
    assert set(re.findall(r"^  (waiting_\w+):", panels, re.MULTILINE)) == set(WAIT_FIGURES)
    engine = (repository / "docs" / "engine.md").read_text(encoding="utf-8")
    operations = (repository / "docs" / "operations.md").read_text(encoding="utf-8")
    for reason in WaitReason:
        assert f"\n| `{reason}` | " in engine
        assert f"`{reason}`" in operations
