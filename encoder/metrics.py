"""What an encoder counts about items and batches, for Prometheus.

Encoder process. Every label has a fixed set of values; nothing that a client sends becomes one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from transom.messages import Modality
from transom.metrics import SECONDS_BUCKETS, SIZE_BUCKETS, Collector

if TYPE_CHECKING:
    from transom.encoder.ranks.seat import Seat

# Keys of an item's timings that become series.
STAGES = ("queue", "fetch", "decode", "preprocess", "batch", "forward", "send", "total")
SHARE_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class EncoderMetrics:
    """Made once per encoder; its methods run on the event loop."""

    def __init__(self) -> None:
        self.items = Counter(
            "transom_encoder_items", "Items by modality and outcome.", ["modality", "outcome"], registry=None
        )
        self.stage_seconds = Histogram(
            "transom_encoder_stage_seconds",
            "Time of an item by stage; stages of one item overlap.",
            ["modality", "stage"],
            buckets=SECONDS_BUCKETS,
            registry=None,
        )
        self.batch_pieces = Histogram(
            "transom_encoder_batch_pieces",
            "Pictures, video units or sound segments in one forward.",
            ["lane"],
            buckets=SIZE_BUCKETS,
            registry=None,
        )
        self.forward_seconds = Histogram(
            "transom_encoder_forward_seconds",
            "Time of one forward.",
            ["lane"],
            buckets=SECONDS_BUCKETS,
            registry=None,
        )

        self.fetches = Counter(
            "transom_encoder_fetches", "Requests for URLs by outcome.", ["outcome"], registry=None
        )
        self.video_units = Counter(
            "transom_encoder_video_units", "Units of videos that were decoded.", registry=None
        )
        self.first_chunk_share = Histogram(
            "transom_encoder_first_chunk_decoded_ratio",
            "Share of a video that was decoded when its first embeddings left.",
            buckets=SHARE_BUCKETS,
            registry=None,
        )

    def collectors(self) -> tuple[Collector, ...]:
        """Return all of them."""
        return (
            self.items,
            self.stage_seconds,
            self.batch_pieces,
            self.forward_seconds,
            self.fetches,
            self.video_units,
            self.first_chunk_share,
        )

    def served(self, modality: Modality, timings_ms: Mapping[str, float], *, is_hit: bool) -> None:
        """Count an item that was sent whole."""
        self.items.labels(modality, "hit" if is_hit else "encoded").inc()
        for stage in STAGES:
            if stage in timings_ms:
                self.stage_seconds.labels(modality, stage).observe(timings_ms[stage] / 1000)

    def failed(self, modality: Modality, status: int) -> None:
        """Count an item that failed: by the client's fault, by overload, or by ours."""
        outcome = "overloaded" if status == 429 else "refused" if 400 <= status < 500 else "failed"
        self.items.labels(modality, outcome).inc()

    def first_chunk(self, decoded_share: float) -> None:
        """Count a video whose first embeddings leave."""
        self.first_chunk_share.observe(decoded_share)

    def batch(self, lane: str, pieces: int, seconds: float) -> None:
        """Count one forward."""
        self.batch_pieces.labels(lane).observe(pieces)
        self.forward_seconds.labels(lane).observe(seconds)


class RankCollector:
    """The figures of each rank. The label is the rank's number, of which there are as many as ranks."""

    def __init__(self, seats: Callable[[], Sequence[Seat]]) -> None:
        self._seats = seats

    def collect(self) -> Iterator[Metric]:
        """Yield one family per figure."""
        ready = GaugeMetricFamily(
            "transom_encoder_rank_ready", "1 when the rank takes pieces.", labels=["rank"]
        )
        outstanding = GaugeMetricFamily(
            "transom_encoder_rank_outstanding", "Work that the rank holds, in full forwards.", labels=["rank"]
        )
        forwards = CounterMetricFamily("transom_encoder_rank_forwards", "Forwards.", labels=["rank"])
        pieces = CounterMetricFamily("transom_encoder_rank_pieces", "Pieces embedded.", labels=["rank"])
        busy = CounterMetricFamily("transom_encoder_rank_busy_seconds", "Time in forwards.", labels=["rank"])
        restarts = CounterMetricFamily(
            "transom_encoder_rank_restarts", "Starts after a death.", labels=["rank"]
        )
        for seat in self._seats():
            label, figures = [str(seat.index)], seat.figures
            ready.add_metric(label, float(seat.ready))
            outstanding.add_metric(label, seat.outstanding)
            forwards.add_metric(label, figures.batches)
            pieces.add_metric(label, figures.pieces)
            busy.add_metric(label, figures.busy_s)
            restarts.add_metric(label, figures.restarts)
        yield from (ready, outstanding, forwards, pieces, busy, restarts)
