"""The metrics of a process: the load as gauges and counters, one registry each, served by every stage."""

from __future__ import annotations

import json
from asyncio.subprocess import PIPE, create_subprocess_exec

import aiohttp
import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from transom import __version__
from transom.metrics import Labelled, LoadCollector, StateCollector, expose, make_registry


def samples(text: str) -> dict[str, tuple[str, float, dict[str, str]]]:
    return {
        sample.name: (family.type, sample.value, sample.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_load_becomes_gauges_and_what_only_grows_counters() -> None:
    load = {"items": 3.0, "served": 7.0}
    registry = make_registry([LoadCollector("tiny", lambda: load, {"served"})])
    load["items"] = 4.0
    found = samples(expose(registry).decode())
    assert found["transom_tiny_items"] == ("gauge", 4.0, {})
    assert found["transom_tiny_served_total"] == ("counter", 7.0, {})
    assert found["process_resident_memory_bytes"][1] > 0


def test_figures_of_one_kind_share_a_name_and_differ_by_labels() -> None:
    load = {"upper_hits": 3.0, "lower_hits": 4.0, "upper_room": 5.0}
    labelled = {
        "upper_hits": Labelled("hits", {"tier": "upper"}),
        "lower_hits": Labelled("hits", {"tier": "lower"}),
        "upper_room": Labelled("room", {"tier": "upper"}),
    }
    registry = make_registry([LoadCollector("tiny", lambda: load, {"upper_hits", "lower_hits"}, labelled)])
    text = expose(registry).decode()
    assert text.count("# TYPE transom_tiny_hits_total counter") == 1
    assert 'transom_tiny_hits_total{tier="upper"} 3.0' in text
    assert 'transom_tiny_hits_total{tier="lower"} 4.0' in text
    assert 'transom_tiny_room{tier="upper"} 5.0' in text


def test_a_stage_that_is_starting_is_not_asked_before_somebody_looks() -> None:
    asked = []

    def load() -> dict[str, float]:
        asked.append(1)
        return {}

    registry = make_registry([LoadCollector("tiny", load, ())])
    assert asked == []
    expose(registry)
    assert asked == [1]


def test_registries_share_nothing() -> None:
    counter = prometheus_client.Counter("transom_x", "X.", registry=None)
    first, second = make_registry([counter]), make_registry([])
    counter.inc()
    assert b"transom_x_total 1.0" in expose(first)
    assert b"transom_x" not in expose(second)
    assert b"transom_x" not in prometheus_client.generate_latest()
    assert b"_created" not in expose(first)


def test_state_follows_the_process() -> None:
    ready = False
    registry = make_registry([StateCollector("tiny", lambda: ready)])
    assert samples(expose(registry).decode())["transom_ready"] == ("gauge", 0.0, {"stage": "tiny"})
    ready = True
    found = samples(expose(registry).decode())
    assert found["transom_ready"][1] == 1.0
    assert found["transom_build_info"][2] == {"stage": "tiny", "version": __version__}


@pytest.mark.process
async def test_every_stage_process_serves_them(tiny_stage: tuple[str, ...]) -> None:
    process = await create_subprocess_exec(*tiny_stage, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    try:
        assert process.stdout is not None
        line = json.loads(await process.stdout.readline())
        async with aiohttp.ClientSession() as http, http.get(f"{line['http']}/metrics") as response:
            assert response.content_type == "text/plain"
            found = samples(await response.text())
    finally:
        process.kill()
        await process.communicate()
    assert found["transom_tiny_work"] == ("gauge", 0.0, {})
    assert found["transom_ready"] == ("gauge", 1.0, {"stage": "tiny"})
