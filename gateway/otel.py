"""A request's timeline as OpenTelemetry spans, sent by OTLP as the standard OTEL_* variables say.

Gateway process; needs the extra `otel`, so import it only where tracing is switched on. Spans are made when
a request has ended, from the same data as GET /v1/requests/{id}/trace: no text, no media, no addresses.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from opentelemetry import propagate
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context

from transom import __version__
from transom.errors import ConfigError
from transom.gateway.telemetry import Observed, Telemetry
from transom.gateway.timeline import Timeline

logger = logging.getLogger(__name__)

_NAME = "transom-gateway"
_FLUSH_S = 1.0
Attributes = dict[str, str | int | float | bool]


def make_exporter(environ: Mapping[str, str]) -> SpanExporter | None:
    """Return the exporter that the environment asks for; None for none."""
    wanted = environ.get("OTEL_TRACES_EXPORTER", "otlp").strip() or "otlp"
    if wanted == "none":
        return None
    if wanted == "console":
        return ConsoleSpanExporter()
    if wanted != "otlp":
        raise ConfigError(f"OTEL_TRACES_EXPORTER {wanted!r} is not one of otlp, console, none")
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = environ.get(name, "http/protobuf").strip()
        if protocol not in ("", "http/protobuf"):
            raise ConfigError(f"{name} {protocol!r} is not supported, only http/protobuf is")
    return OTLPSpanExporter()


class SpanTelemetry(Telemetry):
    """Sends spans in batches from a thread of the library; a full queue drops spans, nothing waits."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        exporter = make_exporter(environ)
        resource = Resource.create({"service.version": __version__})
        if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": _NAME}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        if exporter is not None:
            self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("transom.gateway", __version__)

    @contextmanager
    def request(self, headers: Mapping[str, str], path: str, timeline: Timeline) -> Iterator[Observed]:
        observed = Observed(timeline)
        try:
            yield observed
        finally:
            try:
                export_request(self._tracer, propagate.extract(headers), path, observed)
            except Exception:  # tracing may fail, the request may not
                logger.exception("a request could not be traced")

    async def close(self) -> None:
        """Send what is left, but not for long: the collector may be away."""
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(done.set)

        threading.Thread(target=shut_down, name="otel shutdown", daemon=True).start()
        with suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_S):
                await done.wait()


def export_request(tracer: Tracer, parent: Context, path: str, observed: Observed) -> None:
    """Make the spans of an ended request: one for all, one a stage and worker and item, one a step."""
    timeline = observed.timeline
    start_ns = int(timeline.created_s * 1e9)

    def at(ms: float) -> int:
        return start_ns + int(ms * 1e6)

    trace = observed.show() if observed.show is not None else {}
    root = tracer.start_span(
        f"POST {path}",
        context=parent,
        kind=SpanKind.SERVER,
        attributes=_attributes(path, timeline.status, timeline.error, trace),
        start_time=start_ns,
    )
    if timeline.status >= 500:
        root.set_status(Status(StatusCode.ERROR, timeline.error))
    inside_root = set_span_in_context(root)
    for (stage, worker, item), steps in _by_stage(trace.get("spans", ())).items():
        attributes: Attributes = {"transom.stage": stage}
        if worker is not None:
            attributes["transom.worker"] = worker
        if item is not None:
            attributes |= _media_attributes(trace, item)
        ends = [step["start_ms"] + step["duration_ms"] for step in steps]
        span = tracer.start_span(
            stage,
            context=inside_root,
            attributes=attributes,
            start_time=at(min(step["start_ms"] for step in steps)),
        )
        for step, end_ms in zip(steps, ends, strict=True):
            child = tracer.start_span(
                f"{stage}.{step['name']}",
                context=set_span_in_context(span),
                start_time=at(step["start_ms"]),
            )
            child.end(at(end_ms))
        span.end(at(max(ends)))
    root.end(at(timeline.total_ms))


def _by_stage(spans: Any) -> dict[tuple[str, str | None, int | None], list[dict[str, Any]]]:
    found: dict[tuple[str, str | None, int | None], list[dict[str, Any]]] = {}
    for span in spans:
        found.setdefault((span["stage"], span["worker"], span["item"]), []).append(span)
    return found


def _attributes(path: str, status: int, error: str, trace: Mapping[str, Any]) -> Attributes:
    found: Attributes = {
        "http.request.method": "POST",
        "http.route": path,
        "http.response.status_code": status,
    }
    if error:
        found["error.type"] = error
    if trace:
        found |= {"transom.request_id": trace["id"], "gen_ai.request.model": trace["model"]}
    if "usage" in trace:
        usage = trace["usage"]
        found |= {
            "gen_ai.usage.input_tokens": usage["prompt_tokens"],
            "gen_ai.usage.output_tokens": usage["completion_tokens"],
            "transom.cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        }
    if trace.get("ttft_ms") is not None:
        found["transom.ttft_ms"] = trace["ttft_ms"]
    return found


def _media_attributes(trace: Mapping[str, Any], item: int) -> Attributes:
    found: Attributes = {"transom.item": item}
    for media in trace["media"]:
        if media["item"] == item:
            names = ("modality", "cache_hit", "tokens")
            found |= {f"transom.{name}": media[name] for name in names if media[name] is not None}
    return found
