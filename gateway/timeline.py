"""When what happened to one client request, and the one log line that says so.

Gateway process; the stages' own timings come to it inside their messages.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from transom.gateway.exchange import Exchange
from transom.gateway.output import ChoiceOutput

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Timeline:
    """Marks are milliseconds since the request's headers came. `error` is the code of what ended it early."""

    started_s: float = field(default_factory=time.monotonic)
    created_s: float = field(default_factory=time.time)
    marks_ms: dict[str, float] = field(default_factory=dict)
    status: int = 200
    error: str = ""
    ended_ms: float | None = None

    def now_ms(self) -> float:
        """Return the time since the start."""
        return (time.monotonic() - self.started_s) * 1000

    @property
    def ttft_ms(self) -> float | None:
        """The time of the first output; None before it."""
        return self.marks_ms.get("ttft")

    @property
    def total_ms(self) -> float:
        """The time until the end, or until now."""
        return self.now_ms() if self.ended_ms is None else self.ended_ms

    def mark(self, name: str) -> None:
        """Take the time at which a step was done."""
        self.marks_ms[name] = self.now_ms()

    def first_token(self) -> None:
        """Take the time of the first output, once."""
        self.marks_ms.setdefault("ttft", self.now_ms())

    def settle(self, status: int, error: str) -> None:
        """Take note of what ends the request early; the first one counts."""
        if not self.error:
            self.status, self.error = status, error

    def end(self) -> None:
        """Stop the clock."""
        if self.ended_ms is None:
            self.ended_ms = self.now_ms()

    def log(self, kind: str, request_id: str, exchange: Exchange, outputs: Sequence[ChoiceOutput]) -> None:
        """Write the line: key=value pairs, milliseconds, addresses of the workers."""
        stats = next((live.stats for live in exchange.choices if live.stats is not None), None)
        pairs: dict[str, object] = {
            "status": self.status,
            "error": self.error,
            "finish": ",".join(output.finish_reason or "-" for output in outputs),
            "prompt": stats.prompt_tokens if stats else "",
            "cached": stats.cached_tokens if stats else "",
            "completion": sum(output.completion_tokens for output in outputs),
        }
        for name, value in (self.marks_ms | {"total": self.total_ms}).items():
            pairs[f"{name}_ms"] = round(value, 1)
        if exchange.choices:
            live = exchange.choices[0]
            pairs["prefill"], pairs["decode"] = live.prefill.address, live.decoder.address
            for name, value in live.timings_ms.items():
                pairs[f"llm.{name}_ms"] = round(value, 1)
            for item, done in live.encode_done.items():
                pairs[f"media{item}"] = f"{done.modality}:{live.encoders[item].address}"
                pairs[f"media{item}.hit"] = done.cache_hit
                if done.notes:
                    pairs[f"media{item}.notes"] = "; ".join(done.notes)
                for name, value in done.timings_ms.items():
                    pairs[f"media{item}.{name}_ms"] = round(value, 1)
        shown = " ".join(f"{name}={value}" for name, value in pairs.items() if value != "")
        logger.info("%s %s", kind, shown, extra={"request_id": request_id})
