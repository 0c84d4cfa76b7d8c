"""GET /openapi.json: complete, true of real answers, and what a fuzzer makes of a gateway by it."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import aiohttp
import msgspec
import pytest
import requests
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis import checks as named_checks
from schemathesis.openapi import from_url
from schemathesis.specs.openapi import checks as openapi_checks

from tests.gateway.fake_workers import Script, ScriptedFleet
from tests.gateway.gateway_process import gateway_process
from tests.gateway.test_streams import CALL, TOOLS
from tests.patience import PATIENCE_S
from transom.gateway import api_answers
from transom.gateway.config import GatewayConfig
from transom.gateway.endpoints import ENDPOINTS
from transom.gateway.openapi import document
from transom.gateway.parse import parse_chat, parse_completion
from transom.gateway.parse_generation import UNSUPPORTED
from transom.gateway.playground import PATHS
from transom.gateway.rules import spec_of
from transom.gateway.schema import Limits
from transom.gateway.server import GatewayStage
from transom.tokenizer import Tokenizer

LIMITS = Limits(vocab_size=1491, default_max_tokens=64, max_choices=4)
PNG = "data:image/png;base64,iVBORw0KGgo="


def test_every_route_is_described_and_nothing_else() -> None:
    found = document(LIMITS, max_body_bytes=1000, keys=False)
    described = {
        (method.upper(), path) for path, operations in found["paths"].items() for method in operations
    }
    served = {
        (route.method, re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.path))
        for route in GatewayStage(GatewayConfig()).routes()
        if route.path not in PATHS
    }
    assert described == served | {("GET", path) for path in ("/health", "/ready", "/metrics")}


def test_this_gateways_limits_are_in_the_document() -> None:
    schemas = document(LIMITS, max_body_bytes=1000, keys=False)["components"]["schemas"]
    for name in ("ChatCompletionRequest", "CompletionRequest"):
        fields = schemas[name]["properties"]
        assert fields["n"]["anyOf"][0]["maximum"] == 4
        assert fields["stop_token_ids"]["anyOf"][0]["items"]["maximum"] == 1490
        assert set(UNSUPPORTED) <= set(fields)
    assert schemas["SystemMessage"]["required"] == ["role", "content"]


def test_keys_are_asked_for_where_the_gateway_asks() -> None:
    paths = document(LIMITS, max_body_bytes=1000, keys=True)["paths"]
    guarded = {path for path, operations in paths.items() for one in operations.values() if "security" in one}
    assert set(paths) - guarded == {"/health", "/ready"}
    assert "401" in paths["/v1/chat/completions"]["post"]["responses"]
    assert "401" not in paths["/health"]["get"]["responses"]


class Recording(dict[str, Any]):
    """A JSON object that remembers which of its names were looked up."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


@pytest.mark.parametrize(
    ("parse", "body", "name"),
    [
        (parse_chat, {"messages": [{"role": "user", "content": "x"}]}, "ChatCompletionRequest"),
        (parse_completion, {"prompt": "x"}, "CompletionRequest"),
    ],
)
def test_every_described_field_is_read(
    monkeypatch: pytest.MonkeyPatch, parse: Any, body: dict[str, Any], name: str
) -> None:
    recording = Recording(body)
    monkeypatch.setattr("transom.gateway.parse.orjson.loads", lambda text: recording)
    parse(b"", LIMITS)
    schemas = document(LIMITS, max_body_bytes=1000, keys=False)["components"]["schemas"]
    assert set(schemas[name]["properties"]) == recording.read


def test_a_field_without_a_type_cannot_be_read() -> None:
    from transom.gateway.api_requests import ChatCompletionRequest

    with pytest.raises(AssertionError, match="no type"):
        spec_of(ChatCompletionRequest)["undescribed"]


def exact(kind: type[msgspec.Struct], body: Any) -> None:
    """Assert that a body has the type, and nothing that the type doesn't name."""
    assert msgspec.to_builtins(msgspec.convert(body, kind)) == body


async def test_answers_are_what_the_document_says(fleet: ScriptedFleet) -> None:
    fleet.script = Script(answer=lambda job: f"<think>Hm.</think>Yes.\n{CALL}", logprobs=True)
    image = {"type": "image_url", "image_url": {"url": PNG}}
    chat = {
        "messages": [{"role": "user", "content": [image, {"type": "text", "text": "hi"}]}],
        "tools": TOOLS,
        "logprobs": True,
        "top_logprobs": 2,
        "n": 2,
        "chat_template_kwargs": {"enable_thinking": True},
    }
    raw = {"prompt": "hi", "logprobs": 1}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    async with aiohttp.ClientSession(fleet.url) as http:

        async def lines(path: str, body: dict[str, Any]) -> list[Any]:
            async with http.post(path, json=body | streamed) as response:
                text = await response.text()
            return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]

        async with http.post("/v1/chat/completions", json=chat) as response:
            whole = await response.json()
        exact(api_answers.ChatCompletion, whole)
        assert whole["choices"][0]["message"]["tool_calls"]
        events = await lines("/v1/chat/completions", chat)
        for event in events:
            exact(api_answers.ChatCompletionChunk, event)
        assert len(events) > 5
        async with http.post("/v1/completions", json=raw) as response:
            exact(api_answers.Completion, await response.json())
        for event in await lines("/v1/completions", raw):
            exact(api_answers.Completion, event)
        for form in ("float", "base64"):
            item = {"input": image, "encoding_format": form}
            async with http.post("/v1/media/embeddings", json=item) as response:
                exact(api_answers.MediaEmbedding, await response.json())
        for path, kind in (
            ("/v1/models", api_answers.ModelList),
            ("/v1/models/mimo-nano", api_answers.ModelCard),
            (f"/v1/requests/{whole['id']}/trace", api_answers.RequestTrace),
            ("/v1/fleet", api_answers.Fleet),
            ("/health", api_answers.Health),
            ("/ready", api_answers.Readiness),
            ("/openapi.json", api_answers.Document),
        ):
            async with http.get(path) as response:
                assert response.status == 200
                exact(kind, await response.json())
        async with http.post("/v1/chat/completions", json={}) as response:
            exact(api_answers.ErrorBody, await response.json())


def no_server_error(context: Any, response: Any, case: Any) -> bool | None:
    """Let a request be too late for a deadline that it has set itself: some set milliseconds."""
    if response.status_code == 504 and isinstance(case.body, dict) and case.body.get("timeout"):
        return None
    return named_checks.not_a_server_error(context, response, case)


CHECKS = [
    no_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_headers_conformance,
    openapi_checks.response_schema_conformance,
    openapi_checks.negative_data_rejection,
]


def fuzz(url: str, mode: GenerationMode, examples: int) -> dict[str, set[int]]:
    """Send generated requests to every endpoint; return the statuses by path."""
    seen: dict[str, set[int]] = {}
    schema = from_url(f"{url}/openapi.json")
    with requests.Session() as session:
        for found in schema.get_all_operations():
            operation = found.ok()
            if mode is GenerationMode.NEGATIVE and not operation.body:
                continue

            @given(operation.as_strategy(generation_mode=mode))
            @settings(
                max_examples=examples if operation.body else 2,
                deadline=None,
                database=None,
                derandomize=True,
                suppress_health_check=list(HealthCheck),
            )
            def send(case: Any) -> None:
                response = case.call_and_validate(session=session, checks=CHECKS, timeout=PATIENCE_S)
                seen.setdefault(case.operation.path, set()).add(response.status_code)

            send()
    return seen


@pytest.mark.slow
async def test_a_fuzzed_gateway_answers_as_documented(tokenizer: Tokenizer) -> None:
    async with gateway_process(tokenizer, "--request-timeout-s", "120", "--log-level", "warning") as fleet:
        valid = await asyncio.to_thread(fuzz, fleet.url, GenerationMode.POSITIVE, 16)
        wrong = await asyncio.to_thread(fuzz, fleet.url, GenerationMode.NEGATIVE, 16)
    # The fuzzer leaves the document itself alone.
    assert set(valid) | {"/openapi.json"} == {one.path for one in ENDPOINTS}
    assert 200 in valid["/v1/chat/completions"]
    assert 200 in valid["/v1/completions"]
    assert wrong["/v1/chat/completions"] <= {400, 404, 415}
