"""OpenTelemetry: what an OTLP collector gets from a gateway process; what is said without the extra."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.gateway.gateway_process import gateway_process
from tests.patience import PATIENCE_S
from transom.errors import ConfigError
from transom.gateway.otel import make_exporter
from transom.tokenizer import Tokenizer

PNG = "data:image/png;base64,iVBORw0KGgo="
CHAT: dict[str, Any] = {
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": PNG}},
                {"type": "text", "text": "very private"},
            ],
        }
    ]
}
TRACE = "0af7651916cd43dd8448eb211c80319c"
OTHER = "1af7651916cd43dd8448eb211c80319d"
PARENT = "b7ad6b7169203331"
QUICK = {"OTEL_BSP_SCHEDULE_DELAY": "50"}


class Collector:
    """An OTLP collector that keeps what it gets."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.raw = b""
        self.resource: dict[str, str] = {}
        self.headers: dict[str, str] = {}
        self.url = ""
        self._news = asyncio.Condition()

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        parsed = ExportTraceServiceRequest.FromString(body)
        async with self._news:
            self.raw += body
            self.headers = dict(request.headers)
            for resource in parsed.resource_spans:
                self.resource = {one.key: one.value.string_value for one in resource.resource.attributes}
                for scope in resource.scope_spans:
                    self.spans += scope.spans
            self._news.notify_all()
        return web.Response(content_type="application/x-protobuf")

    async def wait_for(self, name: str, count: int = 1) -> list[Any]:
        def found() -> list[Any]:
            return [span for span in self.spans if span.name == name]

        async with asyncio.timeout(PATIENCE_S), self._news:
            await self._news.wait_for(lambda: len(found()) >= count)
            return found()


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield collector
    finally:
        await runner.cleanup()


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


async def test_a_request_becomes_spans_of_all_stages(tokenizer: Tokenizer) -> None:
    async with collecting() as collector:
        env = QUICK | {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=ours",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=test",
        }
        async with gateway_process(tokenizer, "--otel", env=env) as fleet, aiohttp.ClientSession() as http:
            sent = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            async with http.post(f"{fleet.url}/v1/chat/completions", json=CHAT, headers=sent) as response:
                assert response.status == 200
                answer = await response.json()
            (root,) = await collector.wait_for("POST /v1/chat/completions")
            item = {"input": CHAT["messages"][0]["content"][0]}
            async with http.post(f"{fleet.url}/v1/media/embeddings", json=item) as response:
                assert response.status == 200
            for flag in ("00", "01"):  # the first one's client does not want it sampled
                other = {"traceparent": f"00-{OTHER}-{PARENT}-{flag}"}
                async with http.post(f"{fleet.url}/v1/completions", json={}, headers=other) as response:
                    assert response.status == 400
        # The last batch comes when the gateway ends.
        (refused,) = await collector.wait_for("POST /v1/completions")
    assert collector.resource["service.name"] == "transom-gateway"
    assert collector.resource["deployment.environment"] == "test"
    assert collector.headers["x-tenant"] == "ours"
    assert (root.trace_id.hex(), root.parent_span_id.hex(), root.kind) == (TRACE, PARENT, 2)
    told = attributes(root)
    assert told["transom.request_id"] == answer["id"]
    assert told["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"]
    assert (told["http.response.status_code"], told["http.route"]) == (200, "/v1/chat/completions")
    ours = [span for span in collector.spans if span.trace_id == root.trace_id]
    stages = {span.name: span for span in ours if span.parent_span_id == root.span_id}
    assert set(stages) == {"gateway", "encoder", "prefill", "decode"}
    assert attributes(stages["encoder"])["transom.modality"] == "image"
    assert attributes(stages["prefill"])["transom.worker"] == "prefill-0"
    for span in ours:
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
    steps = {span.name for span in ours if span.parent_span_id == stages["encoder"].span_id}
    assert "encoder.forward" in steps
    assert refused.trace_id.hex() == OTHER
    assert attributes(refused)["error.type"] == "invalid_request"
    (item_root,) = await collector.wait_for("POST /v1/media/embeddings")
    below = {span.name for span in collector.spans if span.trace_id == item_root.trace_id}
    assert {"gateway", "encoder", "encoder.forward"} < below
    assert b"private" not in collector.raw
    assert b"tcp://" not in collector.raw


async def test_a_collector_that_is_away_costs_nobody_anything(tokenizer: Tokenizer) -> None:
    env = QUICK | {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    async with gateway_process(tokenizer, "--otel", env=env) as fleet, aiohttp.ClientSession() as http:
        for _ in range(3):
            async with http.post(f"{fleet.url}/v1/chat/completions", json=CHAT) as response:
                assert response.status == 200


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "'zipkin' is not one of otlp, console, none"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "only http/protobuf is"),
        ({"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"}, "only http/protobuf is"),
    ],
)
def test_what_is_not_supported_is_named(variables: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_exporter(variables)


def test_none_exports_nothing() -> None:
    assert make_exporter({"OTEL_TRACES_EXPORTER": "none"}) is None


async def test_without_the_extra_the_gateway_says_what_to_install() -> None:
    hidden = "import sys; sys.modules['opentelemetry'] = None"
    code = f"{hidden}\nfrom transom.cli import main\nsys.exit(main(['gateway', '--otel']))"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stderr=asyncio.subprocess.PIPE)
    async with asyncio.timeout(PATIENCE_S):
        _, errors = await process.communicate()
    assert process.returncode == 2
    assert b"otel is on, but opentelemetry is not installed: pip install 'transom[otel]'" in errors
    assert b"Traceback" not in errors
