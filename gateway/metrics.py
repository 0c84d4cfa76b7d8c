"""What the gateway counts about client requests, for Prometheus.

Gateway process. Every label has a fixed set of values; nothing that a client sends becomes one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from prometheus_client import Counter, Gauge, Histogram

from transom.errors import TransomError
from transom.gateway.exchange import Exchange
from transom.gateway.output import ChoiceOutput
from transom.gateway.timeline import Timeline
from transom.messages import PromptStats
from transom.metrics import SECONDS_BUCKETS, Collector

Endpoint = Literal["chat", "completion", "media_embedding"]
STATUSES = frozenset({200, 400, 401, 404, 408, 413, 415, 417, 429, 499, 500, 502, 503, 504})
# Time per output token: finer at the short end than times of whole requests.
_TPOT_BUCKETS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_CAUSES = {499: "client", 502: "worker_lost", 504: "deadline"}


class GatewayMetrics:
    """Made once per gateway; its methods run on the event loop."""

    def __init__(self) -> None:
        self.requests = Counter(
            "transom_requests", "Client requests by outcome.", ["endpoint", "status"], registry=None
        )
        self.in_flight = Gauge(
            "transom_requests_in_flight", "Client requests that are being read or answered.", registry=None
        )
        self.ttft = Histogram(
            "transom_request_ttft_seconds",
            "From the request's arrival to its first output token.",
            buckets=SECONDS_BUCKETS,
            registry=None,
        )
        self.e2e = Histogram(
            "transom_request_e2e_seconds",
            "From the request's arrival to the end of its answer; complete answers only.",
            buckets=SECONDS_BUCKETS,
            registry=None,
        )
        self.tpot = Histogram(
            "transom_request_tpot_seconds",
            "Mean time per output token after the first; complete answers of one choice.",
            buckets=_TPOT_BUCKETS,
            registry=None,
        )
        self.prompt_tokens = Counter(
            "transom_prompt_tokens", "Prompt tokens by what they stand for.", ["kind"], registry=None
        )
        self.cached_tokens = Counter(
            "transom_cached_prompt_tokens", "Prompt tokens whose KV was found in a cache.", registry=None
        )
        self.completion_tokens = Counter(
            "transom_completion_tokens", "Output tokens by part of the answer.", ["kind"], registry=None
        )
        self.media = Counter(
            "transom_media_items",
            "Encoded media items by modality and embedding cache result.",
            ["modality", "cache"],
            registry=None,
        )
        self.aborts = Counter(
            "transom_aborts",
            "Requests that ended before their answer was complete.",
            ["cause"],
            registry=None,
        )

        self.key_requests = Counter(
            "transom_key_requests",
            "Requests by the name of their API key and what its limits made of them.",
            ["key", "outcome"],
            registry=None,
        )
        self.key_in_flight = Gauge(
            "transom_key_requests_in_flight", "Requests at once by API key.", ["key"], registry=None
        )

    def count_key(self, label: str, outcome: str) -> None:
        """Count what a key's limits made of a request."""
        self.key_requests.labels(label, outcome).inc()

    def change_key(self, label: str, change: int) -> None:
        """Take note that a key has more or fewer requests at once."""
        self.key_in_flight.labels(label).inc(change)

    def collectors(self) -> list[Collector]:
        """Return all metrics for the registry of the process."""
        return [
            self.requests, self.in_flight, self.ttft, self.e2e, self.tpot, self.prompt_tokens,
            self.cached_tokens, self.completion_tokens, self.media, self.aborts,
            self.key_requests, self.key_in_flight,
        ]  # fmt: skip

    @contextmanager
    def request(self, endpoint: Endpoint, timeline: Timeline) -> Iterator[None]:
        """Count one client request by how it ends, refused ones too."""
        self.in_flight.inc()
        try:
            yield
        except TransomError as error:
            timeline.settle(error.status, error.code)
            raise
        except asyncio.CancelledError:
            timeline.settle(499, "cancelled")
            raise
        except ConnectionError:
            timeline.settle(499, "cancelled")
            raise
        except Exception:
            timeline.settle(500, "internal_error")
            raise
        finally:
            self.in_flight.dec()
            status = timeline.status if timeline.status in STATUSES else "other"
            self.requests.labels(endpoint, status).inc()

    def answered(
        self,
        timeline: Timeline,
        exchange: Exchange,
        outputs: Sequence[ChoiceOutput],
        stats: Sequence[PromptStats],
    ) -> None:
        """Take the times and tokens of a request that was sent to the fleet; `stats` one per prompt."""
        if timeline.ttft_ms is not None:
            self.ttft.observe(timeline.ttft_ms / 1000)
        if timeline.status == 200:
            self._complete(timeline, outputs)
        else:
            self.aborts.labels(_CAUSES.get(timeline.status, "worker_failed")).inc()
        for one in stats:
            media_tokens = one.image_tokens + one.video_tokens + one.audio_tokens
            self.prompt_tokens.labels("text").inc(max(0, one.prompt_tokens - media_tokens))
            self.prompt_tokens.labels("image").inc(one.image_tokens)
            self.prompt_tokens.labels("video").inc(one.video_tokens)
            self.prompt_tokens.labels("audio").inc(one.audio_tokens)
            self.cached_tokens.inc(one.cached_tokens)
        for output in outputs:
            self.completion_tokens.labels("reasoning").inc(output.reasoning_tokens)
            self.completion_tokens.labels("answer").inc(output.completion_tokens - output.reasoning_tokens)
        for live in exchange.choices:
            for done in live.encode_done.values():
                self.media.labels(done.modality, "hit" if done.cache_hit else "miss").inc()

    def _complete(self, timeline: Timeline, outputs: Sequence[ChoiceOutput]) -> None:
        self.e2e.observe(timeline.total_ms / 1000)
        if len(outputs) == 1 and outputs[0].completion_tokens > 1 and timeline.ttft_ms is not None:
            later_ms = timeline.total_ms - timeline.ttft_ms
            self.tpot.observe(later_ms / 1000 / (outputs[0].completion_tokens - 1))
