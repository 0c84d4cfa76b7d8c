"""GET /metrics of the gateway: what is counted, by which words, and that the words stay few."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.fake_workers import ROWS, ScriptedFleet
from tests.patience import PATIENCE_S
from transom.errors import StageLostError
from transom.gateway.metrics import STATUSES, GatewayMetrics

PNG = "data:image/png;base64,iVBORw0KGgo="


async def figures(fleet: ScriptedFleet) -> dict[str, float]:
    """Return all samples by name and labels."""
    async with aiohttp.ClientSession() as http, http.get(f"{fleet.url}/metrics") as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/plain; version=")
        text = await response.text()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


async def post(fleet: ScriptedFleet, body: Any, path: str = "/v1/chat/completions") -> int:
    async with aiohttp.ClientSession() as http, http.post(fleet.url + path, json=body) as response:
        await response.read()
        return response.status


def chat(**fields: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": PNG}}, {"type": "text", "text": "hi"}]
    return {"messages": [{"role": "user", "content": parts}], **fields}


async def test_a_request_is_counted_with_its_times_and_tokens(fleet: ScriptedFleet) -> None:
    assert await post(fleet, chat()) == 200
    found = await figures(fleet)
    assert found["transom_requests_total{endpoint=chat,status=200}"] == 1
    assert found["transom_requests_in_flight"] == 0
    for name in ("ttft", "e2e", "tpot"):
        assert found[f"transom_request_{name}_seconds_count"] == 1
    assert found["transom_request_ttft_seconds_sum"] <= found["transom_request_e2e_seconds_sum"]
    assert found["transom_prompt_tokens_total{kind=image}"] == ROWS
    assert found["transom_prompt_tokens_total{kind=text}"] > 0
    assert found["transom_cached_prompt_tokens_total"] == 3
    assert found["transom_completion_tokens_total{kind=answer}"] > 1
    assert found["transom_media_items_total{cache=miss,modality=image}"] == 1
    assert found["transom_ready{stage=gateway}"] == 1
    assert found["transom_gateway_ready_encoder"] == 1
    assert found["transom_gateway_choices"] == 0
    assert not any(name.startswith("transom_aborts_total") for name in found)


async def test_refused_requests_are_counted_but_not_timed(fleet: ScriptedFleet) -> None:
    assert await post(fleet, {"messages": "none"}) == 400
    assert await post(fleet, {"prompt": "x", "model": "other"}, "/v1/completions") == 404
    found = await figures(fleet)
    assert found["transom_requests_total{endpoint=chat,status=400}"] == 1
    assert found["transom_requests_total{endpoint=completion,status=404}"] == 1
    assert found["transom_request_ttft_seconds_count"] == found["transom_request_e2e_seconds_count"] == 0


async def test_what_ends_early_is_counted_by_cause(fleet: ScriptedFleet) -> None:
    fleet.script.hold = asyncio.Event()
    assert await post(fleet, chat(timeout=0.1)) == 504
    fleet.script.hold = None
    fleet.script.prefill_error = StageLostError("gone").info()
    assert await post(fleet, chat()) == 502
    found = await figures(fleet)
    assert found["transom_aborts_total{cause=deadline}"] == 1
    assert found["transom_aborts_total{cause=worker_lost}"] == 1
    assert found["transom_requests_in_flight"] == 0


async def test_a_client_that_leaves_is_counted(fleet: ScriptedFleet) -> None:
    fleet.script.hold = asyncio.Event()
    async with aiohttp.ClientSession() as http:
        response = await http.post(f"{fleet.url}/v1/chat/completions", json=chat(stream=True))
        await response.content.readline()
        assert (await figures(fleet))["transom_requests_in_flight"] == 1
        response.close()
    found: dict[str, float] = {}
    async with asyncio.timeout(PATIENCE_S):
        while found.get("transom_aborts_total{cause=client}") != 1:
            found = await figures(fleet)
    assert found["transom_requests_total{endpoint=chat,status=499}"] == 1


async def test_nothing_a_client_sends_becomes_a_label(fleet: ScriptedFleet) -> None:
    fleet.script.prefill_error = StageLostError("gone", param="secret").info()
    for number in range(5):
        await post(fleet, chat(model=f"secret-{number}", user=f"secret-{number}"))
        await post(fleet, chat(user=f"secret-{number}"), f"/v1/completions?secret={number}")
    found = await figures(fleet)
    assert not any("secret" in name for name in found)
    statuses = {int(status) for name in found for status in re.findall(r"status=(\d+)", name)}
    assert statuses <= STATUSES


def test_every_metric_is_described(repository: Path) -> None:
    page = (repository / "docs" / "operations.md").read_text(encoding="utf-8")
    for collector in GatewayMetrics().collectors():
        for family in collector.collect():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            assert f"`{name}`" in page, name
