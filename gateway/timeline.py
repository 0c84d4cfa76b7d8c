"""When what happened to one client request, and the one log line that says so.

Gateway process; the stages' own timings come to it inside their messages.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from transom.errors import TransomError
from transom.gateway.exchange import Exchange
from transom.gateway.output import ChoiceOutput

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Timeline:
    """Marks are milliseconds since the request's headers came."""

    started_s: float = field(default_factory=time.monotonic)
    marks_ms: dict[str, float] = field(default_factory=dict)
    problem: TransomError | None = None

    def _now_ms(self) -> float:
        return (time.monotonic() - self.started_s) * 1000

    def mark(self, name: str) -> None:
        """Take the time at which a step was done."""
        self.marks_ms[name] = self._now_ms()

    def first_token(self) -> None:
        """Take the time of the first output, once."""
        self.marks_ms.setdefault("ttft", self._now_ms())

    def log(
        self,
        kind: str,
        request_id: str,
        exchange: Exchange,
        outputs: Sequence[ChoiceOutput],
        status: int,
        problem: str,
    ) -> None:
        """Write the line: key=value pairs, milliseconds, addresses of the workers."""
        if self.problem is not None:
            status, problem = self.problem.status, self.problem.code
        stats = next((live.stats for live in exchange.choices if live.stats is not None), None)
        pairs: dict[str, object] = {
            "status": status,
            "error": problem,
            "finish": ",".join(output.finish_reason or "-" for output in outputs),
            "prompt": stats.prompt_tokens if stats else "",
            "cached": stats.cached_tokens if stats else "",
            "completion": sum(output.completion_tokens for output in outputs),
        }
        for name, value in (self.marks_ms | {"total": self._now_ms()}).items():
            pairs[f"{name}_ms"] = round(value, 1)
        if exchange.choices:
            live = exchange.choices[0]
            pairs["prefill"], pairs["decode"] = live.prefill.address, live.decode.address
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
