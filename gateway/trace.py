"""Where the time of a request went: spans of all stages, for requests that run and the last ones that ended.

Gateway process. Only times, counts and names of workers are kept: no text, no media, no addresses. Encoders
report when their steps ran, other workers how long theirs took; the gateway's own clock places them.
"""

from __future__ import annotations

import hmac
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transom.errors import NotFoundError
from transom.gateway.exchange import Exchange
from transom.gateway.output import ChoiceOutput
from transom.gateway.requests import LiveRequest
from transom.gateway.timeline import Timeline
from transom.messages import EncodeDone

Span = dict[str, Any]
WorkerName = Callable[[str], str]

_GATEWAY_STEPS = ("body", "parse", "prepare", "admit", "compile", "send")
_ITEM_STEPS = ("fetch", "decode", "preprocess", "batch", "forward", "send")
MAX_NOTES = 8
_MAX_ITEM_SPANS = 200


@dataclass(slots=True, kw_only=True)
class Trace:
    """One client request. `owner` is the digest of the API key that sent it."""

    id: str
    kind: str
    model: str
    owner: bytes
    timeline: Timeline
    exchange: Exchange
    outputs: Sequence[ChoiceOutput]
    usage: Callable[[], dict[str, Any]]


class TraceBook:
    """The last `limit` traces; running ones leave only when there are more than that of them."""

    def __init__(self, limit: int, worker_name: WorkerName) -> None:
        self._limit = limit
        self._worker_name = worker_name
        self._running: OrderedDict[str, Trace] = OrderedDict()
        self._ended: OrderedDict[str, tuple[bytes, dict[str, Any]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._running) + len(self._ended)

    @contextmanager
    def record(self, trace: Trace) -> Iterator[None]:
        """Keep a trace; when the block ends it becomes plain data, so that nothing else is held."""
        if self._limit:
            self._running[trace.id] = trace
            self._trim()
        try:
            yield
        finally:
            if self._running.pop(trace.id, None) is not None:
                self._ended[trace.id] = (trace.owner, self.show(trace))
                self._trim()

    def find(self, id: str, owner: bytes) -> dict[str, Any]:
        """Return a trace as JSON; raise NotFoundError when there is none that this key may see."""
        running = self._running.get(id)
        if running is not None:
            held, data = running.owner, self.show(running)
        else:
            held, data = self._ended.get(id, (b"", {}))
        if not data or not hmac.compare_digest(held, owner):
            raise NotFoundError(f"no trace of this request; the last {self._limit} are kept", param="id")
        return data

    def _trim(self) -> None:
        while len(self) > self._limit:
            (self._ended or self._running).popitem(last=False)

    def show(self, trace: Trace) -> dict[str, Any]:
        """Return a trace as JSON."""
        timeline = trace.timeline
        live = trace.exchange.choices[0] if trace.exchange.choices else None
        running = timeline.ended_ms is None
        return {
            "id": trace.id,
            "object": "request.trace",
            "kind": trace.kind,
            "model": trace.model,
            "created": int(timeline.created_s),
            "state": "running" if running else "finished",
            "status": None if running else timeline.status,
            "error": timeline.error or None,
            "finish_reasons": [output.finish_reason for output in trace.outputs],
            "ttft_ms": _round(timeline.ttft_ms),
            "duration_ms": _round(timeline.total_ms),
            "spans": spans(timeline, live, trace.outputs, self._worker_name),
            "media": media_items(live, self._worker_name) if live else [],
            "usage": trace.usage(),
        }


def _round(value_ms: float | None) -> float | None:
    return None if value_ms is None else round(value_ms, 3)


def _span(
    name: str,
    stage: str,
    start_ms: float,
    end_ms: float,
    *,
    worker: str | None = None,
    item: int | None = None,
    running: bool = False,
) -> Span:
    start_ms = max(0.0, start_ms)
    return {
        "name": name,
        "stage": stage,
        "worker": worker,
        "item": item,
        "start_ms": _round(start_ms),
        "duration_ms": _round(max(0.0, end_ms - start_ms)),
        "running": running,
    }


def spans(
    timeline: Timeline, live: LiveRequest | None, outputs: Sequence[ChoiceOutput], worker_name: WorkerName
) -> list[Span]:
    """Return the spans in the order of the pipeline; of several choices, those of the first."""
    found, start_ms = gateway_spans(timeline)
    if live is not None:
        for item, work in sorted(live.encoders.items()):
            worker = worker_name(work.address)
            found += item_spans(timeline, worker, item, live.encode_done.get(item), start_ms)
        found += _prefill_spans(timeline, live, start_ms, worker_name(live.prefill.address))
        if timeline.ttft_ms is not None and outputs[0].completion_tokens > 1:
            found += _decode_spans(timeline, live, timeline.ttft_ms, worker_name(live.decoder.address))
    return found


def gateway_spans(timeline: Timeline) -> tuple[list[Span], float]:
    """Return the gateway's own steps and when the last of them ended: when the workers were told."""
    found: list[Span] = []
    start_ms = 0.0
    for step in _GATEWAY_STEPS:
        if step in timeline.marks_ms:
            found.append(_span(step, "gateway", start_ms, timeline.marks_ms[step]))
            start_ms = timeline.marks_ms[step]
    return found, start_ms


def item_spans(
    timeline: Timeline, worker: str, item: int, done: EncodeDone | None, sent_ms: float
) -> Iterator[Span]:
    """Yield what became of a media item at its encoder."""
    if done is None:
        running = timeline.ended_ms is None
        yield _span(
            "encode", "encoder", sent_ms, timeline.total_ms, worker=worker, item=item, running=running
        )
        return
    own = [span for span in done.spans[:_MAX_ITEM_SPANS] if span[0] in _ITEM_STEPS]
    if done.cache_hit:
        begin_ms = max((start + duration for name, start, duration in own if name == "fetch"), default=0.0)
        sends = [start for name, start, _ in own if name == "send"]
        own.append(("cached", begin_ms, max(0.0, min(sends, default=begin_ms) - begin_ms)))
    # As the encoder saw them: stages of one item overlap and take turns.
    for name, start_ms, duration_ms in sorted(own, key=lambda span: span[1]):
        begin_ms = sent_ms + start_ms
        yield _span(name, "encoder", begin_ms, begin_ms + duration_ms, worker=worker, item=item)


def _prefill_spans(timeline: Timeline, live: LiveRequest, sent_ms: float, worker: str) -> Iterator[Span]:
    if timeline.ttft_ms is None:
        running = timeline.ended_ms is None
        yield _span("prefill", "prefill", sent_ms, timeline.total_ms, worker=worker, running=running)
        return
    steps = _steps(live.timings_ms, "prefill") or {"prefill": timeline.ttft_ms - sent_ms}
    yield from _before(steps, "prefill", sent_ms, timeline.ttft_ms, worker)


def _decode_spans(timeline: Timeline, live: LiveRequest, first_ms: float, worker: str) -> Iterator[Span]:
    steps = _steps(live.timings_ms, "decode")
    if not steps:
        running = timeline.ended_ms is None
        yield _span("decode", "decode", first_ms, timeline.total_ms, worker=worker, running=running)
        return
    placed = list(_before(steps, "decode", first_ms, timeline.total_ms, worker))
    if placed[0]["start_ms"] > first_ms:
        yield _span("handoff", "decode", first_ms, placed[0]["start_ms"], worker=worker)
    yield from placed


def _steps(timings_ms: Mapping[str, float], stage: str) -> dict[str, float]:
    """Return a stage's steps: its timings come as `prefill_queue`, `prefill_compute` and so on."""
    prefix = f"{stage}_"
    return {
        key.removeprefix(prefix): value
        for key, value in timings_ms.items()
        if key == stage or key.startswith(prefix)
    }


def _before(
    steps: Mapping[str, float], stage: str, first_ms: float, end_ms: float, worker: str
) -> Iterator[Span]:
    """Yield steps that follow each other and end at a known moment."""
    cursor_ms = max(first_ms, end_ms - sum(steps.values()))
    for name, duration_ms in steps.items():
        until_ms = min(cursor_ms + duration_ms, end_ms)
        yield _span(name, stage, cursor_ms, until_ms, worker=worker)
        cursor_ms = until_ms


def media_items(live: LiveRequest, worker_name: WorkerName) -> list[dict[str, Any]]:
    """Return what became of each media item of a choice."""
    return [
        media_item(item, worker_name(work.address), live.encode_done.get(item))
        for item, work in sorted(live.encoders.items())
    ]


def media_item(item: int, worker: str, done: EncodeDone | None) -> dict[str, Any]:
    """Return what became of a media item."""
    return {
        "item": item,
        "worker": worker,
        "modality": done.modality if done else None,
        "cache_hit": done.cache_hit if done else None,
        "tokens": done.media_tokens if done else None,
        "duration_ms": _round(done.timings_ms.get("total")) if done else None,
        "notes": list(done.notes[:MAX_NOTES]) if done else [],
    }
